"""Folders of checkpoints: several runs and writers in one, which is the newest, and what is left alone.

A save never removes, renames or replaces what it didn't write; and what it did write, and nobody needs, goes.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowlevel_zero.checkpoint import folders, latest, load_checkpoint, save_checkpoint
from lowlevel_zero.checkpoint.manifest import MANIFEST
from tests.support.checkpoints import logged, wait_for_pruning
from tests.support.ranks import run_ranks
from tests.support.saving import Pair, held_writes, linear, names_in


def of_two() -> Pair:
    """With a process group of its own."""
    return linear(dp_process_group=dist.new_group([0, 1]))


def test_each_run_keeps_its_own(tmp_path: Path) -> None:
    """Whatever they and the folder are called; a run that has loaded a checkpoint goes on with that one's run."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))

    def runs(rank: int, world_size: int) -> None:
        one, other = linear(), linear()
        for step in (1, 2, 3):
            save_checkpoint(folder / f"step-{step}", *one, keep=2)
            save_checkpoint(folder / f"other {step}", *other, keep=1)
        wait_for_pruning()
        assert names_in(folder) == {"step-2", "step-3", "other 3"}
        stranger = linear()
        save_checkpoint(folder / "step-4", *stranger, keep=1)
        wait_for_pruning()
        assert names_in(folder) == {"step-2", "step-3", "step-4", "other 3"}

    def resumed(rank: int, world_size: int) -> None:
        one, fork = linear(), linear()
        for pair in (one, fork):
            load_checkpoint(folder / "step-3", *pair)
        save_checkpoint(folder / "best", *one, keep=2)
        wait_for_pruning()
        assert names_in(folder) == {"step-3", "best", "step-4", "other 3"}
        save_checkpoint(folder / "fork 1", *fork, keep=1)  # what both come from is each one's own
        wait_for_pruning()
        assert names_in(folder) == {"best", "fork 1", "step-4", "other 3"}
        save_checkpoint(folder / "last", *one, keep=1)
        load_checkpoint(folder / "step-4", *one)
        save_checkpoint(folder / "after step 4", *one, keep=1)
        wait_for_pruning()
        assert names_in(folder) == {"after step 4", "fork 1", "other 3"}

    run_ranks(runs, 2)
    run_ranks(resumed, 3)


def test_the_newest_is_the_last_of_a_run_though_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a run that goes on from it."""

    def saves(rank: int, world_size: int) -> None:
        pair = linear()
        for step in (1, 2):
            save_checkpoint(tmp_path / f"step-{step}", *pair)
            monkeypatch.setattr(time, "time_ns", lambda: 1)
        assert latest(tmp_path) == tmp_path / "step-2"
        resumed = linear()
        load_checkpoint(tmp_path, *resumed)
        save_checkpoint(tmp_path / "step-3", *resumed, keep=2)
        wait_for_pruning()
        assert names_in(tmp_path) == {"step-2", "step-3"}
        assert latest(tmp_path) == tmp_path / "step-3"

    run_ranks(saves, 2)


def test_no_write_in_progress_is_touched(tmp_path: Path) -> None:
    """Two optimizers' groups save into one folder at the same time; so does somebody by hand."""

    def save(rank: int, world_size: int) -> list[Any]:
        pairs, reader = [of_two() for _ in range(2)], linear()
        by_hand = tmp_path / "of another tool.0123456789abcdef.tmp"
        by_hand.mkdir(exist_ok=True)
        (by_hand / "part").write_text("half of it")
        with held_writes() as writes:
            slow = save_checkpoint(tmp_path / "there", *pairs[0], extra="slow", async_save=True)
        for name in ("one", "two"):
            save_checkpoint(tmp_path / name, *pairs[1], extra=name, keep=1)
        newest = load_checkpoint(tmp_path, *reader)
        writes.goes_on.set()
        slow.wait()
        return [newest, load_checkpoint(tmp_path / "there", *reader)]

    assert run_ranks(save, 2) == [["two", "slow"]] * 2
    assert names_in(tmp_path) == {"two", "there", "of another tool.0123456789abcdef.tmp"}


