"""The stall report: who waits says for what and for whom, in time, and no thread stays behind."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer, reducer
from lowlevel_zero.bookkeeping import gradient_sync
from lowlevel_zero.communication.agreement import agree
from lowlevel_zero.communication.failed_ranks import LostRank
from lowlevel_zero.communication.progress import NORM, REDUCTION, About
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.communication.work import Work
from lowlevel_zero.diagnostics.stall_report import watch
from tests.support.options import grouped
from tests.support.patching import patch_rank
from tests.support.ranks import run_cases, run_ranks

TIMEOUT = 1.5  # after which a wait is reported: what isn't meant to stall takes less even on a busy machine
PATIENCE = 40.0  # for what must come, if late


class Reports:
    """How many all ranks, which are forked processes, have made so far."""

    def __init__(self) -> None:
        self._count = multiprocessing.get_context("fork").Value("i", 0)

    def add(self) -> None:
        with self._count:
            self._count.value += 1

    def wait_for(self, count: int) -> None:
        """Return when there are so many."""
        wait_until(lambda: self._count.value >= count)
        assert self._count.value >= count


class Told(logging.Handler):
    """What the package logs at WARNING and above."""

    def __init__(self, reports: Reports) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._reports = reports
        logging.getLogger("lowlevel_zero").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._reports.add()


def net(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers - 1)), nn.Linear(4, 2))


def wrap(model: nn.Module, **options: Any) -> LowLevelZeroOptimizer:
    options = grouped({"stall_timeout": TIMEOUT, **options})
    return LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)


def train(model: nn.Module, optimizer: LowLevelZeroOptimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()


def wait_until(said: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not said() and time.monotonic() < deadline:
        time.sleep(0.02)


Stall = Callable[[int, nn.Module, LowLevelZeroOptimizer, Reports], None]


def run_stalled(world_size: int, stall: Stall, layers: int = 2, **options: Any) -> Any:
    """What each rank has logged when ``stall`` has ended, after a step that went well."""
    reports = Reports()

    def live(rank: int, world_size: int) -> list[str]:
        told = Told(reports)
        model = net(layers)
        optimizer = wrap(model, **options)
        train(model, optimizer)
        stall(rank, model, optimizer, reports)
        train(model, optimizer)
        return told.lines

    return run_ranks(live, world_size, timeout=2 * PATIENCE)


def test_all_that_wait_say_for_whom_and_for_what() -> None:
    """Rank 2 is late for backward; the others' reports name the place in which it is."""

    def stall(rank: int, model: nn.Module, optimizer: LowLevelZeroOptimizer, reports: Reports) -> None:
        if rank == 2:
            reports.wait_for(2)

    first, second, late = run_stalled(3, stall)
    assert late == []
    for rank, lines in enumerate((first, second)):
        (line,) = lines
        where = r"in step, which all ranks call, for the agreement \d+ \(step 2\)\. "
        assert re.match(rf"rank {rank} has waited [\d.]+ s {where}", line)
        assert line.endswith("Not there yet: rank 2 (outside of the optimizer, after 1 steps)")


def test_a_reduction_is_named_by_bucket_and_parameters() -> None:
    """The ranks have agreed on a call; then rank 1 stands still before it joins the backward that rank 0 alone ran."""

    def stall(rank: int, model: nn.Module, optimizer: LowLevelZeroOptimizer, reports: Reports) -> None:
        def agree_and_stand_still(*arguments: Any, **keywords: Any) -> Any:
            agreed = agree(*arguments, **keywords)
            reports.wait_for(1)
            return agreed

        if rank == 0:
            model(torch.ones(2, 4)).sum().backward()
        else:
            patch_rank(reducer, "agree", agree_and_stand_still)
        optimizer.zero_grad()

    (line,), late = run_stalled(2, stall, layers=12, partition_grad=True, reduce_bucket_size=32)
    assert late == []
    assert "for the reduction of bucket 0 (step 2, micro-batch 1): 11.bias, 11.weight, 10.bias, 10.weight." in line
    assert "rank 1 (outside of the optimizer, after 1 steps)" in line


