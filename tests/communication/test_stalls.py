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
from lowlevel_zero.checkpoint import latest
from lowlevel_zero.communication.agreement import agree
from lowlevel_zero.communication.progress import NORM, REDUCTION, About
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.communication.work import Work
from lowlevel_zero.diagnostics.stall_report import watch
from tests.support.on_ranks import on_ranks
from tests.support.options import grouped
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks
from tests.support.saving import Pair, refused, squares, train, wrapped

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


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def ended() -> Reports:
    """How many ranks have ended."""
    return Reports()


def wrap(layers: int = 2, **options: Any) -> Pair:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    return wrapped(model, **grouped({"stall_timeout": TIMEOUT, **options}))


def trained(*of_wrap: int, **options: Any) -> Pair:
    """After a step that went well."""
    pair = wrap(*of_wrap, **options)
    train(*pair)
    return pair


def wait_until(said: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not said() and time.monotonic() < deadline:
        time.sleep(0.02)


@on_ranks(3, timeout=2 * PATIENCE)
def test_all_that_wait_say_for_whom_and_for_what(rank: int, reports: Reports) -> None:
    """Rank 2 is late for backward; the others' reports name the place in which it is."""
    told, pair = Told(reports), trained()
    if rank == 2:
        reports.wait_for(2)
    train(*pair)
    if rank == 2:
        assert told.lines == []
    else:
        (line,) = told.lines
        where = r"in step, which all ranks call, for the agreement \d+ \(step 2\)\. "
        assert re.match(rf"rank {rank} has waited [\d.]+ s {where}", line)
        assert "Not there yet: rank 2 (outside of the optimizer, after 1 steps). A rank that is busy" in line


@on_ranks(2, timeout=2 * PATIENCE)
def test_a_reduction_is_named_by_bucket_and_parameters(rank: int, reports: Reports) -> None:
    """The ranks have agreed on a call; then rank 1 stands still before it joins the backward that rank 0 alone ran."""
    told, (model, optimizer) = Told(reports), trained(12, partition_grad=True, reduce_bucket_size=32)

    def agree_and_stand_still(*arguments: Any, **keywords: Any) -> Any:
        agreed = agree(*arguments, **keywords)
        reports.wait_for(1)
        return agreed

    if rank == 0:
        squares(model).backward()
    else:
        patch_rank(reducer, "agree", agree_and_stand_still)
    optimizer.zero_grad()
    if rank == 0:
        (line,) = told.lines
        assert "for the reduction of bucket 0 (step 2, micro-batch 1): 11.bias, 11.weight, 10.bias." in line
        assert "rank 1 (outside of the optimizer, after 1 steps)" in line
    else:
        assert told.lines == []


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared memory", "messages"])
@on_ranks(2, timeout=2 * PATIENCE)
def test_a_wait_that_a_backward_gave_up_is_over_with_its_collective(
    rank: int, shared: str, monkeypatch: pytest.MonkeyPatch, reports: Reports, ended: Reports
) -> None:
    """Rank 0's second backward goes on without rank 1; when rank 1 has come, rank 0 waits for nothing any more."""
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", shared)
    monkeypatch.setattr(gradient_sync, "_PATIENCE", 0.1)
    told, (model, optimizer) = Told(reports), trained(12, partition_grad=True, reduce_bucket_size=32)
    if rank == 1:
        reports.wait_for(1)
    optimizer.backward(squares(model))
    train(model, optimizer)
    assert str(optimizer.shard_group.progress) == "outside of the optimizer, after 2 steps"
    ended.add()
    ended.wait_for(2)
    assert bool(told.lines) == (rank == 0)
    for line in told.lines:
        assert "Not there yet: rank 1 (outside of the optimizer, after 1 steps). A rank that is busy" in line


@on_ranks(2, timeout=2 * PATIENCE)
def test_each_stall_is_reported_once(rank: int, reports: Reports) -> None:
    told, pair = Told(reports), trained()
    for count in (1, 1, 2):
        if rank == 1:
            reports.wait_for(count)
        train(*pair)
    if rank == 0:
        places = [line.partition(" for the ")[2].partition(". ")[0] for line in told.lines]
        assert len(set(places)) == len(places)
        assert all(step in " ".join(places) for step in ("(step 2)", "(step 4)"))


@on_ranks(2)
def test_a_rank_that_waits_elsewhere_is_said_to(rank: int, reports: Reports) -> None:
    """Rank 1 is a step ahead: both wait, in different places, and each knows where the other is."""
    told, group, mine = Told(reports), ShardGroup(), (REDUCTION, NORM)[rank]
    watch(group, TIMEOUT)
    group.progress.start(mine, None, Work, lambda: None)
    group.progress.start(mine, None, Work, lambda: reports.wait_for(2)).wait()
    (line,) = told.lines
    assert f"rank {1 - rank} (waits for the {('sum of the norm', 'reduction')[rank]} 1 (step 1" in line


@on_ranks(2)
def test_a_rank_whose_process_stands_still_does_not_answer(rank: int, reports: Reports) -> None:
    told, pair = Told(reports), trained()
    if rank == 1:
        parent, child = os.getpid(), os.fork()
        if child == 0:  # wakes the stopped rank
            with suppress(AssertionError):
                reports.wait_for(1)
            os.kill(parent, signal.SIGCONT)
            os._exit(0)
        os.kill(parent, signal.SIGSTOP)
        os.waitpid(child, 0)
    train(*pair)
    assert rank == 1 or "rank 1 (doesn't answer: its process has ended or stands still)" in told.lines[0]


@on_ranks(2, timeout=10.0)
def test_the_report_comes_before_the_process_groups_own_timeout(rank: int) -> None:
    """``run_ranks`` gives a group twice its own timeout and ten seconds."""
    watched = watch(ShardGroup(), 1e6)
    assert watched is not None
    assert watched.timeout + 5 * watched.pause < 30.0


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
        group.progress.start(REDUCTION, About([Parameter(name)]), on_a_device).wait()


class Parameter(NamedTuple):
    name: str


@on_ranks(2, timeout=2 * PATIENCE)
def test_what_a_device_waits_for_is_known_without_asking_it(rank: int, reports: Reports) -> None:
    """Rank 0's host has gone on; the first of its collectives that rank 1 hasn't begun is what its device waits for."""
    told = Told(reports)
    with devices_are_this_threads() as asked:
        group = ShardGroup()
        watch(group, TIMEOUT)
        give(group, "ab" if rank == 1 else "abcd")
        reports.wait_for(1)
        assert asked == []
    if rank == 0:
        (line,) = told.lines
        assert re.match(r"rank 0 has waited [\d.]+ s for the reduction \(step 1, micro-batch 1\): c\. ", line)
        assert "Not there yet: rank 1 (outside of the optimizer, after 0 steps). A rank that is busy elsewhere" in line
        assert line.endswith("or because it has no batch left, make the call on every rank")
    else:
        assert told.lines == []


@on_ranks(4, timeout=2 * PATIENCE)
def test_who_is_busy_elsewhere_with_nobody_missing_is_left_alone(rank: int, reports: Reports) -> None:
    """Where all have begun the same nobody waits for anybody, though one may be gone for good (of ranks 2 and 3)."""
    told, pairs = Told(reports), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = ShardGroup(pairs[rank // 2])
    group.connect()  # as construction does
    watch(group, TIMEOUT)
    give(group, "ab")
    if rank == 3:
        group.leave()
        del group
        gc.collect()
    time.sleep(2 * TIMEOUT)
    assert told.lines == []


@on_ranks(2, timeout=2 * PATIENCE)
def test_who_has_left_without_beginning_it_is_missed(rank: int, reports: Reports) -> None:
    told, group = Told(reports), ShardGroup()
    group.connect()  # as construction does
    watch(group, TIMEOUT)
    if rank == 1:
        group.leave()
    else:
        give(group, "a")
    reports.wait_for(1)
    lost = "Not there yet: rank 1 (has let go of its optimizer, after 0 steps)"
    assert [lost in line for line in told.lines] == [True] * (rank == 0)


@on_ranks(2, timeout=2 * PATIENCE)
def test_optimizers_that_were_refused_don_t_count(rank: int, reports: Reports) -> None:
    """One rank's was wrong from the start: the next is watched over under one name all the same."""
    told, first = Told(reports), trained()
    with pytest.raises((TypeError, RuntimeError)):
        wrap(reduce_bucket_size="many" if rank == 1 else 100)
    other = wrap()
    if rank == 1:
        reports.wait_for(1)
    train(*other)
    train(*first)
    lost = "Not there yet: rank 1 (outside of the optimizer, after 0 steps)"
    assert [lost in line for line in told.lines] == [True] * (rank == 0)


@on_ranks(2, timeout=2 * PATIENCE)
def test_a_rank_that_is_late_to_look_for_checkpoints_is_named(rank: int, tmp_path: Path, reports: Reports) -> None:
    """Within the ``stall_timeout`` of the optimizer over the same ranks, whoever has waited for whom before."""
    told, pair = Told(reports), trained()
    for late in (1, 0):
        if rank == late:
            reports.wait_for(2 - late)
        assert latest(tmp_path, group=dist.group.WORLD) is None
    wait_until(lambda: len(watchdogs()) == 1)
    assert len(watchdogs()) == 1
    where = r"in latest, which all ranks call, for the agreement 0 \(step 1\)\. Not there yet: "
    said = rf"rank {rank} has waited [\d.]+ s {where}rank {1 - rank} \(doesn't answer: it hasn't called latest, or"
    assert [bool(re.match(said, line)) for line in told.lines] == [True]
    train(*pair)


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "watchdog" in thread.name]


@on_ranks(2)
def test_a_thread_watches_each_and_goes_with_it(rank: int) -> None:
    counts, optimizers = [len(watchdogs())], [wrap() for _ in range(3)]
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
        again = wrap(stall_timeout=timeout)
        counts.append(len(watchdogs()))
        del again
    assert counts == [0, 3, 0, 0, 1, 0, 0]


@on_ranks(3)
def test_a_thread_watches_the_group_of_experts_too_where_it_has_other_ranks(rank: int) -> None:
    group = [dist.new_group(ranks) for ranks in ([0, 1], [2])][rank // 2]
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = LowLevelZeroOptimizer(sgd, {group: list(model[1].parameters())}, model=model)
    assert len(watchdogs()) == (1 if rank == 2 else 2)
    del optimizer


@on_ranks(2, (False, True), one_group=False)
def test_a_call_of_one_rank_alone_is_named_on_all_that_wait(rank: int, elsewhere: bool) -> None:
    """The others train on, or wait somewhere else for the one that has been sent to save, say."""
    patch_rank(gradient_sync, "_PATIENCE", 0.1)
    options = {"partition_grad": True, "reduce_bucket_size": 8, "stall_timeout": 0.5}
    options["dp_process_group"] = group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    model, optimizer = trained(6, **options)
    if rank == 0:
        told = refused(optimizer.state_dict)
    elif elsewhere:
        told = refused(lambda: dist.barrier(group))  # torch's own error
    else:
        told = refused(lambda: train(model, optimizer))
    if not elsewhere:
        both = "RuntimeError: expected the same call on every rank, got rank 0 to state_dict; rank 1 to step: "
        assert told.startswith(both)
    elif rank == 0:
        assert told.startswith("RuntimeError: state_dict: every rank calls it, and this one has waited in vain ")
        place = "rank 1 (outside of the optimizer, after 1 steps)"
        assert f"Not there yet: {place}: let every rank make the same calls in the same order, with" in told
        assert told.endswith("none of the calls under «if rank == 0»")
        # Whatever came next would pair up with what the other rank left out.
        assert refused(lambda: wrap(6, dp_process_group=group)) == told.replace("RuntimeError", "LostRank", 1)


@pytest.mark.parametrize(("store", "world_size"), [("file", 3), ("tcp", 2)])
def test_a_rank_that_has_not_constructed_its_optimizer_is_named(
    store: str, world_size: int, tmp_path: Path, reports: Reports
) -> None:
    """The last rank comes when the others have reported it; then all train."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}" if store == "tcp" else f"file://{tmp_path}/rendezvous"

    def live(rank: int, world_size: int) -> list[str]:
        dist.init_process_group("gloo", place, rank=rank, world_size=world_size)
        told = Told(reports)
        if rank == world_size - 1:
            reports.wait_for(world_size - 1)
        trained()
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
        assert line.partition(". A rank that")[0].count("rank ") == 2
        assert missing in line
