"""What can't be saved or loaded is refused on every rank, within seconds, and nothing is changed."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, read_manifest, read_metadata, save_checkpoint
from lowlevel_zero.checkpoint.checksum import FileSum
from lowlevel_zero.checkpoint.contents import Contents
from tests.support.checkpoints import AFTER, BEFORE, Pair, Training, check_same
from tests.support.on_ranks import on_ranks
from tests.support.oracle import groups
from tests.support.ranks import run_ranks
from tests.support.saving import Calls, Keeping, adamw, check_refused, held, linear, names_in, refused, train, wrapped


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
            check_same(before, pair.whole())
            assert schedule.state_dict() == before_schedule
        return said

    by_rank = run_ranks(load, 2)
    return [list(said) for said in zip(*by_rank, strict=True)]


# Damaged files


def test_a_flipped_byte_and_a_missing_end_are_noticed_in_every_file(saved: Path, tmp_path: Path) -> None:
    paths, names = [], []
    for file in sorted(saved.iterdir()):
        data = file.read_bytes()
        flips = [0, len(data) // 3, len(data) // 2, len(data) - 1]
        spoiled = [data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :] for at in flips]
        spoiled += [data[: len(data) // 2], b""]
        for number, content in enumerate(spoiled):
            path = copytree(saved, tmp_path / f"{file.name}-{number}")
            (path / file.name).write_bytes(content)
            paths.append(path)
            names.append(file.name)
        path = copytree(saved, tmp_path / f"{file.name}-gone")
        (path / file.name).unlink()
        paths.append(path)
        names.append(file.name)
    assert len(names) == 5 * 7
    for name, said in zip(names, load_refused(paths), strict=True):
        assert any(line.startswith("ValueError") and name in line for line in said), (name, said)
        assert all("ValueError" in line for line in said)
    assert latest(tmp_path) is not None  # it judges by sizes alone
    short = copytree(saved, tmp_path / "short")
    (short / "__1_0.distcp").write_bytes((saved / "__1_0.distcp").read_bytes()[:-1])
    (said,) = load_refused([short], verify=False)
    assert all("__1_0.distcp has" in line for line in said)


@on_ranks(2)
def test_what_can_not_be_read_to_its_end_raises_on_all_ranks_and_another_load_mends_it(
    rank: int, saved: Path, tmp_path: Path
) -> None:
    garbled = tmp_path / "garbled"
    if rank == 0:
        copytree(saved, garbled)
        places = [place for at, place in read_metadata(saved).storage_data.items() if at.fqn.startswith("model.")]
        with (garbled / "__1_0.distcp").open("rb+") as file:
            for place in (place for place in places if place.relative_path == "__1_0.distcp"):
                file.seek(place.offset)
                file.write(bytes(place.length))
    pair, other = (Training().start().train(steps, rank, 2) for steps in (AFTER, BEFORE))
    told = refused(partial(load_checkpoint, garbled, pair.model, pair.optimizer, verify=False))
    assert "hold a part of it by now, so load a checkpoint before going on" in told
    assert "load a checkpoint" in refused(lambda: save_checkpoint(tmp_path / "half", pair.model, pair.optimizer))
    for each in (pair, other):
        load_checkpoint(saved, each.model, each.optimizer)
    check_same(other.whole(), pair.whole())


@on_ranks(1, [(Contents, "read"), (LowLevelZeroOptimizer, "zero_grad")])
def test_a_load_that_is_interrupted_asks_for_another(
    rank: int, of: type, within: str, saved: Path, tmp_path: Path
) -> None:
    pair = Training().start().train(AFTER, rank, 1)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, within, interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_checkpoint(saved, pair.model, pair.optimizer)
    assert "load a checkpoint" in refused(lambda: save_checkpoint(tmp_path / within, pair.model, pair.optimizer))
    load_checkpoint(saved, pair.model, pair.optimizer)
    save_checkpoint(tmp_path / within, pair.model, pair.optimizer)


class Trap:
    """Runs something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def vouch(path: Path, name: str) -> None:
    """Let the manifest vouch for a file that has been changed."""
    manifest = read_manifest(path)
    text = replace(manifest, files={**manifest.files, name: FileSum.of(path / name)}).to_text()
    (path / "lowlevel_zero.json").write_text(text)
    read_manifest(path).check_files(path, [name])


def test_nothing_in_a_pickle_is_run(saved: Path, tmp_path: Path) -> None:
    """Not even where the manifest vouches for it."""
    mark, paths = tmp_path / "run", [copytree(saved, tmp_path / name) for name in (".metadata", "objects.pt")]
    (paths[0] / ".metadata").write_bytes(pickle.dumps(Trap(mark)))
    torch.save({"extra": Trap(mark)}, paths[1] / "objects.pt")
    for path in paths:
        vouch(path, path.name)
    for path, said in zip(paths, load_refused(paths), strict=True):
        assert all("ValueError" in line and path.name in line for line in said)
    assert not mark.exists()


def test_dcp_s_own_planner_is_never_asked_for_bytes(saved: Path, tmp_path: Path) -> None:
    """It would unpickle an entry that is an object, not a tensor, without a check."""
    path, name = copytree(saved, tmp_path / "a"), "model.one"
    metadata = dcp.FileSystemReader(str(saved)).read_metadata()
    metadata.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
    stored = next(info for at, info in metadata.storage_data.items() if at.fqn == name)
    metadata.storage_data[dcp.metadata.MetadataIndex(name)] = stored
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    vouch(path, ".metadata")
    (said,) = load_refused([path])
    assert all("model.one: expected a tensor, got a pickle" in line for line in said)


