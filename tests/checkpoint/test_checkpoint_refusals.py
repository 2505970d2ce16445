"""What can't be saved or loaded is refused on every rank, within seconds, and nothing is changed."""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, read_manifest, read_metadata, save_checkpoint
from lowlevel_zero.checkpoint.checksum import FileSum
from tests.support.checkpoints import AFTER, BEFORE, Pair, Training, differences
from tests.support.ranks import run_ranks


def schedule_of(pair: Pair) -> Any:
    return torch.optim.lr_scheduler.StepLR(pair.optimizer, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, not to be changed."""
    path = tmp_path_factory.mktemp("run") / "step-2"

    def save(rank: int, world_size: int) -> None:
        pair = Training().start().train(BEFORE, rank, world_size)
        save_checkpoint(path, pair.model, pair.optimizer, scheduler=schedule_of(pair))

    run_ranks(save, 2)
    return path


def refused(attempt: Callable[[], Any]) -> str:
    """How ``attempt`` is refused, in seconds."""
    start = time.monotonic()
    try:
        attempt()
    except Exception as error:
        assert time.monotonic() - start < 10
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


def load_refused(paths: list[Path], **options: Any) -> list[list[str]]:
    """What each of two ranks says to each path; nothing of model, optimizer and scheduler may have changed."""

    def load(rank: int, world_size: int) -> list[str]:
        pair = Training().start().train(AFTER, rank, world_size)
        schedule = schedule_of(pair)
        before, before_schedule = pair.whole(), schedule.state_dict()
        said = []
        for path in paths:
            load = partial(load_checkpoint, path, pair.model, pair.optimizer, scheduler=schedule, **options)
            said.append(refused(load))
            assert differences(before, pair.whole()) == []
            assert schedule.state_dict() == before_schedule
        return said

    by_rank = run_ranks(load, 2)
    return [list(said) for said in zip(*by_rank, strict=True)]


def copied(path: Path, to: Path) -> Path:
    to.mkdir(parents=True)
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


# Damaged files


def test_a_flipped_byte_and_a_missing_end_are_noticed_in_every_file(saved: Path, tmp_path: Path) -> None:
    paths, names = [], []
    for file in sorted(saved.iterdir()):
        data = file.read_bytes()
        flips = [0, len(data) // 3, len(data) // 2, len(data) - 1]
        spoiled = [data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :] for at in flips]
        spoiled += [data[: len(data) // 2], b""]
        for number, content in enumerate(spoiled):
            path = copied(saved, tmp_path / f"{file.name}-{number}")
            (path / file.name).write_bytes(content)
            paths.append(path)
            names.append(file.name)
        path = copied(saved, tmp_path / f"{file.name}-gone")
        (path / file.name).unlink()
        paths.append(path)
        names.append(file.name)
    assert len(names) == 5 * 7
    for name, said in zip(names, load_refused(paths), strict=True):
        assert any(line.startswith("ValueError") and name in line for line in said), (name, said)
        assert all("ValueError" in line for line in said)
    assert latest(tmp_path) is not None  # it judges by sizes alone


def test_without_verification_sizes_still_tell(saved: Path, tmp_path: Path) -> None:
    short = copied(saved, tmp_path / "short")
    (short / "__1_0.distcp").write_bytes((saved / "__1_0.distcp").read_bytes()[:-1])
    (said,) = load_refused([short], verify=False)
    assert all("__1_0.distcp has" in line for line in said)


def test_what_can_not_be_read_to_its_end_raises_on_all_ranks_and_another_load_mends_it(
    saved: Path, tmp_path: Path
) -> None:
    garbled = copied(saved, tmp_path / "garbled")
    places = [place for index, place in read_metadata(saved).storage_data.items() if index.fqn.startswith("model.")]
    with (garbled / "__1_0.distcp").open("rb+") as file:
        for place in places:
            if place.relative_path == "__1_0.distcp":
                file.seek(place.offset)
                file.write(bytes(place.length))

    def load(rank: int, world_size: int) -> str:
        pair, other = (Training().start().train(steps, rank, world_size) for steps in (AFTER, BEFORE))
        said = refused(partial(load_checkpoint, garbled, pair.model, pair.optimizer, verify=False))
        for each in (pair, other):
            load_checkpoint(saved, each.model, each.optimizer)
        assert differences(other.whole(), pair.whole()) == []
        return said

    for said in run_ranks(load, 2):
        assert "hold a part of it by now, so load a checkpoint before going on" in said


class Trap:
    """Runs something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_nothing_in_a_pickle_is_run(saved: Path, tmp_path: Path) -> None:
    """Not even where the manifest vouches for it."""
    mark = tmp_path / "run"
    paths = []
    for name in (".metadata", "objects.pt"):
        path = copied(saved, tmp_path / name)
        with (path / name).open("wb") as file:
            if name == ".metadata":
                pickle.dump(Trap(mark), file)
            else:
                torch.save({"extra": Trap(mark)}, file)
        manifest = read_manifest(path)
        files = {**manifest.files, name: FileSum.of(path / name)}
        (path / "lowlevel_zero.json").write_text(replace(manifest, files=files).to_text())
        read_manifest(path).check_files(path, [name])
        paths.append(path)
    for path, said in zip(paths, load_refused(paths), strict=True):
        assert all("ValueError" in line and path.name in line for line in said)
    assert not mark.exists()


# What isn't a checkpoint


def test_what_is_not_a_checkpoint_is_refused_and_told_from_one(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / ".metadata").write_bytes(b"x")
    empty = tmp_path / "empty"
    empty.mkdir()
    later = copied(saved, tmp_path / "else" / "later")
    content = json.loads((later / "lowlevel_zero.json").read_text())
    (later / "lowlevel_zero.json").write_text(json.dumps({**content, "format": 4}))
    cases = {
        file: "NotADirectoryError: .*got a file",
        file / "below": "NotADirectoryError|FileNotFoundError",
        saved.parent / "step-3": rf"FileNotFoundError: .*found nothing; latest\('{saved.parent}'\) finds {saved}",
        empty / "x" / "y": "FileNotFoundError: .*finds none either",
        foreign: "ValueError: .*torch.distributed.checkpoint's own: use dcp.load",
        empty: "ValueError: .*expected a checkpoint of lowlevel_zero",
        later: "ValueError: .*expected format 3, got 4: load it with the version",
    }
    for pattern, said in zip(cases.values(), load_refused(list(cases)), strict=True):
        for line in said:
            assert re.search(pattern, line), (pattern, line)


# Another model's


def test_another_model_is_refused_by_the_first_name_that_differs(saved: Path) -> None:
    def with_change(change: Callable[[nn.Module], None]) -> Callable[[], Pair]:
        class Changed(Training):
            def start(self, seed: int = 0) -> Pair:
                run = self.run
                model = run.model()
                change(model)
                deep = [p for p in model.parameters() if p.dim() >= 2]
                flat = [p for p in model.parameters() if p.dim() < 2]
                optimizer = LowLevelZeroOptimizer(
                    torch.optim.AdamW([{"params": deep}, {"params": flat, "weight_decay": 0.0}, {"params": []}]),
                    model=model,
                )
                return Pair(self, model, optimizer)

        return Changed().start

    def surplus(model: Any) -> None:
        model.register_parameter("added", nn.Parameter(torch.zeros(3)))

    def missing(model: Any) -> None:
        model.frozen.bias = None

    def reshaped(model: Any) -> None:
        model.frozen = nn.Linear(5, 5, bias=False)
        model.frozen.bias = nn.Parameter(torch.zeros(1, 5))

    def untied(model: Any) -> None:
        model.layers[-1].weight = nn.Parameter(model.layers[0].weight.detach().clone())

    def integer(model: Any) -> None:
        del model.frozen.bias
        model.frozen.register_buffer("bias", torch.zeros(5, dtype=torch.int64))

    cases: list[tuple[Callable[[Any], None], str]] = [
        (surplus, "added: the model has it, the checkpoint doesn't"),
        (missing, "frozen.bias: the checkpoint has it, the model doesn't"),
        (reshaped, r"frozen.bias: expected (1, 5), the checkpoint has (5,)"),
        (untied, "layers.3.weight: the model has it, the checkpoint doesn't"),
        (integer, "frozen.bias: expected int64, the checkpoint has float32"),
    ]

    def load(rank: int, world_size: int) -> list[str]:
        told = []
        for change, _ in cases:
            pair = with_change(change)()
            before = pair.whole()
            told.append(refused(partial(load_checkpoint, saved, pair.model, pair.optimizer)))
            assert differences(before, pair.whole()) == []
        return told

    for told in run_ranks(load, 2):
        for (_, expected), line in zip(cases, told, strict=True):
            assert line.startswith(f"ValueError: {expected}"), line


def test_other_groups_and_a_missing_scheduler_are_refused(saved: Path, tmp_path: Path) -> None:
    def load(rank: int, world_size: int) -> list[str]:
        pair = Training().start()
        model = Training().start().model
        one = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model)
        save_checkpoint(tmp_path / "plain", pair.model, pair.optimizer)
        names = dict(pair.model.named_parameters())
        moved = Training().start().model
        first = [p for name, p in moved.named_parameters() if names[name].dim() >= 2 or name == "one"]
        rest = [p for p in moved.parameters() if all(p is not q for q in first)]
        two = LowLevelZeroOptimizer(
            torch.optim.AdamW([{"params": first}, {"params": rest}, {"params": []}]), model=moved
        )
        return [
            refused(lambda: load_checkpoint(saved, model, one)),
            refused(lambda: load_checkpoint(saved, moved, two)),
            refused(
                lambda: load_checkpoint(tmp_path / "plain", pair.model, pair.optimizer, scheduler=schedule_of(pair))
            ),
        ]

    for one, two, three in run_ranks(load, 2):
        assert one.startswith("ValueError: expected 1 param groups, got 3: build the optimizer with the groups")
        assert two.startswith("ValueError: one: expected it in param group 0, which was saved without it")
        assert three.startswith("ValueError: scheduler: ")


