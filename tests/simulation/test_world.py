"""The simulator itself: that it replays exactly, and tells what it is there to tell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.failed_ranks import LostRank
from lowlevel_zero.communication.process_groups import context_of, default_group
from lowlevel_zero.streams import streams_of
from tests.simulation.draw import draw
from tests.simulation.run import run
from tests.simulation.world import CARRIERS, Carrier, Fault, InjectedFault, Outcome, SimulationEnded, simulate
from tests.support.grid import Grid

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


def test_memory_that_nobody_has_written_holds_no_number_that_could_be_right() -> None:
    def look(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        few = torch.full((64,), 7)
        del few  # whose memory the next may get
        return torch.empty(64, dtype=torch.int64), torch.ones(3).new_empty(64), torch.empty_like(torch.ones(64))

    for sizes, *numbers in simulate(look, 2, 0).results.values():
        assert sizes.eq(torch.iinfo(torch.int64).max).all()
        assert all(each.isnan().all() for each in numbers)
    assert not torch.are_deterministic_algorithms_enabled()


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


def test_the_operation_that_a_fault_asks_for_raises_on_that_rank_alone() -> None:
    counted = simulate(train, 2, 5, count=True).operations
    assert counted.keys() == {0, 1}
    middle = counted[1] // 2
    outcome = simulate(train, 2, 5, fault=Fault(1, middle))
    assert isinstance(outcome.errors[1], InjectedFault)
    assert f"operation {middle}" in str(outcome.errors[1])
    assert outcome.failed in str(outcome.errors[1])
    beyond = simulate(train, 2, 5, fault=Fault(1, counted[1]))
    one(beyond)
    assert beyond.failed == ""


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_rank_that_dies_is_lost_to_the_others_which_say_so(carrier: Carrier) -> None:
    steps = simulate(train, 3, 5, carrier).steps_of[1]
    for at in (0, steps // 2, steps - 1):
        outcome = simulate(train, 3, 5, carrier, Fault(1, at, "die"))
        assert isinstance(outcome.errors.pop(1), SimulationEnded)
        assert outcome.deadlock is None
        # At first nobody knows rank 1, and some lose the rank that has lost it; at last others may have ended, too.
        named = [re.search(r"ranks? [\d, ]*\b1\b", str(error)) for error in outcome.errors.values()]
        assert any(named) if at == 0 else all(named)


NAMED = r"(lost (the connection to )?|in vain for )ranks? (\d, )*{}\b"


def construct(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "abc"})
    LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), model=model, reduce_bucket_size=1)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_rank_that_dies_while_optimizers_are_constructed_is_named_wherever_it_is_then(carrier: Carrier) -> None:
    steps = simulate(construct, 3, 5, carrier).steps_of
    for dies in range(3):
        for at in range(steps[dies]):
            outcome = simulate(construct, 3, 5, carrier, Fault(dies, at, "die"))
            outcome.errors.pop(dies, None)
            assert outcome.deadlock is None
            for error in outcome.errors.values():
                assert isinstance(error, (LostRank, TimeoutError))
            # Where one hasn't met the others yet, a rank may lose one that has lost it.
            named = [re.search(NAMED.format(dies), str(error)) is not None for error in outcome.errors.values()]
            assert not named or any(named)


def test_a_message_that_waits_changes_nothing() -> None:
    sent = simulate(train, 2, 5).messages[0]
    for at in range(0, sent, 7):
        assert torch.equal(one(simulate(train, 2, 5, fault=Fault(0, at, "wait"))), one(simulate(train, 2, 5)))


def test_what_a_job_leaves_behind_is_told() -> None:
    kept: list[object] = []

    def forget(rank: int) -> None:
        if rank == 0:
            kept.append(torch.zeros(3, 5))
            kept.append(dist.isend(torch.zeros(7), 1))

    left = simulate(forget, 2, 0).left
    assert "(3, 5) float32" in left.tensors
    assert left.messages == ("send on default: rank 0 to rank 1, tag 0",)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_job_that_lets_go_of_its_optimizer_leaves_nothing(carrier: Carrier) -> None:
    assert not simulate(train, 3, 5, carrier).left


def test_what_a_device_does_beside_home_is_there_after_a_join_and_may_not_be_before() -> None:
    def sum_beside(rank: int, joins: bool) -> float:
        streams, value = streams_of([torch.device("cpu")]), torch.tensor([float(rank + 1)])
        work = dist.all_reduce(value, async_op=True)
        with streams.beside():
            work.wait()
            doubled = value * 2
        if joins:
            streams.join()
        seen = float(doubled)
        streams.join()
        return seen

    joined = [simulate(lambda rank: sum_beside(rank, True), 2, seed, "nccl").results for seed in range(8)]
    assert joined == [{0: 6.0, 1: 6.0}] * 8
    assert any(simulate(lambda rank: sum_beside(rank, False), 2, s, "nccl").results[0] != 6.0 for s in range(8))


def traces() -> list[object]:
    """Hand-overs and operations of a few jobs and programs."""
    outcomes: list[Outcome[Any]] = [simulate(train, 3, 8, each, count=True) for each in CARRIERS]
    outcomes += [run(draw(seed), count=True).outcome for seed in (6, 9)]
    return [(each.trace, sorted(each.operations.items())) for each in outcomes]


def test_a_fresh_process_and_this_one_draw_the_same() -> None:
    script = "from tests.simulation.test_world import traces; print(traces())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**env, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == str(traces()), done.stderr


def test_after_a_receive_that_is_dropped_nothing_is_read_from_that_peer() -> None:
    def drop(rank: int, keeps: bool) -> float:
        value = torch.zeros(1)
        if rank == 0:
            for tag in (1, 2):
                dist.send(torch.ones(1), 1, tag=tag)
        else:
            kept = [dist.irecv(torch.zeros(1), 0, tag=1)]
            if not keeps:
                kept.clear()
            dist.recv(value, 0, tag=2)
        return float(value)

    assert [simulate(lambda rank: drop(rank, True), 2, seed).results[1] for seed in range(8)] == [1.0] * 8
    assert any(simulate(lambda rank: drop(rank, False), 2, seed).deadlock for seed in range(8))


def test_hybrid_sharding_makes_communicators_for_rows_and_columns_alone() -> None:
    def beside(rank: int) -> list[str]:
        model = nn.Linear(5, 3)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LowLevelZeroOptimizer(sgd, model=model, **Grid.of(rank, (2, 2)).options("hybrid"))
        optimizer.backward(model(torch.full((1, 5), float(rank))).sum())
        optimizer.step()
        return sorted(context_of(default_group()).beside)

    for made in simulate(beside, 4, 0, "nccl").results.values():
        assert made
        assert not [name for name in made if "/data/" in name]
