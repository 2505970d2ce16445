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
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from lowlevel_zero.checkpoint import folders, latest, load_checkpoint, save_checkpoint
from lowlevel_zero.checkpoint.manifest import MANIFEST
from tests.support.checkpoints import logged, wait_for_pruning
from tests.support.on_ranks import on_ranks
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks
from tests.support.saving import Pair, held_writes, linear, names_in, refused


def of_two() -> Pair:
    """With a process group of its own."""
    return linear(dp_process_group=dist.new_group([0, 1]))


def test_each_run_keeps_its_own(tmp_path: Path) -> None:
    """Whatever they and the folder are called; a run that has loaded a checkpoint goes on with that one's run."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))

    def save(pair: Pair, name: str, keep: int, *left: str) -> None:
        save_checkpoint(folder / name, *pair, keep=keep)
        wait_for_pruning()
        assert names_in(folder) == set(left)

    def runs(rank: int, world_size: int) -> None:
        one, other = linear(), linear()
        for step in (1, 2, 3):
            save_checkpoint(folder / f"step-{step}", *one, keep=2)
            save_checkpoint(folder / f"other {step}", *other, keep=1)
        save(linear(), "step-4", 1, "step-2", "step-3", "step-4", "other 3")

    def resumed(rank: int, world_size: int) -> None:
        one, fork = linear(), linear()
        for pair in (one, fork):
            load_checkpoint(folder / "step-3", *pair)
        save(one, "best", 2, "step-3", "best", "step-4", "other 3")
        save(fork, "fork 1", 1, "best", "fork 1", "step-4", "other 3")  # what both come from is each one's own
        save_checkpoint(folder / "last", *one, keep=1)
        load_checkpoint(folder / "step-4", *one)
        save(one, "after step 4", 1, "after step 4", "fork 1", "other 3")

    run_ranks(runs, 2)
    run_ranks(resumed, 3)


def the_newest_is_the_last_of_a_run_though_the_clock_goes_back(rank: int, folder: Path) -> None:
    """Also in a run that goes on from it."""
    pair, resumed = linear(), linear()
    with pytest.MonkeyPatch.context() as patch:
        for step in (1, 2):
            save_checkpoint(folder / f"step-{step}", *pair)
            patch.setattr(time, "time_ns", lambda: 1)
        assert latest(folder) == folder / "step-2"
        load_checkpoint(folder, *resumed)
        save_checkpoint(folder / "step-3", *resumed, keep=2)
    wait_for_pruning()
    assert names_in(folder) == {"step-2", "step-3"}
    assert latest(folder) == folder / "step-3"


def no_write_in_progress_is_touched(rank: int, folder: Path) -> None:
    """Two optimizers' groups save into one folder at the same time; so does somebody by hand."""
    pairs, reader = [of_two() for _ in range(2)], linear()
    by_hand = folder / "of another tool.0123456789abcdef.tmp"
    by_hand.mkdir(exist_ok=True, parents=True)
    (by_hand / "part").write_text("half of it")
    with held_writes() as writes:
        slow = save_checkpoint(folder / "there", *pairs[0], extra="slow", async_save=True)
    for name in ("one", "two"):
        save_checkpoint(folder / name, *pairs[1], extra=name, keep=1)
    assert load_checkpoint(folder, *reader) == "two"
    writes.goes_on.set()
    slow.wait()
    assert load_checkpoint(folder / "there", *reader) == "slow"
    assert names_in(folder) == {"two", "there", by_hand.name}


def a_write_is_left_alone_whichever_rank_has_begun(rank: int, folder: Path) -> None:
    """The first rank comes late to one save, while another save clears what crashes have left."""
    pairs = [of_two() for _ in range(2)]
    with held_writes() if rank == 0 else nullcontext() as writes:
        slow = save_checkpoint(folder / "slow", *pairs[0], extra="slow", async_save=True, rank_state={})
    while rank == 1 and not list(folder.glob("slow.*.tmp/rank_1.pt")):
        time.sleep(0.01)
    dist.barrier()
    save_checkpoint(folder / "quick", *pairs[1])
    if writes is not None:
        writes.goes_on.set()
    slow.wait()
    assert load_checkpoint(folder / "slow", *pairs[1]) == "slow"
    assert names_in(folder) == {"slow", "quick"}


