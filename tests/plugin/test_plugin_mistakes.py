"""Checkpoints that can't be written or aren't the model's: clear errors on every rank, and nothing changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.checkpoint_io import CheckpointIndexFile

from lowlevel_zero.plugin import checkpoint_io
from tests.support.boosting import Pair, adamw, boost, check_equal, model_of, ours, sgd
from tests.support.patching import patch_rank
from tests.support.ranks import run_cases_expecting, run_ranks_expecting

SMALL = 0.001  # MiB: every parameter in a shard of its own


def prepared(tmp_path: Path) -> Path:
    """A file, a directory, a directory with an index, and checkpoints of this and another model."""
    (tmp_path / "file.pt").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").write_text("precious")
    (tmp_path / "indexed").mkdir()
    CheckpointIndexFile(tmp_path / "indexed").write_index_file("other.bin.index.json")
    torch.save(model_of(width=12).state_dict(), tmp_path / "wider.pt")
    less = model_of().state_dict()
    torch.save({**less, "more": torch.zeros(1)}, tmp_path / "more.pt")
    del less["again.bias"]
    torch.save(less, tmp_path / "less.pt")
    model = model_of(width=12)
    torch.save(adamw(model.parameters()).state_dict(), tmp_path / "groups.pt")
    return tmp_path


Mistake = Callable[[Pair, str], Any]
"""Of a boosted pair and the folder that is ``prepared``."""


def saving(what: str, name: str, **options: Any) -> Mistake:
    """``save_model`` or ``save_optimizer`` of the pair's, to a name in the folder."""
    return lambda pair, folder: getattr(pair.booster, f"save_{what}")(getattr(pair, what), folder + name, **options)


def loading(what: str, name: str) -> Mistake:
    return lambda pair, folder: getattr(pair.booster, f"load_{what}")(getattr(pair, what), folder + name)


def save_plain_optimizer(pair: Pair, folder: str) -> None:
    pair.booster.save_optimizer(pair.optimizer.optim, folder + "new.pt")


def save_scheduler_to_folder(pair: Pair, folder: str) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(model_of().parameters()), 1)
    pair.booster.save_lr_scheduler(scheduler, folder + "folder")


def load_other_states(pair: Pair, folder: str) -> None:
    state = pair.state()
    for each in state["state"].values():
        each["exp_avg"] = torch.zeros(*(1 + extent for extent in each["exp_avg"].shape))
    pair.optimizer.load_state_dict(state)


ANOTHER_NAME = "ends in .safetensors"
OTHER_GROUPS = "expected param groups of [4, 4] parameters (frozen ones included), got [10]"
OTHER_SHAPE = "inward.weight: expected exp_avg of its shape (11, 7), got (12, 8)"
PLAIN_OPTIMIZER = "optimizer: expected what booster.boost returned with this plugin, got AdamW"
BAD_FILES: list[tuple[Mistake, str, str]] = [
    (lambda pair, folder: pair.booster.save_model(model_of(), folder + "new.pt"), "TypeError", "boost the model"),
    (save_plain_optimizer, "TypeError", PLAIN_OPTIMIZER),
    (lambda pair, folder: pair.booster.load_model(model_of(), folder + "wider.pt"), "TypeError", "got Net"),
    (saving("model", "folder"), "IsADirectoryError", "shard=True"),
    (saving("optimizer", "folder"), "IsADirectoryError", "folder: expected the path of a file to write"),
    (saving("model", "file.pt", shard=True), "NotADirectoryError", "file.pt: expected a directory"),
    (saving("optimizer", "file.pt", shard=True), "NotADirectoryError", "file.pt: expected a directory"),
    (saving("optimizer", "indexed", shard=True), "FileExistsError", "found other.bin.index.json"),
    (saving("model", "no/new.pt"), "FileNotFoundError", "create"),
    (saving("model", "new.pt", use_safetensors=True), "ValueError", ANOTHER_NAME),
    (saving("optimizer", "new.pt", use_async=True), "ValueError", ANOTHER_NAME),
    (save_scheduler_to_folder, "IsADirectoryError", "folder"),
    (loading("optimizer", "nothing.pt"), "RuntimeError", "nothing.pt"),
    (loading("model", "folder"), "IsADirectoryError", "folder"),
    (loading("model", "wider.pt"), "ValueError", "inward.weight: expected the model's shape (11, 7), "),
    (loading("model", "less.pt"), "ValueError", "expected a tensor again.bias, which the model has, found none"),
    (loading("model", "more.pt"), "ValueError", "found more: the checkpoint is another model's: build the model"),
    (loading("optimizer", "groups.pt"), "ValueError", OTHER_GROUPS),
    (
        loading("optimizer", "wider.pt"),
        "ValueError",
        "with the keys 'state' and 'param_groups', got a dict with the keys ['again.bias'",
    ),
    (load_other_states, "ValueError", OTHER_SHAPE),
]


