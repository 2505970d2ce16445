"""Checkpoints that can't be written or aren't the model's: clear errors on every rank, and nothing changed."""

from __future__ import annotations

import shutil
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


def trained_state(pair: Pair, width: int) -> dict[str, Any]:
    state = pair.state()
    for each in state["state"].values():
        each["exp_avg"] = torch.zeros(*(width + extent for extent in each["exp_avg"].shape))
    return state


OTHER = sgd(model_of().parameters())
BAD_FILES: list[tuple[str, Any, str, str]] = [
    ("save a plain model", lambda p, d: p.booster.save_model(model_of(), d("new.pt")), "TypeError", "boost the model"),
    (
        "save a plain optimizer",
        lambda p, d: p.booster.save_optimizer(p.optimizer.optim, d("new.pt")),
        "TypeError",
        "optimizer: expected what booster.boost returned with this plugin, got AdamW",
    ),
    ("load a plain model", lambda p, d: p.booster.load_model(model_of(), d("wider.pt")), "TypeError", "got Net"),
    (
        "save a model to a folder",
        lambda p, d: p.booster.save_model(p.model, d("folder")),
        "IsADirectoryError",
        "shard=True",
    ),
    (
        "save an optimizer to a folder",
        lambda p, d: p.booster.save_optimizer(p.optimizer, d("folder")),
        "IsADirectoryError",
        "folder: expected the path of a file to write, got a directory",
    ),
    (
        "save shards to a file",
        lambda p, d: p.booster.save_model(p.model, d("file.pt"), shard=True),
        "NotADirectoryError",
        "file.pt: expected a directory",
    ),
    (
        "save optimizer shards to a file",
        lambda p, d: p.booster.save_optimizer(p.optimizer, d("file.pt"), shard=True),
        "NotADirectoryError",
        "file.pt: expected a directory",
    ),
    (
        "save over another checkpoint",
        lambda p, d: p.booster.save_optimizer(p.optimizer, d("indexed"), shard=True),
        "FileExistsError",
        "found other.bin.index.json",
    ),
    ("save nowhere", lambda p, d: p.booster.save_model(p.model, d("no/new.pt")), "FileNotFoundError", "create"),
    (
        "save safetensors by another name",
        lambda p, d: p.booster.save_model(p.model, d("new.pt"), use_safetensors=True),
        "ValueError",
        "ends in .safetensors",
    ),
    (
        "save asynchronously by another name",
        lambda p, d: p.booster.save_optimizer(p.optimizer, d("new.pt"), use_async=True),
        "ValueError",
        "ends in .safetensors",
    ),
    (
        "save a scheduler to a folder",
        lambda p, d: p.booster.save_lr_scheduler(torch.optim.lr_scheduler.StepLR(OTHER, 1), d("folder")),
        "IsADirectoryError",
        "folder",
    ),
    ("load nothing", lambda p, d: p.booster.load_optimizer(p.optimizer, d("nothing.pt")), "RuntimeError", "nothing.pt"),
    ("load a folder", lambda p, d: p.booster.load_model(p.model, d("folder")), "IsADirectoryError", "folder"),
    (
        "load a wider model",
        lambda p, d: p.booster.load_model(p.model, d("wider.pt")),
        "ValueError",
        "inward.weight: expected (11, 7), ",
    ),
    (
        "load less",
        lambda p, d: p.booster.load_model(p.model, d("less.pt")),
        "ValueError",
        "model's again.bias, found none",
    ),
    (
        "load more",
        lambda p, d: p.booster.load_model(p.model, d("more.pt")),
        "ValueError",
        "found more: build the model",
    ),
    (
        "load other groups",
        lambda p, d: p.booster.load_optimizer(p.optimizer, d("groups.pt")),
        "ValueError",
        "expected param groups of [4, 4] parameters (frozen ones included), got [10]",
    ),
    (
        "load a model as optimizer",
        lambda p, d: p.booster.load_optimizer(p.optimizer, d("wider.pt")),
        "ValueError",
        "with 'state' and 'param_groups', got one with ['again.bias'",
    ),
    (
        "load other states",
        lambda p, d: p.optimizer.load_state_dict(trained_state(p, 1)),
        "ValueError",
        "inward.weight: expected exp_avg of its shape (11, 7), got (12, 8)",
    ),
]


def test_mistakes_are_refused_on_every_rank(tmp_path: Path, subtests: pytest.Subtests) -> None:
    prepared(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def rank(rank: int, world_size: int, what: str, mistake: Any, error: str, message: str) -> None:
        pair = boost(ours, precision="bf16")
        pair.train(rank, 0, 1)
        values, state = pair.values(), pair.state()
        try:
            mistake(pair, lambda name: str(tmp_path / name))
        finally:
            check_equal(values, pair.values())
            check_equal(state, pair.state())

    for (what, _, error, message), ran in run_cases_expecting(rank, 2, BAD_FILES):
        with subtests.test(what):
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


def test_one_rank_that_cannot_read_stops_all(tmp_path: Path) -> None:
    def rank(rank: int, world_size: int) -> None:
        pair = boost(ours, precision="fp32")
        folder = tmp_path / str(rank)
        folder.mkdir()
        torch.save(pair.model.unwrap().state_dict(), folder / "model.pt")
        shutil.rmtree(folder) if rank == 1 else None
        pair.booster.load_model(pair.model, str(folder / "model.pt"))

    first, second = run_ranks_expecting(rank, 2)
    assert first.message.startswith("rank 1 could not load its model: ")
    assert "model.pt" in second.message


@pytest.mark.parametrize(("unlucky", "missing"), [(0, "file"), (1, "folder"), (1, "groups")])
def test_one_rank_that_cannot_read_its_optimizer_stops_all(unlucky: int, missing: str, tmp_path: Path) -> None:
    """The others are past the first agreement by then."""

    def rank(rank: int, world_size: int) -> None:
        pair = boost(ours, precision="fp32")
        saved, own = tmp_path / "saved", tmp_path / str(rank)
        pair.booster.save_optimizer(
            pair.optimizer, str(saved if missing != "file" else saved.with_suffix(".pt")), missing != "file"
        )
        dist.barrier()
        if missing == "file":
            shutil.copy(saved.with_suffix(".pt"), own)
        else:
            shutil.copytree(saved, own)
        if rank == unlucky:
            gone = own / "pytorch_optim_group.bin" if missing == "groups" else own
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        pair.booster.load_optimizer(pair.optimizer, str(own))

    raised = run_ranks_expecting(rank, 2)
    assert raised[1 - unlucky].message.startswith(f"rank {unlucky} could not load its optimizer: ")
    assert str(tmp_path / str(unlucky)) in raised[unlucky].message