# What can't be saved


def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")

    def save(rank: int, world_size: int) -> list[str]:
        pair = Training().start()
        model, optimizer = pair.model, pair.optimizer
        stranger = nn.Linear(2, 2)
        schedule = schedule_of(pair)
        schedule.where = tmp_path  # type: ignore[attr-defined]  # part of its state dict
        told = [
            refused(lambda: save_checkpoint(tmp_path / "a", model, optimizer, extra=Path("x"))),
            refused(lambda: save_checkpoint(tmp_path / "a", model, optimizer, extra=Path("x") if rank else 3)),
            refused(lambda: save_checkpoint(tmp_path / "a", model, optimizer, scheduler=schedule)),
            refused(lambda: save_checkpoint(tmp_path / "a", stranger, optimizer)),
            refused(lambda: save_checkpoint(tmp_path / "a", model, optimizer.optim)),  # type: ignore[arg-type]
            refused(lambda: save_checkpoint(tmp_path / "a", optimizer, optimizer)),  # type: ignore[arg-type]
            refused(lambda: save_checkpoint(tmp_path / "a", model, optimizer, keep=0)),
            refused(lambda: save_checkpoint(tmp_path / f"rank{rank}", model, optimizer)),
            refused(lambda: save_checkpoint(tmp_path / "file", model, optimizer)),
            refused(lambda: save_checkpoint(tmp_path / "file" / "a", model, optimizer)),
            refused(lambda: save_checkpoint(tmp_path / "full", model, optimizer)),
        ]
        optimizer.param_groups[0]["schedule"] = Quadratic()
        return [*told, refused(lambda: save_checkpoint(tmp_path / "a", model, optimizer))]

    expected = [
        ("TypeError: extra: expected what torch.load(weights_only=True) takes back",) * 2,
        ("RuntimeError: rank 1 could not save a checkpoint to", "TypeError: extra: expected what"),
        ("TypeError: scheduler['where']: expected what",) * 2,
        ("ValueError: model: expected all parameters of the optimizer in it",) * 2,
        ("TypeError: optimizer: expected a LowLevelZeroOptimizer, got AdamW",) * 2,
        ("TypeError: model: expected a torch.nn.Module",) * 2,
        ("ValueError: keep: expected a number of checkpoints",) * 2,
        ("RuntimeError: expected the same call on every rank, got rank 0 to save a checkpoint to",) * 2,
        ("NotADirectoryError: ",) * 2,
        ("NotADirectoryError: ",) * 2,
        ("FileExistsError: ",) * 2,
        ("TypeError: param_groups[0]['schedule']: expected what",) * 2,
    ]
    told = zip(*run_ranks(save, 2), strict=True)
    for beginnings, lines in zip(expected, told, strict=True):
        for beginning, line in zip(beginnings, lines, strict=True):
            assert line.startswith(beginning), line
    assert {place.name for place in tmp_path.iterdir()} == {"file", "full"}