@pytest.mark.parametrize("carrier", ["shared memory", "messages"])
def test_a_wait_that_a_backward_gave_up_is_over_with_its_collective(
    carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's second backward goes on without rank 1; when rank 1 has come, rank 0 waits for nothing any more."""
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", str(int(carrier == "shared memory")))
    monkeypatch.setattr(gradient_sync, "_PATIENCE", 0.1)
    ended = Reports()

    def stall(rank: int, model: nn.Module, optimizer: LowLevelZeroOptimizer, reports: Reports) -> None:
        if rank == 1:
            reports.wait_for(1)
        optimizer.backward(model(torch.ones(2, 4)).sum())
        train(model, optimizer)
        assert str(optimizer.shard_group.progress) == "outside of the optimizer, after 2 steps"
        ended.add()
        ended.wait_for(2)

    lines, late = run_stalled(2, stall, layers=12, partition_grad=True, reduce_bucket_size=32)
    assert late == []
    assert lines
    for line in lines:
        assert line.endswith("Not there yet: rank 1 (outside of the optimizer, after 1 steps)")


def test_each_stall_is_reported_once() -> None:
    def stall(rank: int, model: nn.Module, optimizer: LowLevelZeroOptimizer, reports: Reports) -> None:
        for count in (1, 1, 2):
            if rank == 1:
                reports.wait_for(count)
            train(model, optimizer)

    lines, _ = run_stalled(2, stall)
    places = [line.partition(" for the ")[2].partition(". ")[0] for line in lines]
    assert len(set(places)) == len(places)
    assert [step in " ".join(places) for step in ("(step 2)", "(step 4)")] == [True, True]


def test_a_rank_that_waits_elsewhere_is_said_to() -> None:
    """Rank 1 is a step ahead: both wait, in different places, and each knows where the other is."""

    reports = Reports()

    def live(rank: int, world_size: int) -> list[str]:
        told = Told(reports)
        group = ShardGroup()
        watch(group, TIMEOUT)
        mine = (REDUCTION, NORM)[rank]
        group.progress.start(mine, None, (), Work, lambda: None)
        group.progress.start(mine, None, (), Work, lambda: reports.wait_for(2)).wait()
        return told.lines

    for rank, lines in enumerate(run_ranks(live, 2)):
        (line,) = lines
        assert f"rank {1 - rank} (waits for the {('sum of the norm', 'reduction')[rank]} 1 (step 1" in line


def test_a_rank_whose_process_stands_still_does_not_answer() -> None:
    reports = Reports()

    def live(rank: int, world_size: int) -> list[str]:
        told = Told(reports)
        model = net()
        optimizer = wrap(model)
        train(model, optimizer)
        if rank == 1:
            parent, child = os.getpid(), os.fork()
            if child == 0:  # wakes the stopped rank
                with suppress(AssertionError):
                    reports.wait_for(1)
                os.kill(parent, signal.SIGCONT)
                os._exit(0)
            os.kill(parent, signal.SIGSTOP)
            os.waitpid(child, 0)
        train(model, optimizer)
        return told.lines

    lines, _ = run_ranks(live, 2)
    assert "rank 1 (doesn't answer: its process has ended or stands still)" in lines[0]


def test_the_report_comes_before_the_process_groups_own_timeout() -> None:
    """``run_ranks`` gives a group twice its own timeout and ten seconds."""

    def live(rank: int, world_size: int) -> float:
        group = ShardGroup()
        watched = watch(group, 1e6)
        assert watched is not None
        return watched.timeout + 5 * watched.pause

    assert all(seconds < 30.0 for seconds in run_ranks(live, 2, timeout=10.0))


# ---- what a device waits for ----


@contextmanager
def devices_are_this_threads() -> Iterator[list[str]]:
    """Whatever another thread asks a device, an event or a stream meanwhile is an error there; what it asked."""
    home, asked = threading.current_thread(), []

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            if threading.current_thread() is not home:
                asked.append(name)
                raise AssertionError(f"{threading.current_thread().name} calls {name}")
            return call(*args, **keywords)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream, torch.Event, torch.Stream):
            for name in (name for name in dir(owner) if not name.startswith("__") and callable(getattr(owner, name))):
                with suppress(TypeError):  # a built-in type's
                    patch.setattr(owner, name, watched(f"{owner.__name__}.{name}", getattr(owner, name)))
        patch.setattr(torch, "get_device_module", watched("get_device_module", lambda *_: Device))
        yield asked


