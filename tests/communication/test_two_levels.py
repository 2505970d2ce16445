"""Two levels of ranks: the numbers of one level and of one process, in order under delays, and what is refused."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import Communication
from lowlevel_zero.communication import work
from lowlevel_zero.communication.runtime import Threads
from lowlevel_zero.communication.work import OnDemand, OnStream, OnThread, Work
from lowlevel_zero.deepspeed import accessors
from lowlevel_zero.layout import traffic_of
from lowlevel_zero.streams import Streams
from tests.support.checkpoints import check_same
from tests.support.grid import Grid, group_among
from tests.support.judging import check_run
from tests.support.on_ranks import on_ranks
from tests.support.oracle import Result, Run, train_sharded
from tests.support.ranks import run_cases_expecting, run_ranks
from tests.support.saving import adamw, linear, wrapped

# ---- numbers ----


def check_accessors(p: nn.Parameter) -> None:
    """What is written by slices is read whole."""
    values = torch.arange(120.0).view(10, 12)
    accessors.safe_set_full_fp32_param(p, values)
    accessors.safe_set_full_optimizer_state(p, values + 1, "exp_avg")
    check_same([values, values], [p.detach(), accessors.safe_get_full_fp32_param(p)])
    check_same(values + 1, accessors.safe_get_full_optimizer_state(p, "exp_avg"))


@pytest.mark.usefixtures("unaligned")
@on_ranks(6)
def test_slices_are_those_of_the_form(rank: int) -> None:
    """Who holds what, what is held, and how much crosses the outer level."""
    grid = Grid.of(rank, (2, 3))
    flat = {"reduce": 480 * 5 // 6, "gather": 480 * 5 // 6}
    levels = {"reduce": 2 * 160 + 160, "gather": 2 * 160, "reduce_outer": 160, "gather_outer": 0}
    _, of_stage_1 = wrapped(model := nn.Linear(12, 10, bias=False), adamw, **grid.options("hybrid"))
    of_stage_1.backward(model(torch.ones(1, 12)).sum())
    of_stage_1.step()
    assert traffic_of(of_stage_1) == {**levels, "reduce": 4 * 160 + 160}
    for form in ("flat", "pair", "keywords", "hybrid"):
        torch.manual_seed(rank)
        model, optimizer = wrapped(nn.Linear(12, 10, bias=False), adamw, partition_grad=True, **grid.options(form))
        optimizer.backward(model(torch.ones(1, 12)).sum())
        optimizer.step()
        assert traffic_of(optimizer) == (levels if form == "hybrid" else flat), form
        check_same(torch.ones(10, 12), optimizer.get_param_grad(model.weight))
        (own,) = optimizer.optim.param_groups[0]["params"]
        start = (own.data_ptr() - model.weight.data_ptr()) // 4
        assert (start, own.numel()) == ((40 * (rank % 3), 40) if form == "hybrid" else (20 * rank, 20)), form
        state = optimizer.state_dict(only_on_master=True)["state"]
        assert len(state[0]) == (0 if rank else 3)
        check_accessors(model.weight)


@on_ranks(4, timeout=60)
def test_buckets_are_cut_alike_where_one_row_alone_shares_memory(rank: int) -> None:
    """Messages are cut into larger ones."""
    os.environ["LOWLEVEL_ZERO_SHARED_MEMORY"] = str(int(rank < 3))
    model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(2)))
    options = Grid.of(rank, (2, 2)).options("hybrid")
    _, optimizer = wrapped(model, adamw, partition_grad=True, **options)
    optimizer.backward(model(torch.ones(1, 1000)).sum())
    optimizer.step()
    optimizer.verify()


def test_part_of_the_world_is_enough_and_threads_end_with_their_optimizer() -> None:
    """Ranks 1 to 4 of five train; the last of them has the others' values in the end."""
    run = Run(4, steps=3, clip=0.4).with_options(partition_grad=True)

    def rank(rank: int, world_size: int) -> list[Result]:
        if rank == 0:
            return []
        grids = [Grid.of(rank, (2, 2), first=1), Grid.of(rank, (2, 2), first=1, turned=True)]
        forms = zip(grids, ("pair", "hybrid"), strict=True)
        results = [train_sharded(rank - 1, 4, run.with_options(**grid.options(form))) for grid, form in forms]
        deadline = time.monotonic() + 10
        while threading.active_count() > 1 and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
        return results

    _, *ranks = run_ranks(rank, 5)
    for of_form in zip(*ranks, strict=True):
        check_run(run, of_form)