class Quadratic:
    def __call__(self, step: int) -> float:
        return 1.0 / (1 + step) ** 2


def test_one_rank_alone_and_those_who_train_on_are_told_of_each_other(tmp_path: Path) -> None:
    def lonely(rank: int, world_size: int) -> list[str]:
        pair = Training().start()
        told = []
        for call in (save_checkpoint, load_checkpoint):
            if rank == 1:
                told.append(refused(partial(call, tmp_path / "a", pair.model, pair.optimizer)))
            else:
                told.append(refused(partial(pair.train, BEFORE, rank, world_size)))
            pair.optimizer.zero_grad()
            path = tmp_path / call.__name__
            save_checkpoint(path, pair.model, pair.optimizer)
            load_checkpoint(path, pair.model, pair.optimizer)
        return told

    for saving, loading in run_ranks(lonely, 2):
        expected = "RuntimeError: expected the same call on every rank, got rank 0 to step; rank 1 to "
        assert saving.startswith(f"{expected}save a checkpoint to {tmp_path / 'a'}: let every rank")
        assert loading.startswith(expected)


def test_dcp_s_own_planner_is_never_asked_for_bytes(saved: Path, tmp_path: Path) -> None:
    """It would unpickle an entry that is an object, not a tensor, without a check."""

    def save(rank: int, world_size: int) -> str:
        pair = Training().start()
        path = tmp_path / "a"
        name = "model.one"
        metadata = dcp.FileSystemReader(str(saved)).read_metadata()
        metadata.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
        stored = next(info for at, info in metadata.storage_data.items() if at.fqn == name)
        metadata.storage_data[dcp.metadata.MetadataIndex(name)] = stored
        if rank == 0:
            copied(saved, path)
            (path / ".metadata").write_bytes(pickle.dumps(metadata))
            manifest = read_manifest(path)
            entry = FileSum.of(path / ".metadata")
            text = replace(manifest, files={**manifest.files, ".metadata": entry}).to_text()
            (path / "lowlevel_zero.json").write_text(text)
        dist.barrier()
        return refused(lambda: load_checkpoint(path, pair.model, pair.optimizer))

    for line in run_ranks(save, 2):
        assert "model.one: expected a tensor, got a pickle" in line