class Device:
    """What ``torch.cuda`` is for a device that never gets anywhere, and answers the thread alone that uses it."""

    class Event:
        def __init__(self) -> None:
            self.home = threading.current_thread()

        def record(self, *_: object) -> None:
            assert threading.current_thread() is self.home

        def query(self) -> bool:
            assert threading.current_thread() is self.home, "an event is asked by another thread"
            return False


def on_a_device() -> Work[None]:
    return Work(lambda: None, tensors=(torch.empty(1, device="meta"),))


def give(group: ShardGroup, names: str) -> None:
    """Begin reductions, one a name, whose sums the device is to wait for."""
    for name in names:
        group.progress.start(REDUCTION, About([Parameter(name)]), (), on_a_device).wait()


class Parameter(NamedTuple):
    name: str


def test_what_a_device_waits_for_is_known_without_asking_it() -> None:
    """Rank 0's host has gone on; the first of its collectives that rank 1 hasn't begun is what its device waits for."""
    reports = Reports()

    def live(rank: int, world_size: int) -> list[str]:
        told = Told(reports)
        with devices_are_this_threads() as asked:
            group = ShardGroup()
            watch(group, TIMEOUT)
            give(group, "ab" if rank == 1 else "abcd")
            reports.wait_for(1)
            assert asked == []
        return told.lines

    (line,), late = run_ranks(live, 2, timeout=2 * PATIENCE)
    assert late == []
    assert re.match(r"rank 0 has waited [\d.]+ s for the reduction \(step 1, micro-batch 1\): c\. ", line)
    assert line.endswith("Not there yet: rank 1 (outside of the optimizer, after 0 steps)")