def the_newest_is_what_rank_0_sees(rank: int, folder: Path) -> None:
    """Others may see more, or less, at the moment they look. A directory of checkpoints stands for its newest."""
    pair, view, first = linear(), folder / f"of rank {rank}", folder / "of rank 0"
    assert latest(view, group=dist.group.WORLD) is None
    for step in (1, 2):
        save_checkpoint(first / f"step-{step}", *pair, extra=step)
    if rank == 1:
        shutil.copytree(first, view)
        shutil.copytree(view / "step-2", view / "step-9")
    assert latest(view, group=dist.group.WORLD) == first / "step-2"
    assert load_checkpoint(first, *pair) == 2
    assert rank == 1 or latest(first / "step-1") == first / "step-1"  # rank 0 alone: nobody is waited for


def a_save_replaces_no_checkpoint_and_none_in_it(rank: int, run: Path) -> None:
    """Each call is refused on every rank, with its remedy, at once and in the background."""
    pair = linear()
    save_checkpoint(run, *pair, extra="run")
    save_checkpoint(run / "step-10", *pair, extra="inner")
    before = content(run)
    for in_background in (False, True):
        for path in (run, run / "step-10"):
            told = refused(lambda: save_checkpoint(path, *pair, keep=1, async_save=in_background))  # noqa: B023
            assert "got a checkpoint, which a save never replaces: " in told
            assert "run/step-100, and pass keep=1" in told
    assert content(run) == before
    assert load_checkpoint(run, *pair) == "run"
    assert load_checkpoint(run / "step-10", *pair) == "inner"


CHECKS = [
    the_newest_is_the_last_of_a_run_though_the_clock_goes_back,
    no_write_in_progress_is_touched,
    a_write_is_left_alone_whichever_rank_has_begun,
    the_newest_is_what_rank_0_sees,
    a_save_replaces_no_checkpoint_and_none_in_it,
]


@on_ranks(2, CHECKS)
def test_saves_to_one_folder(rank: int, check: Callable[[int, Path], None], tmp_path: Path) -> None:
    check(rank, tmp_path / check.__name__)


@on_ranks(2)
def test_the_first_of_two_saves_to_one_place_stays(rank: int, tmp_path: Path) -> None:
    """Neither could see the other when it began."""
    pairs = [of_two() for _ in range(2)]
    with held_writes() as writes:
        slow = save_checkpoint(tmp_path / "here", *pairs[0], extra="slow", async_save=True)
    save_checkpoint(tmp_path / "here", *pairs[1], extra="quick")
    writes.goes_on.set()
    assert "rank 0: FileExistsError: " in (told := refused(slow.wait))
    assert "here: expected nothing there" in told
    assert load_checkpoint(tmp_path / "here", *pairs[1]) == "quick"
    assert names_in(tmp_path) == {"here"}


@on_ranks(2)
def test_a_save_takes_an_empty_directory_and_replaces_no_link_and_no_file(rank: int, tmp_path: Path) -> None:
    """Nor what comes to its place while it is written."""
    if rank == 0:
        for name in ("empty", "notes"):
            (tmp_path / name).mkdir()
        (tmp_path / "nowhere").symlink_to("gone")
        (tmp_path / "notes" / "thesis.tex").write_text("x")
    dist.barrier()
    pair = linear()
    save_checkpoint(tmp_path / "empty", *pair, extra="here")
    if rank == 0:
        (tmp_path / "last").symlink_to("empty")
    told = [refused(lambda: save_checkpoint(tmp_path / name, *pair)) for name in ("last", "nowhere", "notes")]  # noqa: B023
    assert load_checkpoint(tmp_path / "last", *pair) == "here"
    with held_writes() as writes:
        saving = save_checkpoint(tmp_path / "late", *pair, async_save=True)
    if rank == 0:
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "notes.txt").write_text("of its user")
    writes.goes_on.set()
    told.append(refused(saving.wait))
    for line, got in zip(told, ("a symbolic link",) * 2 + ("a directory with files in it",) * 2, strict=True):
        assert f"expected nothing there, or an empty directory, got {got}" in line
    assert told[-1].startswith("RuntimeError: ")
    assert "rank 0: FileExistsError: " in told[-1]
    dist.barrier()
    assert (tmp_path / "last").readlink() == Path("empty")
    assert (tmp_path / "nowhere").readlink() == Path("gone")
    assert content(tmp_path / "notes") == {"thesis.tex": b"x"}
    assert content(tmp_path / "late") == {"notes.txt": b"of its user"}
    assert names_in(tmp_path) == {"empty", "last", "nowhere", "notes", "late"}


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