def test_a_write_is_left_alone_whichever_rank_has_begun(tmp_path: Path) -> None:
    """The first rank comes late to one save, while another save clears what crashes have left."""

    def save(rank: int, world_size: int) -> Any:
        pairs = [of_two() for _ in range(2)]
        with held_writes() if rank == 0 else nullcontext() as writes:
            slow = save_checkpoint(tmp_path / "slow", *pairs[0], extra="slow", async_save=True, rank_state={})
        while rank == 1 and not list(tmp_path.glob("slow.*.tmp/rank_1.pt")):
            time.sleep(0.01)
        dist.barrier()
        save_checkpoint(tmp_path / "quick", *pairs[1])
        if writes is not None:
            writes.goes_on.set()
        slow.wait()
        return load_checkpoint(tmp_path / "slow", *pairs[1])

    assert run_ranks(save, 2) == ["slow", "slow"]
    assert names_in(tmp_path) == {"slow", "quick"}


def test_the_first_of_two_saves_to_one_place_stays(tmp_path: Path) -> None:
    """Neither could see the other when it began."""

    def save(rank: int, world_size: int) -> Any:
        pairs = [of_two() for _ in range(2)]
        with held_writes() as writes:
            slow = save_checkpoint(tmp_path / "here", *pairs[0], extra="slow", async_save=True)
        save_checkpoint(tmp_path / "here", *pairs[1], extra="quick")
        writes.goes_on.set()
        with pytest.raises(RuntimeError, match="rank 0: FileExistsError: .*here: expected nothing there"):
            slow.wait()
        return load_checkpoint(tmp_path / "here", *pairs[1])

    assert run_ranks(save, 2) == ["quick", "quick"]
    assert names_in(tmp_path) == {"here"}


def test_the_newest_is_what_rank_0_sees(tmp_path: Path) -> None:
    """Others may see more, or less, at the moment they look. A directory of checkpoints stands for its newest."""

    def run(rank: int, world_size: int) -> list[Any]:
        pair = linear()
        views = [tmp_path / f"of rank {at}" for at in range(world_size)]
        told: list[Any] = [latest(views[rank], group=dist.group.WORLD)]
        for step in (1, 2):
            save_checkpoint(views[0] / f"step-{step}", *pair, extra=step)
        if rank == 1:
            shutil.copytree(views[0], views[1])
            shutil.copytree(views[1] / "step-2", views[1] / "step-9")
        told.append(latest(views[rank], group=dist.group.WORLD))
        told.append(load_checkpoint(views[0], *pair))
        told.append(latest(views[0] / "step-1") if rank == 0 else None)  # rank 0 alone: nobody is waited for
        return told

    first, second = run_ranks(run, 2)
    newest = tmp_path / "of rank 0" / "step-2"
    assert first == [None, newest, 2, tmp_path / "of rank 0" / "step-1"]
    assert second == [None, newest, 2, None]


def test_each_file_is_looked_at_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(rank: int, world_size: int) -> list[str]:
        pair = linear()
        save_checkpoint(tmp_path / "a", *pair)
        looked: list[str] = []
        stat = Path.stat
        monkeypatch.setattr(Path, "stat", lambda path, **options: (looked.append(path.name), stat(path, **options))[1])
        load_checkpoint(tmp_path / "a", *pair)
        return [name for name in set(looked) if name.endswith(".distcp")]

    looks = Counter(name for names in run_ranks(load, 4) for name in names)
    assert looks == {f"__{rank}_0.distcp": 1 for rank in range(4)}


def test_a_rank_that_is_late_is_waited_for_as_long_as_the_group_waits(tmp_path: Path) -> None:
    def lonely(rank: int, world_size: int) -> str:
        pair = linear(dp_process_group=dist.new_group([0, 1], timeout=timedelta(seconds=2)))
        if rank == 1:
            time.sleep(1)
        save_checkpoint(tmp_path / "a", *pair)
        told = ""
        if rank == 0:
            with pytest.raises(RuntimeError) as caught:
                save_checkpoint(tmp_path / "a", *pair)
            told = str(caught.value)
        dist.barrier()
        return told

    told, _ = run_ranks(lonely, 2)
    assert told.startswith("save_checkpoint: every rank calls it, and this one has waited in vain for the agreement")
    assert "Not there yet: rank 1 (outside of the optimizer" in told


# What isn't a save's own


REMOVED = ".lowlevel_zero.removed"  # where a removal was broken off


def content(folder: Path) -> dict[str, bytes | None]:
    """All that is under ``folder``, by its path there."""
    return {
        str(place.relative_to(folder)): place.read_bytes() if place.is_file() else None for place in folder.rglob("*")
    }


