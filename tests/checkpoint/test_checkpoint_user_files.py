"""A save never removes, renames or replaces what it didn't write; and what it did write, and nobody needs, goes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # here once, not in every forked rank
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, save_checkpoint, storage
from lowlevel_zero.checkpoint.manifest import MANIFEST
from tests.support.checkpoints import logged, wait_for_pruning
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks


def start() -> tuple[nn.Module, LowLevelZeroOptimizer]:
    model = nn.Linear(3, 2)
    return model, LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model=model)


def content(folder: Path) -> dict[str, bytes | None]:
    """All that is under ``folder``, by its path there."""
    return {
        str(place.relative_to(folder)): place.read_bytes() if place.is_file() else None for place in folder.rglob("*")
    }


def names_in(folder: Path) -> set[str]:
    return {place.name for place in folder.iterdir()}


def test_a_save_replaces_no_checkpoint_and_none_in_it(tmp_path: Path) -> None:
    """Each call is refused on every rank, with its remedy, at once and in the background."""
    run = tmp_path / "run"

    def save(rank: int, world_size: int) -> list[str]:
        pair = start()
        save_checkpoint(run, *pair, extra="run")
        save_checkpoint(run / "step-10", *pair, extra="inner")
        before, told = content(run), []
        for in_background in (False, True):
            for path in (run, run / "step-10"):
                with pytest.raises(FileExistsError) as caught:
                    save_checkpoint(path, *pair, keep=1, async_save=in_background)
                told.append(str(caught.value))
        assert content(run) == before
        assert load_checkpoint(run, *pair) == "run"
        assert load_checkpoint(run / "step-10", *pair) == "inner"
        return told

    for told in run_ranks(save, 2):
        assert all("got a checkpoint, which a save never replaces: " in line for line in told)
        assert all("run/step-100, and pass keep=1" in line for line in told)


def test_a_save_takes_an_empty_directory_and_replaces_no_link_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("x")

    def save(rank: int, world_size: int) -> list[str]:
        pair = start()
        save_checkpoint(tmp_path / "empty", *pair, extra="here")
        if rank == 0:
            (tmp_path / "last").symlink_to("empty")
        told = []
        for name in ("last", "nowhere", "notes"):
            with pytest.raises((FileExistsError, RuntimeError)) as caught:
                save_checkpoint(tmp_path / name, *pair, extra="new")
            told.append(str(caught.value))
        assert load_checkpoint(tmp_path / "last", *pair) == "here"
        return told

    for told in run_ranks(save, 2):
        for line, got in zip(told, ("a symbolic link", "a symbolic link", "a directory with files"), strict=True):
            assert f"expected nothing there, or an empty directory, got {got}" in line
    assert (tmp_path / "last").readlink() == Path("empty")
    assert (tmp_path / "nowhere").readlink() == Path("gone")
    assert (tmp_path / "notes" / "thesis.tex").read_text() == "x"


def test_what_comes_to_its_place_while_it_is_written_stays(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> str:
        pair = start()
        goes_on = threading.Event()
        write = storage.CheckpointWriter.write_share
        patch_rank(storage.CheckpointWriter, "write_share", lambda *args: (goes_on.wait(20), write(*args))[1])
        saving = save_checkpoint(tmp_path / "a", *pair, async_save=True)
        if rank == 0:
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "notes.txt").write_text("of its user")
        goes_on.set()
        with pytest.raises(RuntimeError) as caught:
            saving.wait()
        return str(caught.value)

    for told in run_ranks(save, 2):
        assert "rank 0: FileExistsError: " in told
        assert "got a directory with files in it" in told
    assert content(tmp_path) == {"a": None, "a/notes.txt": b"of its user"}


def test_pruning_removes_a_checkpoint_s_own_files_and_no_others(tmp_path: Path) -> None:
    """Nor does it count links as checkpoints, or follow them."""
    run = tmp_path / "run"

    def save(rank: int, world_size: int) -> None:
        pair = start()
        save_checkpoint(run / "step-1", *pair, keep=2)
        save_checkpoint(run / "step-2", *pair, keep=2)
        if rank == 0:
            (run / "step-1" / "evaluation").mkdir()
            (run / "step-1" / "evaluation" / "losses.txt").write_text("0.5")
            shutil.copytree(run / "step-2", tmp_path / "elsewhere")
            (run / "best").symlink_to("step-2")
            (run / "other").symlink_to(tmp_path / "elsewhere")
            (run / "notes").symlink_to(tmp_path / "nowhere")
        save_checkpoint(run / "step-3", *pair, keep=2)
        assert latest(run / "best") == run / "best"
        assert latest(run) == run / "step-3"

    run_ranks(save, 2)
    assert names_in(run) == {"step-1", "step-2", "step-3", "best", "other", "notes"}
    assert content(run / "step-1") == {"evaluation": None, "evaluation/losses.txt": b"0.5"}
    assert (run / "best").readlink() == Path("step-2")
    assert latest(tmp_path / "elsewhere") == tmp_path / "elsewhere"


@pytest.mark.parametrize("keep", [1, None])
def test_remains_of_a_save_go_whatever_was_removed_first(keep: int | None, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def save(rank: int, world_size: int) -> None:
        pair = start()
        save_checkpoint(run / "step-1", *pair)
        if rank == 0:
            for at, file in enumerate(sorted((run / "step-1").iterdir())):
                for left, name in ((False, f"step-7.{at:016x}.tmp"), (True, f"step-8.{at:016x}.tmp")):
                    (run / name).mkdir()
                    for other in (run / "step-1").iterdir():
                        if left == (other == file):
                            shutil.copy(other, run / name / other.name)
            (run / "step-9.0000000000000000.tmp").mkdir()
        save_checkpoint(run / "step-2", *pair, keep=keep)

    run_ranks(save, 2)
    assert names_in(run) == ({"step-2"} if keep else {"step-1", "step-2"})


def test_what_looks_like_remains_and_is_not_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "a.0123456789abcdef.tmp").mkdir(parents=True)
    (run / "a.0123456789abcdef.tmp" / "thesis.tex").write_text("x")
    (run / "b.0123456789abcdef.tmp").write_text("a file")
    (run / "c.0123456789abcdef.tmp").symlink_to("a.0123456789abcdef.tmp")
    before = content(run)

    def save(rank: int, world_size: int) -> None:
        save_checkpoint(run / "step-1", *start(), keep=1)

    run_ranks(save, 2)
    after = content(run)
    assert before == {name: after[name] for name in before}


def test_a_checkpoint_stays_where_an_earlier_one_s_removal_was_broken_off(tmp_path: Path) -> None:
    """Before its very end, when the earlier one's directory was gone, and its manifest beside wasn't."""
    run = tmp_path / "run"

    def save(rank: int, world_size: int) -> None:
        pair = start()
        save_checkpoint(run / "step-1", *pair)
        if rank == 0:
            shutil.copy(run / "step-1" / MANIFEST, run / "step-1.lowlevel_zero.removed")
        before = content(run / "step-1")
        save_checkpoint(run / "step-2", *pair)
        assert content(run / "step-1") == before

    run_ranks(save, 2)
    assert names_in(run) == {"step-1", "step-2"}


def test_a_damaged_one_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def save(rank: int, world_size: int) -> None:
        pair = start()
        for step in (1, 2):
            save_checkpoint(run / f"step-{step}", *pair)
        if rank == 0:
            (run / "step-2" / "__0_0.distcp").write_bytes(b"cut off")
        save_checkpoint(run / "step-3", *pair, keep=2)
        wait_for_pruning()

    run_ranks(save, 2)
    assert names_in(run) == {"step-1", "step-2", "step-3"}


def test_what_a_user_has_put_where_a_removal_was_broken_off_stays(tmp_path: Path) -> None:
    """Under the same names, as another program of torch's checkpoints writes them."""
    run = tmp_path / "run"

    def save(rank: int, world_size: int) -> None:
        pair = start()
        save_checkpoint(run / "step-1", *pair)
        if rank == 0:
            (run / "step-1" / MANIFEST).rename(run / "step-1.lowlevel_zero.removed")
            (run / "step-1" / "__0_0.distcp").write_bytes(b"mine")
        save_checkpoint(run / "step-2", *pair)

    run_ranks(save, 2)
    assert content(run / "step-1") == {"__0_0.distcp": b"mine"}
    assert names_in(run) == {"step-1", "step-2"}


