"""Checkpoints of several runs, and several writers, in one folder; and which of them is the newest, on all ranks."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # here once, not in every forked rank
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, save_checkpoint, storage
from tests.support.checkpoints import wait_for_pruning
from tests.support.ranks import run_ranks


def start(group: Any = None) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return model, LowLevelZeroOptimizer(inner, model=model, dp_process_group=group)


def names_in(folder: Path) -> set[str]:
    return {place.name for place in folder.iterdir()}


def test_each_run_keeps_its_own(tmp_path: Path) -> None:
    """Whatever they are called; a run that has loaded a checkpoint goes on with the run that saved it."""
    folder = tmp_path / "run"

    def runs(rank: int, world_size: int) -> None:
        one, other = start(), start()
        for step in (1, 2, 3):
            save_checkpoint(folder / f"step-{step}", *one, keep=2)
            save_checkpoint(folder / f"other {step}", *other, keep=1)
        wait_for_pruning()
        assert names_in(folder) == {"step-2", "step-3", "other 3"}
        stranger = start()
        save_checkpoint(folder / "step-4", *stranger, keep=1)
        wait_for_pruning()
        assert names_in(folder) == {"step-2", "step-3", "step-4", "other 3"}

    def resumed(rank: int, world_size: int) -> None:
        one, fork = start(), start()
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
        pair = start()
        for step in (1, 2):
            save_checkpoint(tmp_path / f"step-{step}", *pair)
            monkeypatch.setattr(time, "time_ns", lambda: 1)
        assert latest(tmp_path) == tmp_path / "step-2"
        resumed = start()
        load_checkpoint(tmp_path, *resumed)
        save_checkpoint(tmp_path / "step-3", *resumed, keep=2)
        wait_for_pruning()
        assert names_in(tmp_path) == {"step-2", "step-3"}
        assert latest(tmp_path) == tmp_path / "step-3"

    run_ranks(saves, 2)


def test_no_write_in_progress_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizers' groups save into one folder at the same time; so does somebody by hand."""

    def save(rank: int, world_size: int) -> list[Any]:
        pairs, reader = [start(dist.new_group([0, 1])) for _ in range(2)], start()
        goes_on, planned = threading.Event(), threading.Event()
        write = storage.CheckpointWriter.write_share

        def held(writer: Any, claimed: Any) -> Any:
            planned.set()
            assert goes_on.wait(20)
            return write(writer, claimed)

        by_hand = tmp_path / "of another tool.0123456789abcdef.tmp"
        by_hand.mkdir(exist_ok=True)
        (by_hand / "part").write_text("half of it")
        told = []
        monkeypatch.setattr(storage.CheckpointWriter, "write_share", held)
        slow = save_checkpoint(tmp_path / "there", *pairs[0], extra="slow", async_save=True)
        assert planned.wait(20)
        monkeypatch.setattr(storage.CheckpointWriter, "write_share", write)
        for name in ("one", "two"):
            save_checkpoint(tmp_path / name, *pairs[1], extra=name, keep=1)
        told.append(load_checkpoint(tmp_path, *reader))
        goes_on.set()
        slow.wait()
        told.append(load_checkpoint(tmp_path / "there", *reader))
        return told

    assert run_ranks(save, 2) == [["two", "slow"]] * 2
    assert names_in(tmp_path) == {"two", "there", "of another tool.0123456789abcdef.tmp"}


def test_a_write_is_left_alone_whichever_rank_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank comes late to one save, while another save clears what crashes have left."""

    def save(rank: int, world_size: int) -> Any:
        pairs = [start(dist.new_group([0, 1])) for _ in range(2)]
        goes_on, written = threading.Event(), threading.Event()
        write = storage.CheckpointWriter.write_share

        def held(writer: Any, claimed: Any) -> Any:
            if rank == 0:
                assert goes_on.wait(20)
                return write(writer, claimed)
            sums = write(writer, claimed)
            written.set()
            return sums

        monkeypatch.setattr(storage.CheckpointWriter, "write_share", held)
        slow = save_checkpoint(tmp_path / "slow", *pairs[0], extra="slow", async_save=True)
        assert rank == 0 or written.wait(20)
        dist.barrier()
        monkeypatch.setattr(storage.CheckpointWriter, "write_share", write)
        save_checkpoint(tmp_path / "quick", *pairs[1])
        goes_on.set()
        slow.wait()
        return load_checkpoint(tmp_path / "slow", *pairs[1])

    assert run_ranks(save, 2) == ["slow", "slow"]
    assert names_in(tmp_path) == {"slow", "quick"}


def test_the_first_of_two_saves_to_one_place_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither could see the other when it began."""

    def save(rank: int, world_size: int) -> Any:
        pairs = [start(dist.new_group([0, 1])) for _ in range(2)]
        goes_on, planned = threading.Event(), threading.Event()
        write = storage.CheckpointWriter.write_share

        def held(writer: Any, claimed: Any) -> Any:
            planned.set()
            assert goes_on.wait(20)
            return write(writer, claimed)

        monkeypatch.setattr(storage.CheckpointWriter, "write_share", held)
        slow = save_checkpoint(tmp_path / "here", *pairs[0], extra="slow", async_save=True)
        assert planned.wait(20)
        monkeypatch.setattr(storage.CheckpointWriter, "write_share", write)
        save_checkpoint(tmp_path / "here", *pairs[1], extra="quick")
        goes_on.set()
        with pytest.raises(RuntimeError, match="rank 0: FileExistsError: .*here: expected nothing there"):
            slow.wait()
        return load_checkpoint(tmp_path / "here", *pairs[1])

    assert run_ranks(save, 2) == ["quick", "quick"]
    assert names_in(tmp_path) == {"here"}


def test_the_newest_is_what_rank_0_sees(tmp_path: Path) -> None:
    """Others may see more, or less, at the moment they look. A directory of checkpoints stands for its newest."""

    def run(rank: int, world_size: int) -> list[Any]:
        pair = start()
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


def test_an_empty_directory_is_refused_alike_on_all_ranks(tmp_path: Path) -> None:
    def load(rank: int, world_size: int) -> list[str]:
        told = []
        for path in (tmp_path / "nothing", tmp_path):
            with pytest.raises((FileNotFoundError, ValueError)) as caught:
                load_checkpoint(path, *start())
            told.append(f"{caught.type.__name__}: {caught.value}")
        return told

    for missing, empty in run_ranks(load, 3):
        assert missing.startswith("FileNotFoundError: ")
        assert empty.startswith("ValueError: ")


def test_each_file_is_looked_at_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(rank: int, world_size: int) -> list[str]:
        pair = start()
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
        pair = start(dist.new_group([0, 1], timeout=timedelta(seconds=2)))
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
