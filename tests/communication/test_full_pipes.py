"""Pipes between the processes of one host that are full: nobody waits in a circle, for a dead process or for ever."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.ranks import run_ranks, run_ranks_losing

BUCKETS = 300


@pytest.fixture(autouse=True)
def _one_page_each(monkeypatch: pytest.MonkeyPatch) -> None:
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


def train(rank: int, world_size: int, bare: bool, **options: Any) -> list[float]:
    """Two steps; bare, the ranks then meet before the step, where the first come reads nothing of what others tell."""
    model = Many()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = LowLevelZeroOptimizer(sgd, model=model, reduce_bucket_size=1, **options)
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
    return torch.stack([p.detach() for p in model.each]).unique().tolist()


@pytest.mark.timeout(200)
def test_many_buckets_are_told_of_at_once() -> None:
    """In stage 1 ``zero_grad`` lets go of all sums at once, and the next backward tells the others so."""

    def all_ways(rank: int, world_size: int) -> list[list[float]]:
        ways: list[dict[str, Any]] = [{"bare": False}, {"bare": False, "partition_grad": True}, {"bare": True}]
        return [train(rank, world_size, **way) for way in ways]

    assert run_ranks(all_ways, 4, timeout=180) == [[[0.5]] * 3] * 4


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


def test_a_peer_that_never_reads_is_waited_for_where_it_is_needed_and_as_long_as_the_group_allows() -> None:
    def write(rank: int, world_size: int) -> tuple[str, float]:
        group = ShardGroup(dist.new_group([0, 1], timeout=timedelta(seconds=2)))
        group.connect()
        if rank == 1:
            dist.barrier()
            return "", 0.0
        began = time.monotonic()
        first, *_ = start_many(group)
        assert time.monotonic() - began < 2
        with pytest.raises(RuntimeError) as caught:
            first.wait()
        took = time.monotonic() - began
        dist.barrier()
        return str(caught.value), took

    message, took = run_ranks(write, 2)[0]
    assert "waited in vain for the reduction 0" in message
    assert ": expected gradients or parameters of ranks [1] within 2 s" in message
    assert 2 <= took < 10


def start_many(group: ShardGroup) -> list[Any]:
    """More than a pipe has room for, told of without reading anything."""
    return [group.reduce_scatter(group.new_buffer(1, torch.float32, torch.device("cpu"))) for _ in range(BUCKETS)]