def test_what_cannot_be_removed_is_told_and_keeps_nothing_else_from_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that a removal was broken off with, and that is damaged since."""
    run = tmp_path / "run"

    def save(rank: int, world_size: int) -> str:
        pair = start()
        save_checkpoint(run / "step-1", *pair)
        if rank == 0:
            (run / "step-0.lowlevel_zero.removed").write_text("{}")
        with logged() as lines:
            save_checkpoint(run / "step-2", *pair, keep=1)
        return "\n".join(lines)

    told, nothing = run_ranks(save, 2)
    assert told.startswith("WARNING: keep: ")
    assert "step-0.lowlevel_zero.removed: damaged" in told
    assert nothing == ""
    assert names_in(run) == {"step-2", "step-0.lowlevel_zero.removed"}


@pytest.mark.parametrize("damage", ["cut short", "manifest missing"])
def test_falling_back_to_an_older_checkpoint_is_told(damage: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = run / "step-2" / ("lowlevel_zero.json" if damage.startswith("manifest") else "__1_0.distcp")

    def load(rank: int, world_size: int) -> tuple[list[Any], list[str]]:
        pair = start()
        for step in (1, 2):
            save_checkpoint(run / f"step-{step}", *pair, extra=step)
        if rank == 0:
            file.write_bytes(file.read_bytes()[:-9]) if damage.endswith("short") else file.unlink()
        with logged() as lines:
            found = [latest(run, group=torch.distributed.group.WORLD), load_checkpoint(run, *pair)]
        return found, lines

    (found, lines), (also, nothing) = run_ranks(load, 2)
    assert found == also == [run / "step-1", 1]
    assert len(lines) == 2
    assert all(line.startswith(f"WARNING: {run}/step-2") for line in lines)
    assert all(line.endswith(f"; the newest whole one is {run}/step-1") for line in lines)
    assert nothing == []
    shutil.rmtree(run / "step-1")
    with logged() as lines:
        assert latest(run) is None
    assert lines[0].endswith("; no whole checkpoint was found")


def test_an_older_checkpoint_that_is_damaged_is_nobody_s_concern(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> None:
        pair = start()
        for step in (1, 2):
            save_checkpoint(tmp_path / f"step-{step}", *pair)

    run_ranks(save, 1)
    (tmp_path / "step-1" / "objects.pt").unlink()
    with logged() as lines:
        assert latest(tmp_path) == tmp_path / "step-2"
    assert lines == []