def test_who_is_busy_elsewhere_with_nobody_missing_is_left_alone() -> None:
    """Where all have begun the same nobody waits for anybody, though one may be gone for good (of ranks 2 and 3)."""

    def live(rank: int, world_size: int) -> list[str]:
        told = Told(Reports())
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = ShardGroup(pairs[rank // 2])
        group.all_reduce_max([0])  # as construction does
        watch(group, TIMEOUT)
        give(group, "ab")
        if rank == 3:
            group.leave()
            del group
            gc.collect()
        time.sleep(2 * TIMEOUT)
        return told.lines

    assert run_ranks(live, 4, timeout=2 * PATIENCE) == [[], [], [], []]


def test_who_has_left_without_beginning_it_is_missed() -> None:
    reports = Reports()

    def live(rank: int, world_size: int) -> list[str]:
        told = Told(reports)
        group = ShardGroup()
        group.all_reduce_max([0])  # as construction does
        watch(group, TIMEOUT)
        if rank == 1:
            group.leave()
        else:
            give(group, "a")
        reports.wait_for(1)
        return told.lines

    (line,), gone = run_ranks(live, 2, timeout=2 * PATIENCE)
    assert gone == []
    assert line.endswith("Not there yet: rank 1 (has let go of its optimizer, after 0 steps)")


def test_optimizers_that_were_refused_don_t_count() -> None:
    """One rank's was wrong from the start: the next is watched over under one name all the same."""

    def stall(rank: int, model: nn.Module, optimizer: LowLevelZeroOptimizer, reports: Reports) -> None:
        with pytest.raises((TypeError, RuntimeError)):
            wrap(net(), reduce_bucket_size="many" if rank == 1 else 100)
        other = wrap(odd := net())
        if rank == 1:
            reports.wait_for(1)
        train(odd, other)

    (line,), late = run_stalled(2, stall)
    assert late == []
    assert line.endswith("Not there yet: rank 1 (outside of the optimizer, after 0 steps)")


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "watchdog" in thread.name]


def test_a_thread_watches_each_and_goes_with_it() -> None:
    def live(rank: int, world_size: int) -> list[int]:
        counts = [len(watchdogs())]
        optimizers = [wrap(net()) for _ in range(3)]
        counts.append(len(watchdogs()))
        if (child := os.fork()) == 0:
            os._exit(len(watchdogs()))
        counts.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        gc.collect()
        gc.disable()
        optimizers.clear()
        for timeout in (TIMEOUT, 0):
            wait_until(lambda: not watchdogs())
            counts.append(len(watchdogs()))
            again = wrap(net(), stall_timeout=timeout)
            counts.append(len(watchdogs()))
            del again
        return counts

    assert run_ranks(live, 2) == [[0, 3, 0, 0, 1, 0, 0]] * 2


def test_a_call_of_one_rank_alone_is_named_on_all_that_wait(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others train on, or wait somewhere else for the one that has been sent to save, say."""
    monkeypatch.setattr(gradient_sync, "_PATIENCE", 0.1)

    def call(rank: int, world_size: int, elsewhere: bool) -> str:
        model = net(6)
        group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
        optimizer = wrap(model, dp_process_group=group, partition_grad=True, reduce_bucket_size=8, stall_timeout=0.5)
        train(model, optimizer)
        try:
            if rank == 0:
                optimizer.state_dict()
            elif elsewhere:
                dist.barrier(group)
            else:
                train(model, optimizer)
        except RuntimeError as error:
            if "in vain" in str(error):  # whatever came next would pair up with what the other rank left out
                with pytest.raises(LostRank, match=re.escape(str(error))):
                    wrap(net(6), dp_process_group=group)
            return str(error)
        return "went on"

    for (elsewhere,), ran in run_cases(call, 2, [(False,), (True,)]):
        with subtests.test(elsewhere=elsewhere):
            first, second = ran.values()
            if elsewhere:  # there torch's barrier raises
                assert re.match("state_dict: every rank calls it, and this one has waited in vain ", first)
                place = r"\(outside of the optimizer, after 1 steps\)"
                end = "let every rank make the same calls in the same order"
                assert re.search(rf"Not there yet: rank 1 {place}: {end}$", first)
            else:
                both = "expected the same call on every rank, got rank 0 to state_dict; rank 1 to step: "
                assert first.startswith(both)
                assert second.startswith(both)


@pytest.mark.parametrize(("store", "world_size"), [("file", 3), ("tcp", 2)])
def test_a_rank_that_has_not_constructed_its_optimizer_is_named(store: str, world_size: int, tmp_path: Path) -> None:
    """The last rank comes when the others have reported it; then all train."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}" if store == "tcp" else f"file://{tmp_path}/rendezvous"
    reports = Reports()

    def live(rank: int, world_size: int) -> list[str]:
        dist.init_process_group("gloo", place, rank=rank, world_size=world_size)
        told, model = Told(reports), net()
        if rank == world_size - 1:
            reports.wait_for(world_size - 1)
        train(model, wrap(model))
        return told.lines

    *others, late = run_ranks(live, world_size, init=False, timeout=2 * PATIENCE)
    assert late == []
    for rank, lines in enumerate(others):
        (line,) = lines
        where = r"in LowLevelZeroOptimizer, which all ranks call, for the agreement 0 \(step 1\)\. Not there yet: "
        assert re.match(rf"rank {rank} has waited [\d.]+ s {where}", line)
        missing = (
            f"rank {world_size - 1} (doesn't answer: it hasn't constructed its optimizer, or its process has ended"
        )
        assert line.count("rank ") == 2
        assert missing in line