# What the last of three saves removes


REMOVED = ".lowlevel_zero.removed"  # where a removal was broken off
MINE = b"a user's"


def content(folder: Path) -> dict[str, bytes | None]:
    """All that is under ``folder``, by its path there: what is in files, and where links lead."""
    found: dict[str, bytes | None] = {}
    for place in folder.rglob("*"):
        data = place.read_bytes() if place.is_file() and not place.is_symlink() else None
        found[str(place.relative_to(folder))] = bytes(place.readlink()) if place.is_symlink() else data
    return found


def a_user_s_files_and_links(run: Path) -> None:
    """In the oldest checkpoint, and beside; links count as no checkpoints, and nobody follows them."""
    (run / "step-30" / "evaluation").mkdir()
    (run / "step-30" / "evaluation" / "losses.txt").write_bytes(MINE)
    shutil.copytree(run / "step-200", run.parent / "elsewhere")
    (run / "best").symlink_to("step-200")
    (run / "other").symlink_to(run.parent / "elsewhere")
    (run / "notes").symlink_to(run.parent / "nowhere")
    assert latest(run) == run / "step-200"
    assert latest(run / "best") == run / "best"


def remains_of_saves(run: Path) -> None:
    """Whatever was removed first."""
    for at, file in enumerate(sorted((run / "step-30").iterdir())):
        for left, name in ((False, f"step-7.{at:016x}.tmp"), (True, f"step-8.{at:016x}.tmp")):
            (run / name).mkdir()
            for other in (run / "step-30").iterdir():
                if left == (other == file):
                    shutil.copy(other, run / name / other.name)
    (run / "step-9.0000000000000000.tmp").mkdir()


def what_looks_like_remains(run: Path) -> None:
    (run / "a.0123456789abcdef.tmp").mkdir(parents=True)
    (run / "a.0123456789abcdef.tmp" / "thesis.tex").write_bytes(MINE)
    (run / "b.0123456789abcdef.tmp").write_bytes(MINE)
    (run / "c.0123456789abcdef.tmp").symlink_to("a.0123456789abcdef.tmp")


def a_directory_that_nobody_may_look_into(run: Path) -> None:
    """As lost+found is on a disk of one's own."""
    (run / "lost+found").mkdir()
    stat = os.stat

    def refusing(place: Any, *args: Any, **options: Any) -> os.stat_result:
        if "lost+found/" in str(place):
            raise PermissionError(13, "Permission denied", str(place))
        return stat(place, *args, **options)

    patch_rank(folders.os, "stat", refusing)


def what_has_come_to_where_a_removal_was_broken_off(run: Path) -> None:
    """A user's files, under the names that another program of torch's checkpoints gives them; and a checkpoint.

    The removal of an earlier one of its name was broken off before its very end: its manifest beside wasn't gone.
    """
    (run / "step-30" / MANIFEST).rename(run / f"step-30{REMOVED}")
    (run / "step-30" / "__0_0.distcp").write_bytes(MINE)
    shutil.copy(run / "step-200" / MANIFEST, run / f"step-200{REMOVED}")


def a_damaged_checkpoint(run: Path) -> None:
    """It doesn't count among those that are kept."""
    (run / "step-200" / "__0_0.distcp").write_bytes(b"cut off")


