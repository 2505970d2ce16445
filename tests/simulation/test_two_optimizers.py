"""Two optimizers in one backward, on one communicator: it gets the same collectives in one order on every rank.

Backwards one after the other, and plain ones, are in programs (``test_programs.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import Diagnostics, LowLevelZeroOptimizer
from tests.simulation.world import Carrier, simulate

RANKS = 2
MANY = 9  # exceptions, after which ranks are said not to meet again
NAMES = "abcdef"
X = torch.randn(4, RANKS, 4, 8, generator=torch.Generator().manual_seed(1))

# Which layers each rank leaves out.
DROPS: dict[str, tuple[str, str]] = {
    "others on each": ("ae", "bf"),
    "all on rank 0": (NAMES, ""),
    "another optimizer's on each": ("ace", "bdf"),
}


def build() -> nn.ModuleDict:
    """Layers of which no two have the same size, so another order is another collective."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(8, 3 + at, bias=False) for at, name in enumerate(NAMES)}
    return nn.ModuleDict({name: nn.Sequential(layer, nn.Tanh()) for name, layer in layers.items()})


def loss_of(model: nn.ModuleDict, at: int, rank: int, dropped: str) -> Tensor:
    used = [model[name](X[at][rank]).square().mean() for name in NAMES if name not in dropped]
    return torch.stack(used).prod() if used else torch.zeros(())


def halves(model: nn.ModuleDict) -> list[torch.optim.Optimizer]:
    parameters = ([p for name in names for p in model[name].parameters()] for names in ("ace", "bdf"))
    return [torch.optim.SGD(some, lr=0.1, momentum=0.9) for some in parameters]


def run(loss: Tensor) -> None:
    if loss.requires_grad:
        loss.backward()


def within_both(one: Any, two: Any, loss: Callable[[int], Tensor], at: int) -> None:
    both = loss(at)
    with one.backward_pass(both), two.backward_pass(both):
        run(both)
    run(loss(at + 1))


def one_within_the_other(one: Any, two: Any, loss: Callable[[int], Tensor], at: int) -> None:
    outer, inner = loss(at), loss(at + 1)
    with one.backward_pass(outer):
        run(outer)
        with two.backward_pass(inner):
            run(inner)


WAYS = [within_both, one_within_the_other]


def train(rank: int, way: Callable[..., None], dropped: str, stage: int) -> Tensor:
    model = build()
    options: dict[str, Any] = {"partition_grad": stage == 2, "reduce_bucket_size": 1}
    options["diagnostics"] = Diagnostics(stall_timeout=0.0)
    optimizers = [LowLevelZeroOptimizer(each, model=model, **options) for each in halves(model)]
    for at in range(3):
        way(*optimizers, lambda at: loss_of(model, at, rank, dropped), at)
        for optimizer in reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone(drops: tuple[str, str]) -> Tensor:
    model = build()
    optimizers = halves(model)
    for at in range(3):
        for batch in (at, at + 1):
            for rank, dropped in enumerate(drops):
                run(loss_of(model, batch, rank, dropped) / RANKS)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("drops", DROPS.values(), ids=DROPS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_collectives_have_one_order_whatever_is_dropped(way: Callable[..., None], drops: tuple[str, str]) -> None:
    def job(rank: int, stage: int) -> Tensor:
        return train(rank, way, drops[rank], stage)

    carriers: list[Carrier] = ["nccl", "nccl", "messages"]
    for seed, carrier in enumerate(carriers):
        outcome = simulate(lambda rank, stage=1 + seed % 2: job(rank, stage), RANKS, seed, carrier)
        assert (outcome.mismatch, outcome.deadlock, outcome.errors) == (None, None, {})
        for trained in outcome.results.values():
            torch.testing.assert_close(trained, alone(drops), rtol=1e-5, atol=1e-6)


def test_a_backward_on_one_rank_alone_is_refused_on_all_where_optimizers_share_an_order() -> None:
    def job(rank: int) -> list[str]:
        model, told = build(), []
        one, two = (LowLevelZeroOptimizer(each, model=model, reduce_bucket_size=1) for each in halves(model))
        for call in [lambda: one.backward(loss_of(model, 0, rank, ""))] * (rank == 0) + [
            lambda: two.backward(loss_of(model, 1, rank, ""))
        ]:
            try:
                call()
            except RuntimeError as error:
                told.append(str(error))
        return told

    outcome = simulate(job, RANKS, 0, "nccl")
    assert (outcome.mismatch, outcome.deadlock) == (None, None)
    expected = "rank 0 to run a backward of optimizer 1; rank 1 to run a backward of optimizer 2"
    assert all(expected in outcome.results[rank][0] for rank in range(RANKS))


def test_an_optimizer_that_has_retired_the_only_other_one_agrees_on_no_backward() -> None:
    def job(rank: int) -> bool:
        model = build()
        for _ in range(2):
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = LowLevelZeroOptimizer(plain, model=model)
        if rank == 0:
            optimizer.backward(loss_of(model, 0, rank, ""))
        optimizer.zero_grad()
        return optimizer.shard_group.context.is_shared

    assert simulate(job, RANKS, 0, "nccl").results == {0: False, 1: False}


# ---- after an exception ----


def clear(optimizers: list[LowLevelZeroOptimizer], from_the_first: bool) -> int:
    """Call ``zero_grad`` of each, and of all again if one raises, or of that one alone; return how often one did."""
    raised = at = 0
    while at < len(optimizers) and raised < MANY:
        try:
            optimizers[at].zero_grad()
            at += 1
        except RuntimeError:
            raised += 1
            at = 0 if from_the_first else at
    return raised


@pytest.mark.parametrize("ahead", [(0,), (0, 1, 0), (1,), (1, 0), (0, 0, 0)])
@pytest.mark.parametrize("carrier", ["messages", "memory"])
def test_ranks_of_which_one_is_calls_ahead_meet_again(carrier: Carrier, ahead: tuple[int, ...]) -> None:
    """In ``zero_grad`` of all optimizers, from the first one: one rank has called it ``ahead``, another hasn't.

    A rank that comes to its next batch alone is told so in its step, and begins again.
    """

    def job(rank: int, from_the_first: bool) -> tuple[int, Tensor]:
        model = build()
        made = [
            LowLevelZeroOptimizer(half, model=model, stage=2, diagnostics=Diagnostics(stall_timeout=0.0))
            for half in halves(model)
        ]
        made[0].backward(loss_of(model, 0, rank, ""))
        raised = 0
        for number in ahead if rank == 1 else ():
            try:
                made[number].zero_grad()
            except RuntimeError:
                break  # and it does as the other does
        while raised < MANY:
            raised += clear(made, from_the_first)
            try:
                made[0].backward(loss_of(model, 1, rank, ""))
                for each in made:
                    each.step()
                break
            except RuntimeError:
                raised += 1
        return raised, torch.cat([p.detach().flatten() for p in model.parameters()])

    outcome = simulate(lambda rank: job(rank, True), RANKS, 0, carrier)
    assert (outcome.deadlock, outcome.errors) == (None, {}), outcome.tracebacks
    (first, weights), (second, others) = outcome.results.values()
    assert max(first, second) < 4
    assert torch.equal(weights, others)
    if ahead == (0,):
        repeated = simulate(lambda rank: job(rank, False), RANKS, 0, carrier)
        assert all(raised >= MANY for raised, _ in repeated.results.values())