def test_a_save_replaces_no_checkpoint_and_none_in_it(tmp_path: Path) -> None:
    """Each call is refused on every rank, with its remedy, at once and in the background."""
    run = tmp_path / "run"

    def save(rank: int, world_size: int) -> list[str]:
        pair = linear()
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
    """Nor what comes to its place while it is written."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("x")

    def save(rank: int, world_size: int) -> list[str]:
        pair = linear()
        save_checkpoint(tmp_path / "empty", *pair, extra="here")
        if rank == 0:
            (tmp_path / "last").symlink_to("empty")
        told = []
        for name in ("last", "nowhere", "notes"):
            with pytest.raises((FileExistsError, RuntimeError)) as caught:
                save_checkpoint(tmp_path / name, *pair, extra="new")
            told.append(str(caught.value))
        assert load_checkpoint(tmp_path / "last", *pair) == "here"
        with held_writes() as writes:
            saving = save_checkpoint(tmp_path / "late", *pair, async_save=True)
        if rank == 0:
            (tmp_path / "late").mkdir()
            (tmp_path / "late" / "notes.txt").write_text("of its user")
        writes.goes_on.set()
        with pytest.raises(RuntimeError, match="rank 0: FileExistsError: ") as of_thread:
            saving.wait()
        return [*told, str(of_thread.value)]

    found = ("a symbolic link", "a symbolic link", "a directory with files", "a directory with files in it")
    for told in run_ranks(save, 2):
        for line, got in zip(told, found, strict=True):
            assert f"expected nothing there, or an empty directory, got {got}" in line
    assert (tmp_path / "last").readlink() == Path("empty")
    assert (tmp_path / "nowhere").readlink() == Path("gone")
    assert content(tmp_path / "notes") == {"thesis.tex": b"x"}
    assert content(tmp_path / "late") == {"notes.txt": b"of its user"}
    assert names_in(tmp_path) == {"empty", "last", "nowhere", "notes", "late"}


def saved(run: Path, change: Callable[[], Any], keep: int | None = None) -> list[list[str]]:
    """Save step-30, step-200, and, after a change, step-100; return what each rank logged at the last one."""

    def save(rank: int, world_size: int) -> list[str]:
        pair = linear()
        for step in (30, 200):  # not in the order of names
            save_checkpoint(run / f"step-{step}", *pair, keep=keep if keep == 2 else None)
        if rank == 0:
            change()
        with logged() as lines:
            save_checkpoint(run / "step-100", *pair, keep=keep)
        wait_for_pruning()
        return lines

    return run_ranks(save, 2)


def test_pruning_removes_the_oldest_checkpoint_s_own_files_and_no_others(tmp_path: Path) -> None:
    """Nor does it count links as checkpoints, or follow them."""
    run = tmp_path / "run"
    assert latest(run) is None

    def change() -> None:
        (run / "step-30" / "evaluation").mkdir()
        (run / "step-30" / "evaluation" / "losses.txt").write_text("0.5")
        shutil.copytree(run / "step-200", tmp_path / "elsewhere")
        (run / "best").symlink_to("step-200")
        (run / "other").symlink_to(tmp_path / "elsewhere")
        (run / "notes").symlink_to(tmp_path / "nowhere")
        assert latest(run) == run / "step-200"

    saved(run, change, keep=2)
    assert names_in(run) == {"step-30", "step-200", "step-100", "best", "other", "notes"}
    assert content(run / "step-30") == {"evaluation": None, "evaluation/losses.txt": b"0.5"}
    assert (run / "best").readlink() == Path("step-200")
    assert latest(run / "best") == run / "best"
    assert latest(run) == run / "step-100"
    assert latest(tmp_path / "elsewhere") == tmp_path / "elsewhere"


@pytest.mark.parametrize("keep", [1, None])
def test_remains_of_a_save_go_whatever_was_removed_first(keep: int | None, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def change() -> None:
        for at, file in enumerate(sorted((run / "step-30").iterdir())):
            for left, name in ((False, f"step-7.{at:016x}.tmp"), (True, f"step-8.{at:016x}.tmp")):
                (run / name).mkdir()
                for other in (run / "step-30").iterdir():
                    if left == (other == file):
                        shutil.copy(other, run / name / other.name)
        (run / "step-9.0000000000000000.tmp").mkdir()

    saved(run, change, keep)
    assert names_in(run) == ({"step-100"} if keep else {"step-30", "step-200", "step-100"})


def test_what_looks_like_remains_and_is_not_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "a.0123456789abcdef.tmp").mkdir(parents=True)
    (run / "a.0123456789abcdef.tmp" / "thesis.tex").write_text("x")
    (run / "b.0123456789abcdef.tmp").write_text("a file")
    (run / "c.0123456789abcdef.tmp").symlink_to("a.0123456789abcdef.tmp")
    before = content(run)
    saved(run, lambda: None, keep=1)
    after = content(run)
    assert before == {name: after[name] for name in before}


def test_a_directory_that_nobody_may_look_into_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lost+found is on a disk of one's own."""
    (tmp_path / "lost+found").mkdir()
    stat = os.stat

    def refusing(place: Any, *args: Any, **options: Any) -> os.stat_result:
        if "lost+found/" in str(place):
            raise PermissionError(13, "Permission denied", str(place))
        return stat(place, *args, **options)

    monkeypatch.setattr(folders.os, "stat", refusing)
    saved(tmp_path, lambda: None, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["lost+found", "step-100"]
    run_ranks(lambda rank, world_size: load_checkpoint(tmp_path, *linear()), 1)


def test_what_has_come_to_where_a_removal_was_broken_off_stays(tmp_path: Path) -> None:
    """A user's files, under the names that another program of torch's checkpoints gives them; and a checkpoint.

    The removal of an earlier one of its name was broken off before its very end: its manifest beside wasn't gone.
    """
    run = tmp_path / "run"

    def change() -> None:
        (run / "step-30" / MANIFEST).rename(run / f"step-30{REMOVED}")
        (run / "step-30" / "__0_0.distcp").write_bytes(b"mine")
        shutil.copy(run / "step-200" / MANIFEST, run / f"step-200{REMOVED}")

    saved(run, change)
    assert names_in(run) == {"step-30", "step-200", "step-100"}
    assert content(run / "step-30") == {"__0_0.distcp": b"mine"}
    assert content(run / "step-200").keys() == content(run / "step-100").keys()


def test_a_damaged_one_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, lambda: (run / "step-200" / "__0_0.distcp").write_bytes(b"cut off"), keep=2)
    assert names_in(run) == {"step-30", "step-200", "step-100"}