def what_cannot_be_removed(run: Path) -> None:
    """A manifest that a removal was broken off with, and that is damaged since."""
    (run / f"step-0{REMOVED}").write_text("{}")


class Case(NamedTuple):
    """What rank 0 finds before the last save, how many that keeps, and names that are there and within afterwards."""

    change: Callable[[Path], None]
    keep: int | None
    left: set[str]
    within: dict[str, set[str]] = {}  # noqa: RUF012
    told: str = ""


STEPS = {"step-30", "step-200", "step-100"}
LOOK_ALIKE = {f"{name}.0123456789abcdef.tmp" for name in "abc"}
CASES = [
    Case(a_user_s_files_and_links, 2, {*STEPS, "best", "other", "notes"}, {"step-30": {"evaluation"}}),
    Case(remains_of_saves, 1, {"step-100"}),
    Case(remains_of_saves, None, STEPS),
    Case(what_looks_like_remains, 1, {"step-100", *LOOK_ALIKE}),
    Case(a_directory_that_nobody_may_look_into, 1, {"step-100", "lost+found"}),
    Case(what_has_come_to_where_a_removal_was_broken_off, None, STEPS, {"step-30": {"__0_0.distcp"}}),
    Case(a_damaged_checkpoint, 2, STEPS),
    Case(what_cannot_be_removed, 1, {"step-100", f"step-0{REMOVED}"}, told=f"step-0{REMOVED}: damaged"),
]


@on_ranks(2, [(case,) for case in CASES])
def test_a_save_removes_what_it_wrote_and_nothing_else(rank: int, case: Case, tmp_path: Path) -> None:
    run, pair = tmp_path / f"{case.change.__name__} {case.keep}" / "run", linear()
    assert latest(run) is None
    for step in (30, 200):  # not in the order of names
        save_checkpoint(run / f"step-{step}", *pair, keep=case.keep if case.keep == 2 else None)
    if rank == 0:
        case.change(run)
    dist.barrier()
    before = content(run.parent)
    users = [name for name, data in before.items() if data == MINE or name.startswith("elsewhere")]
    users += [name for name in before if (run.parent / name).is_symlink()]
    with logged() as lines:
        save_checkpoint(run / "step-100", *pair, keep=case.keep)
    wait_for_pruning()
    assert names_in(run) == case.left
    assert latest(run) == run / "step-100"
    after = content(run.parent)
    assert {name: before[name] for name in users} == {name: after.get(name) for name in users}
    for name in STEPS & case.left:
        assert names_in(run / name) == case.within.get(name, names_in(run / "step-100")), name
    if case.told and rank == 0:
        (line,) = lines
        assert line.startswith("WARNING: keep: ")
        assert case.told in line
    else:
        assert lines == []
    load_checkpoint(run, *linear())


@on_ranks(2, ["step-2/__1_0.distcp", f"step-2/{MANIFEST}", "step-1/objects.pt"])
def test_falling_back_to_an_older_checkpoint_is_told(rank: int, file: str, tmp_path: Path) -> None:
    """Of one that was cut short, or has no manifest; an older one that is damaged is nobody's concern."""
    run, pair = tmp_path / file.replace("/", " "), linear()
    for step in (1, 2):
        save_checkpoint(run / f"step-{step}", *pair, extra=step)
    if rank == 0:
        data = (run / file).read_bytes()
        (run / file).write_bytes(data[:-9]) if "distcp" in file else (run / file).unlink()
    dist.barrier()
    whole = 2 if "step-1" in file else 1
    with logged() as lines:
        assert latest(run, group=dist.group.WORLD) == run / f"step-{whole}"
        assert load_checkpoint(run, *pair) == whole
    assert len(lines) == (2 if whole == 1 and rank == 0 else 0)
    for line in lines:
        assert line.startswith(f"WARNING: {run}/step-2")
        assert line.endswith(f"; the newest whole one is {run}/step-1")
    if lines:
        shutil.rmtree(run / "step-1")
        with logged() as lines:
            assert latest(run) is None
        assert lines[0].endswith("; no whole checkpoint was found")
