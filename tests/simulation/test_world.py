"""The simulator itself: that it replays exactly, and tells what it is there to tell."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.simulation.world import CARRIERS, Carrier, Outcome, SimulationEnded, simulate

X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))


def train(rank: int, stage: int = 1, dropping: int = 0) -> Tensor:
    """Three steps; one layer is used by one rank alone."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "abc"})
    optimizer = LowLevelZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-2), model=model, partition_grad=stage == 2, reduce_bucket_size=1
    )
    for _ in range(3):
        h = model["c"](X[rank])
        optimizer.backward(model["b"](model["a"](h) if rank == dropping else h).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def one(outcome: Outcome[Tensor]) -> Tensor:
    """What all ranks have, bit for bit."""
    assert (outcome.errors, outcome.deadlock, outcome.mismatch) == ({}, None, None), outcome.tracebacks
    for value in outcome.results.values():
        assert torch.equal(value, outcome.results[0])
    return outcome.results[0]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_all_ranks_end_with_the_same_numbers_whatever_the_seed(stage: int, carrier: Carrier) -> None:
    first = one(simulate(lambda rank: train(rank, stage), 3, 0, carrier))
    for seed in range(1, 4):
        assert torch.equal(one(simulate(lambda rank: train(rank, stage), 3, seed, carrier)), first)


def test_a_seed_replays_exactly_and_another_is_another() -> None:
    traces = [simulate(train, 2, seed).trace for seed in (3, 3, 4)]
    assert traces[0] == traces[1] != traces[2]


def test_a_rank_that_waits_for_ever_is_a_deadlock_told_with_all_stacks() -> None:
    def meet_alone(rank: int) -> None:
        if rank == 0:
            dist.barrier()
        else:
            dist.recv(torch.empty(1), src=0)

    outcome = simulate(meet_alone, 2, 0)
    assert outcome.deadlock is not None
    assert "dist.barrier()" in outcome.deadlock[0]
    assert "dist.recv(" in outcome.deadlock[1]
    assert all(isinstance(error, SimulationEnded) for error in outcome.errors.values())


def test_collectives_that_differ_between_ranks_are_told_with_both() -> None:
    def sum_or_spread(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.broadcast(torch.ones(3), src=0)

    told = simulate(sum_or_spread, 2, 0, "nccl").mismatch
    assert told is not None
    assert "all_reduce (3,) float32" in told
    assert "broadcast (3,) float32" in told
    assert "rank 0" in told
    assert "rank 1" in told


def test_callers_groups_and_collectives_are_torchs_own() -> None:
    def sum_in_pairs(rank: int) -> list[float]:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine, everybody = torch.tensor([float(rank)]), torch.tensor([float(rank)])
        dist.all_reduce(mine, group=pairs[rank // 2])
        dist.all_reduce(everybody, op=dist.ReduceOp.MAX)
        told: list[object] = [None] * 4
        dist.all_gather_object(told, ("rank", rank))
        assert told == [("rank", each) for each in range(4)]
        return [float(mine), float(everybody)]

    for carrier in ("messages", "nccl"):
        results = simulate(sum_in_pairs, 4, 0, carrier).results
        assert results == {0: [1.0, 3.0], 1: [1.0, 3.0], 2: [5.0, 3.0], 3: [5.0, 3.0]}