# What isn't a checkpoint


def test_what_is_not_a_checkpoint_is_refused_and_told_from_one(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / ".metadata").write_bytes(b"x")
    empty = tmp_path / "empty"
    empty.mkdir()
    later = copytree(saved, tmp_path / "else" / "later")
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


@on_ranks(2)
def test_another_model_is_refused_by_the_first_name_that_differs(rank: int, saved: Path) -> None:
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

    def moved(model: Any) -> list[dict[str, Any]]:
        deep, flat, none = groups(model)
        deep["params"].append(model.one)
        flat["params"] = [p for p in flat["params"] if p is not model.one]
        return [deep, flat, none]

    def stateful(model: Any) -> None:
        model.counter = Keeping(1)

    cases: list[tuple[Callable[[Any], None], str]] = [
        (stateful, "counter._extra_state: the model has it, the checkpoint doesn't"),
        (surplus, "added: the model has it, the checkpoint doesn't"),
        (missing, "frozen.bias: the checkpoint has it, the model doesn't"),
        (reshaped, r"frozen.bias: expected (1, 5), got (5,) from the checkpoint"),
        (untied, "layers.3.weight: the model has it, the checkpoint doesn't"),
        (integer, "frozen.bias: expected int64, got float32 from the checkpoint"),
        (moved, "one: param group 0 has this parameter here, and not when saved"),
    ]

    for change, expected in cases:
        model = Training().run.model()
        change(model)
        members = moved(model) if change is moved else groups(model)
        optimizer = LowLevelZeroOptimizer(adamw(members), model=model)
        before = held(model, optimizer)
        line = refused(partial(load_checkpoint, saved, model, optimizer))
        assert line.startswith(f"ValueError: {expected}"), line
        check_same(before, held(model, optimizer))


# What can't be saved


@on_ranks(2)
def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(rank: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    pair = Training().start()
    model, optimizer, bare, path = pair.model, pair.optimizer, pair.optimizer.optim, tmp_path / "a"
    schedule = schedule_of(pair)
    schedule.where = tmp_path  # part of its state dict
    ambiguous = wrapped(nn.Sequential(nn.Linear(2, 2), Keeping({"a.b": 1, "a": {"b": 2}})))
    with_schedule = linear()
    with_schedule[1].param_groups[0]["schedule"] = schedule_of
    unknown: Any = None if rank else path
    unknown_everywhere: Any = None

    def save(to: Path = path, model: Any = model, optimizer: Any = optimizer, **options: Any) -> None:
        save_checkpoint(to, model, optimizer, **options)

    def save_from_another_directory() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getcwd", lambda: f"/{rank}")
            save(Path("a"))

    calls: Calls = {
        "TypeError: extra: expected what torch.load(weights_only=True) takes": lambda: save(extra=Path("x")),
        ("RuntimeError: rank 1 could not save a checkpoint to", "TypeError: extra: expected what"): (
            lambda: save(extra=Path("x") if rank else 3)
        ),
        "TypeError: scheduler['where']: expected what": lambda: save(scheduler=schedule),
        "ValueError: model: expected the parameters that the optimizer trains": lambda: save(model=nn.Linear(2, 2)),
        "TypeError: optimizer: expected a LowLevelZeroOptimizer, got AdamW": lambda: save(optimizer=bare),
        "TypeError: model: expected a torch.nn.Module": lambda: save(model=optimizer),
        "TypeError: expected str, bytes or os.PathLike": lambda: latest(unknown_everywhere, group=dist.group.WORLD),
        "ValueError: expected the same path, model and optimizers": save_from_another_directory,
        "ValueError: keep: expected a number of checkpoints": lambda: save(keep=0),
        "RuntimeError: expected the same call on every rank, got rank 0 to save a checkpoint to": (
            lambda: save(tmp_path / f"rank{rank}")
        ),
        f"NotADirectoryError: {tmp_path}/file: expected": lambda: save(tmp_path / "file"),
        f"NotADirectoryError: {tmp_path}/file/a: expected": lambda: save(tmp_path / "file" / "a"),
        "TypeError: param_groups[0]['schedule']: expected what": lambda: save_checkpoint(path, *with_schedule),
        "a.b: expected one value of this name, got two": lambda: save_checkpoint(path, *ambiguous),
        ("RuntimeError: rank 1 could not save", "TypeError: expected str"): lambda: save(unknown),
        ("RuntimeError: rank 1 could not load", "TypeError: expected str"): (
            lambda: load_checkpoint(unknown, model, optimizer)
        ),
    }
    check_refused(calls, rank)
    assert names_in(tmp_path) == {"file"}


@on_ranks(2)
def test_one_rank_alone_and_those_who_train_on_are_told_of_each_other(rank: int, tmp_path: Path) -> None:
    pair, told = linear(), []
    ways = {save_checkpoint: pair, load_checkpoint: pair, partial(latest, group=dist.group.WORLD): ()}
    for number, (call, arguments) in enumerate(ways.items()):
        told.append(refused(partial(call, tmp_path / "a", *arguments) if rank == 1 else partial(train, *pair)))
        pair[1].zero_grad()
        path = tmp_path / f"after {number}"
        save_checkpoint(path, *pair)
        load_checkpoint(path, *pair)
    expected = "RuntimeError: expected the same call on every rank, got rank 0 to step; rank 1 to "
    assert told[0].startswith(f"{expected}save a checkpoint to {tmp_path / 'a'}: let every rank")
    assert told[1].startswith(f"{expected}load the checkpoint {tmp_path / 'a'}: let every rank")
    assert told[2].startswith(f"{expected}look for the newest checkpoint: let every")
