"""Gradients that another optimizer's backward leaves in ``p.grad``: a norm of them is that of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import Diagnostics, LowLevelZeroOptimizer
from tests.simulation.world import CARRIERS, Carrier, simulate

RANKS = 2
X = torch.randn(3, RANKS, 4, 6, generator=torch.Generator().manual_seed(1))


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6), nn.Linear(6, 2, bias=False)]


def loss(of: list[nn.Module], at: int, rank: int) -> Tensor:
    generator, critic = of
    return critic(generator(X[at][rank]).tanh()).square().mean()


def optim(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def run(rank: int, backwards: int, clear: bool, **options: Any) -> list[Tensor]:
    both = models()
    one, two = (
        LowLevelZeroOptimizer(optim(model), diagnostics=Diagnostics(stall_timeout=0.0), **options) for model in both
    )
    for at in range(backwards):
        one.backward(loss(both, at, rank))
    norm = torch.nn.utils.clip_grad_norm_(both[1].parameters(), 0.01)
    if clear:
        two.zero_grad()
    two.backward(loss(both, 2, rank))
    one.step()
    two.step()
    return [norm.detach().clone(), *(p.detach().clone() for model in both for p in model.parameters())]


def alone(backwards: int, clear: bool) -> list[Tensor]:
    both = models()
    one, two = map(optim, both)
    for at in range(backwards):
        for rank in range(RANKS):
            (loss(both, at, rank) / RANKS).backward()
    norm = torch.nn.utils.clip_grad_norm_(both[1].parameters(), 0.01)
    if clear:
        two.zero_grad()
    for rank in range(RANKS):
        gradients = torch.autograd.grad(loss(both, 2, rank) / RANKS, [*both[0].parameters(), *both[1].parameters()])
        for p, gradient in zip((p for model in both for p in model.parameters()), gradients, strict=True):
            p.grad = gradient if p.grad is None else p.grad + gradient
    one.step()
    two.step()
    return [norm.detach(), *(p.detach() for model in both for p in model.parameters())]


@pytest.mark.parametrize(("backwards", "clear"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_clipping_what_another_backward_left_counts_all_ranks(carrier: Carrier, backwards: int, clear: bool) -> None:
    for stage in (1, 2):
        outcome = simulate(
            lambda rank, stage=stage: run(rank, backwards, clear, partition_grad=stage == 2), RANKS, stage, carrier
        )
        assert (outcome.deadlock, outcome.mismatch, outcome.errors) == (None, None, {}), outcome.tracebacks
        for got in outcome.results.values():
            for here, expected in zip(got, alone(backwards, clear), strict=True):
                torch.testing.assert_close(here, expected)