# ---- order ----


def by_hand(done: Event, value: int) -> Work[int]:
    def wait() -> int:
        assert done.wait(10)
        return value

    return Work(wait, done.is_set)


def test_second_levels_start_in_the_order_of_first_ones_and_by_themselves() -> None:
    first, second = [Event() for _ in range(3)], [Event() for _ in range(3)]
    started: list[int] = []
    told: Future[None] = Future()

    def start(value: int) -> Work[int]:
        started.append(value)
        if len(started) == 3:
            told.set_result(None)
        return by_hand(second[value], 10 * value)

    chain = OnThread(Threads())
    pending = [chain.after(by_hand(first[at], at), start, int) for at in range(3)]
    first[2].set()
    first[1].set()
    assert not any(each.ready() for each in pending)
    assert started == []
    first[0].set()
    told.result(10)  # nobody has waited for any of them
    assert started == [0, 1, 2]
    second[1].set()
    assert [each.ready() for each in pending] == [False, True, False]
    assert pending[1].wait() == 10


def test_an_error_of_either_level_is_raised_by_who_waits() -> None:
    def fail(value: int) -> Work[int]:
        raise RuntimeError(f"level {value}")

    chain = OnThread(Threads())
    done = Event()
    done.set()
    broken = chain.after(by_hand(done, 2), fail, int)
    zeros: list[int] = []
    after = chain.after(broken, lambda value: zeros.append(value) or by_hand(done, value), int)
    whole = chain.after(by_hand(done, 3), lambda value: by_hand(done, value), int)
    for each in (broken, after):
        with pytest.raises(RuntimeError, match="level 2"):
            each.wait()
        assert each.ready()
    assert zeros == [0]  # other ranks wait for it
    assert whole.wait() == 3


def test_through_shared_memory_whoever_asks_starts_all_that_are_due() -> None:
    first = [Event() for _ in range(4)]
    started: list[int] = []

    def start(value: int) -> Work[int]:
        started.append(value)
        if value == 1:
            raise RuntimeError("no memory")
        return Work(lambda: 10 * value)

    chain = OnDemand()
    pending = [chain.after(by_hand(first[at], at), start, int) for at in range(4)]
    for at in (0, 1, 3):
        first[at].set()
    assert started == []  # nobody has asked
    assert pending[0].ready()
    assert started == [0, 1, 1]  # once more where it fails; the third would wait, and the fourth comes behind it
    assert not pending[3].ready()
    with pytest.raises(RuntimeError, match="no memory"):
        pending[1].wait()
    assert pending[0].wait() == 0
    first[2].set()
    assert pending[3].wait() == 30
    assert started == [0, 1, 1, 2, 3]
    assert pending[2].wait() == 20


def test_on_a_device_a_stream_waits_and_the_host_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Recording(Streams):
        @contextmanager
        def beside(self) -> Any:
            log.append("beside")
            yield
            log.append("back")

    def noting(what: str) -> Work[str]:
        def wait() -> str:
            log.append(f"wait {what}")
            return what

        return Work(wait, lambda: False, (torch.zeros(1),))

    def start(_: str) -> Work[str]:
        log.append("start second")
        return noting("second")

    monkeypatch.setattr(work, "streams_of", lambda _: Recording())
    pending = OnStream().after(noting("first"), start, str)
    assert log == ["beside", "wait first", "start second", "back"]
    assert len(pending.tensors) == 2
    assert pending.wait() == "second"
    assert log[4:] == ["wait second"]