def test_mistakes_are_refused_on_every_rank(tmp_path: Path, subtests: pytest.Subtests) -> None:
    prepared(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def rank(rank: int, world_size: int, mistake: Mistake, error: str, message: str) -> None:
        pair = boost(ours, precision="bf16")
        pair.train(rank, 0, 1)
        values, state = pair.values(), pair.state()
        try:
            mistake(pair, f"{tmp_path}/")
        finally:
            check_equal(values, pair.values())
            check_equal(state, pair.state())

    for (_, error, message), ran in run_cases_expecting(rank, 2, BAD_FILES):
        with subtests.test(f"{error}: {message}"):
            raised = ran.raised()
            for each in raised:
                assert message in each.message or each.message.startswith("rank 0 could not save its")
            assert raised[0].type == error
            assert message in raised[0].message
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_rank_zero_cannot_write_is_told_to_all(tmp_path: Path) -> None:
    """An error in the middle of a sharded save: no rank hangs in a gather, and no index is left that would load."""

    def rank(rank: int, world_size: int) -> None:
        pair = boost(ours, precision="fp32")
        pair.train(rank, 0, 1)
        written = checkpoint_io.save_state_dict

        def full(state: Any, path: str, use_safetensors: bool) -> None:
            if "00003" in path:
                raise OSError("disk full")
            written(state, path, use_safetensors)

        patch_rank(checkpoint_io, "save_state_dict", full)
        pair.booster.save_optimizer(pair.optimizer, str(tmp_path / "o"), shard=True, size_per_shard=SMALL)

    first, second = run_ranks_expecting(rank, 2)
    assert first.message == "disk full"
    assert second.message == "rank 0 could not save its optimizer: OSError: disk full"
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == [
        "pytorch_optim-00001.bin",
        "pytorch_optim-00002.bin",
    ]


UNREADABLE = [("model", 1, "file"), ("optimizer", 0, "file"), ("optimizer", 1, "folder"), ("optimizer", 1, "groups")]


def test_one_rank_that_cannot_read_stops_all(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Of an optimizer the others are past the first agreement by then."""

    def rank(rank: int, world_size: int, what: str, unlucky: int, missing: str) -> None:
        pair = boost(ours, precision="fp32")
        case = tmp_path / f"{what}, {missing}"
        case.mkdir(exist_ok=True)
        saved, own = case / "saved", case / str(rank)
        saving(what, "saved", shard=missing != "file")(pair, f"{case}/")
        dist.barrier()
        shutil.copy(saved, own) if missing == "file" else shutil.copytree(saved, own)
        if rank == unlucky:
            gone = own / "pytorch_optim_group.bin" if missing == "groups" else own
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        loading(what, str(rank))(pair, f"{case}/")

    for (what, unlucky, missing), ran in run_cases_expecting(rank, 2, UNREADABLE):
        with subtests.test(f"{what}, {missing}"):
            raised = ran.raised()
            assert raised[1 - unlucky].message.startswith(f"rank {unlucky} could not load its {what}: ")
            assert str(tmp_path / f"{what}, {missing}" / str(unlucky)) in raised[unlucky].message
