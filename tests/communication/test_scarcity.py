"""Full pipes between the processes of one host, threads that can't be started, and finalisers within a wait.

Nobody waits in a circle, for a dead process or for ever.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero.communication.backends.shared_memory import SharedMemory
from lowlevel_zero.communication.pipes import OwnPipe
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks, run_ranks_losing
from tests.support.saving import Pair, squares, train, wrapped

# Pipes


BUCKETS = 300


@pytest.fixture
def one_page_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who has more pipes than the system likes, and who may not have larger ones."""
    change = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: Any) -> Any:
        assert command == fcntl.F_SETPIPE_SZ
        assert change(descriptor, command, 4096) == 4096
        raise PermissionError("not more")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", "1")


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList(torch.ones(8, dtype=torch.bfloat16) for _ in range(BUCKETS))

    def forward(self, factor: int) -> Tensor:
        return factor * torch.stack([p.sum() for p in self.each]).float().sum()


def check_training(rank: int, bare: bool, **options: Any) -> None:
    """Two steps; bare, the ranks then meet before the step, where the first come reads nothing of what others tell."""
    model, optimizer = wrapped(Many(), lambda ps: torch.optim.SGD(ps, lr=0.1), reduce_bucket_size=1, **options)
    assert optimizer.shard_group.host_backend.shares_memory
    assert len(optimizer.sharded_groups[0].reducer.plan.whole) == BUCKETS
    for _ in range(2):
        loss = model(rank + 1)
        if bare:
            loss.backward()
            dist.all_reduce(loss.detach())
        else:
            optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.stack([p.detach() for p in model.each]).unique().tolist() == [0.5]


@pytest.mark.usefixtures("one_page_each")
@pytest.mark.timeout(200)
@on_ranks(4, timeout=180)
def test_many_buckets_are_told_of_at_once(rank: int) -> None:
    """In stage 1 ``zero_grad`` lets go of all sums at once, and the next backward tells the others so."""

    for way in ({"bare": False}, {"bare": False, "partition_grad": True}, {"bare": True}):
        check_training(rank, **way)


@pytest.mark.usefixtures("one_page_each")
def test_a_peer_that_has_died_is_named_within_seconds() -> None:
    def write(rank: int, world_size: int) -> None:
        group = ShardGroup()
        group.connect()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        first, *_ = start_many(group)
        first.wait()

    began = time.monotonic()
    for raised in run_ranks_losing(write, 3, 1).values():
        assert raised.type == "LostRank"
        # A rank that has lost one ends itself.
        assert re.search(r"lost (rank 1|ranks (0, )?1(, 2)?), whose process(es have| has) ended", raised.message)
    assert time.monotonic() - began < 15


@pytest.mark.usefixtures("one_page_each")
@on_ranks(2)
def test_a_peer_that_never_reads_is_waited_for_where_it_is_needed_and_as_long_as_the_group_allows(rank: int) -> None:
    group = ShardGroup(dist.new_group([0, 1], timeout=timedelta(seconds=2)))
    group.connect()
    if rank == 0:
        began = time.monotonic()
        first, *_ = start_many(group)
        assert time.monotonic() - began < 2
        with pytest.raises(RuntimeError, match="waited in vain for the reduction 0") as caught:
            first.wait()
        assert ": expected the part of ranks [1] within 2 s" in str(caught.value)
        assert 2 <= time.monotonic() - began < 10
    dist.barrier()


def start_many(group: ShardGroup) -> list[Any]:
    """More than a pipe has room for, told of without reading anything."""
    return [group.reduce_scatter(group.new_buffer(1, torch.float32, torch.device("cpu"))) for _ in range(BUCKETS)]


# Threads


def made(**options: Any) -> Pair:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    return wrapped(model, reduce_bucket_size=400, **options)


@pytest.mark.parametrize("shared", ["0", "1"], ids=["messages", "shared memory"])
def test_any_one_thread_that_can_t_be_started_changes_no_numbers(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", shared)

    def run(rank: int, world_size: int, failing: int) -> tuple[list[Tensor], int]:
        start: Callable[[threading.Thread], None] = threading.Thread.start
        begun = 0

        def refuse_one(thread: threading.Thread) -> None:
            nonlocal begun
            begun += thread.name.startswith("lowlevel_zero")
            if begun == failing and thread.name.startswith("lowlevel_zero"):
                raise RuntimeError("can't start new thread")
            start(thread)

        if rank == 1:
            threading.Thread.start = refuse_one  # type: ignore[method-assign]
        model, optimizer = made()
        train(model, optimizer, steps=2)
        optimizer.verify()
        return list(model.state_dict().values()), begun

    (expected, _), (_, threads) = run_ranks(run, 2, 0)
    assert threads > 0
    for failing in range(1, threads + 1):
        for found, _ in run_ranks(run, 2, failing, timeout=20):
            assert all(map(torch.equal, found, expected)), failing


def test_the_garbage_collector_may_find_an_optimizer_within_another_s_wait() -> None:
    """Its finaliser waits for the gathers under way in the same pipe."""

    def run(rank: int, world_size: int) -> tuple[bool, bool]:
        gc.disable()
        former, other = made(overlap_allgather=True), made(overlap_allgather=True)
        train(*other)
        expected = [p.detach().clone() for p in other[0].parameters()]
        gather = SharedMemory.gather

        def late(*args: Any) -> Any:
            SharedMemory.gather = gather  # type: ignore[method-assign]
            time.sleep(0.3)
            return gather(*args)

        if rank == 1:
            SharedMemory.gather = late  # type: ignore[method-assign, assignment]
        model, optimizer = former
        optimizer.backward(squares(model))
        optimizer.step()
        cycle: list[Any] = [optimizer]
        cycle.append(cycle)
        del former, optimizer, cycle
        wait, collected = OwnPipe.wait, 0

        def collect(pipe: OwnPipe, milliseconds: float) -> bool:
            nonlocal collected
            collected += gc.collect()
            return wait(pipe, milliseconds)

        if rank == 0:
            OwnPipe.wait = collect  # type: ignore[method-assign]
        train(*other, steps=2)
        return all(map(torch.equal, model.parameters(), expected)), collected > 0

    assert run_ranks(run, 2, timeout=20) == [(True, True), (True, False)]