# ---- what is refused ----


def groups_of(inner: dict[int, list[int]], outer: dict[int, list[int]], rank: int) -> dict[str, Any]:
    """Groups by hand, which may be no grid."""
    return {"dp_process_group": (group_among(outer[rank]), group_among(inner[rank]))}


RAGGED = {0: [0], 1: [1, 2, 3], 2: [1, 2, 3], 3: [1, 2, 3]}, {0: [0, 1], 1: [0, 1], 2: [2], 3: [3]}
# Rows and columns meet once each, but a place in a row isn't the same in all of a column's.
CROSSED = {0: [0, 3], 3: [0, 3], 1: [1, 2], 2: [1, 2]}, {0: [0, 2], 2: [0, 2], 1: [1, 3], 3: [1, 3]}

BAD: dict[str, tuple[Callable[[Grid, int], dict[str, Any]], str]] = {
    "no inner group": (
        lambda grid, rank: {"extra_dp_group": grid.outer},
        "extra_dp_group: expected dp_process_group beside it, got None",
    ),
    "three groups": (
        lambda grid, rank: {"dp_process_group": (grid.outer, grid.inner, grid.inner)},
        "expected a process group or two, (outer, inner), got 3",
    ),
    "a pair and an extra group": (
        lambda grid, rank: {"dp_process_group": (grid.outer, grid.inner), "extra_dp_group": grid.outer},
        "extra_dp_group: expected None beside a pair",
    ),
    "the same group twice": (
        lambda grid, rank: {"dp_process_group": (grid.inner, grid.inner)},
        "have this process alone in common, got ranks [",
    ),
    "a group of other ranks": (
        lambda grid, rank: {"dp_process_group": (grid.outer, dist.new_group([0, 1]))},
        "expected groups that this process belongs to, got an inner one without it",
    ),
    "inner groups of several sizes": (
        lambda grid, rank: groups_of(*RAGGED, rank),
        "expected inner groups of one size",
    ),
    "columns that cross rows at several places": (
        lambda grid, rank: groups_of(*CROSSED, rank),
        "outer groups that each have the ranks of one place",
    ),
    "hybrid_shard of one level": (
        lambda grid, rank: {"communication": Communication(hybrid_shard=True)},
        "hybrid_shard=True: expected two levels of ranks, got one",
    ),
    "hybrid_shard on one rank": (
        lambda grid, rank: {
            "dp_process_group": (grid.outer, grid.inner),
            "communication": Communication(hybrid_shard=rank == 2),
        },
        "expected the same hybrid_shard on every rank",
    ),
}


def test_every_rank_is_told_what_is_wrong(subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, what: str) -> None:
        linear(**BAD[what][0](Grid.of(rank, (2, 2)), rank))

    for (what,), ran in run_cases_expecting(rank, 4, [(what,) for what in BAD], timeout=30):
        with subtests.test(what):
            for raised in ran.raised():
                assert BAD[what][1] in raised.message
                assert raised.type in ("ValueError", "TypeError", "RuntimeError")


@on_ranks(4, [((0, 1),), ((1, 3),)], one_group=False, timeout=30)
def test_some_ranks_may_have_made_a_grid_of_their_own_before(rank: int, first: tuple[int, ...]) -> None:
    """Those of a row, or of a column."""
    grid, own = Grid.of(rank, (2, 2)), [dist.new_group([each]) for each in range(4)]
    part = dist.new_group(list(first))
    if rank in first:
        linear(dp_process_group=(part, own[rank]))
        time.sleep(0.2)
    _, optimizer = linear(dp_process_group=(grid.outer, grid.inner))
    assert optimizer.shard_group.slice_ranks == [0, 1, 2, 3]