def test_what_cannot_be_removed_is_told_and_keeps_nothing_else_from_going(tmp_path: Path) -> None:
    """A manifest that a removal was broken off with, and that is damaged since."""
    run = tmp_path / "run"
    (told,), nothing = saved(run, lambda: (run / f"step-0{REMOVED}").write_text("{}"), keep=1)
    assert told.startswith("WARNING: keep: ")
    assert f"step-0{REMOVED}: damaged" in told
    assert nothing == []
    assert names_in(run) == {"step-100", f"step-0{REMOVED}"}


def test_falling_back_to_an_older_checkpoint_is_told(tmp_path: Path) -> None:
    """Of one that was cut short, or has no manifest; an older one that is damaged is nobody's concern."""

    def save(rank: int, world_size: int, run: Path) -> None:
        pair = linear()
        for step in (1, 2):
            save_checkpoint(run / f"step-{step}", *pair, extra=step)

    def load(rank: int, world_size: int, run: Path) -> tuple[list[Any], list[str]]:
        pair = linear()
        with logged() as lines:
            found = [latest(run, group=torch.distributed.group.WORLD), load_checkpoint(run, *pair)]
        return found, lines

    for file in ("step-2/__1_0.distcp", f"step-2/{MANIFEST}", "step-1/objects.pt"):
        run = tmp_path / file.replace("/", " ")
        run_ranks(save, 2, run)
        data = (run / file).read_bytes()
        (run / file).write_bytes(data[:-9]) if "distcp" in file else (run / file).unlink()
        (found, lines), (also, nothing) = run_ranks(load, 2, run)
        assert nothing == []
        if "step-1" in file:
            assert (found, also, lines) == ([run / "step-2", 2], [run / "step-2", 2], [])
            continue
        assert found == also == [run / "step-1", 1]
        assert len(lines) == 2
        assert all(line.startswith(f"WARNING: {run}/step-2") for line in lines)
        assert all(line.endswith(f"; the newest whole one is {run}/step-1") for line in lines)
        shutil.rmtree(run / "step-1")
        with logged() as lines:
            assert latest(run) is None
        assert lines[0].endswith("; no whole checkpoint was found")
