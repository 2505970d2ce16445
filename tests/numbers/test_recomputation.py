"""Activation checkpointing: weights that recomputed segments share, whose gradients come twice, or late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.on_ranks import on_ranks
from tests.support.scripts import (
    BOTH,
    Alone,
    Case,
    Script,
    check_each,
    loss_at,
    momentum,
    net,
)
from tests.support.tower import sizes_of

# Of a reentrant segment in another: the outer one's forward runs without gradients.
nested_warns = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


class Recomputed(nn.Module):
    """Two recomputed segments that share a weight, a plain layer between them, and one at each end."""

    def __init__(self, reentrant: bool, nested: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.nested = reentrant, nested
        self.first, self.shared, self.middle, self.other, self.last = (nn.Linear(5, 5) for _ in range(5))

    def segment(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.shared(x))
        if self.nested:
            return x + self.recompute(lambda y: torch.tanh(self.other(y)), hidden)
        return x + torch.tanh(self.other(hidden))

    def recompute(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out: Tensor = checkpoint(run, x, use_reentrant=self.reentrant)
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.recompute(self.segment, self.first(x))
        x = self.recompute(self.segment, self.middle(x))
        out: Tensor = self.last(x)
        return out


class AllRecomputed(Recomputed):
    """The whole model is one segment: the outer graph holds none of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return self.recompute(super().forward, x.requires_grad_())


def train_recomputed(kind: type[Recomputed], reentrant: bool, nested: bool = False, micro_batches: int = 1) -> Script:
    def script(side: Alone) -> nn.Module:
        model = kind(reentrant, nested)
        optimizer = side.wrap(momentum(model), model)
        for step in range(4):
            for micro in range(micro_batches):
                side.backward(optimizer, side.mean(loss_at(model, 7 * step + micro)))
            side.step(optimizer)
            optimizer.zero_grad()
        return model

    return script


SEGMENTS = {
    "reentrant, flat": train_recomputed(Recomputed, True),
    "reentrant, nested": train_recomputed(Recomputed, True, nested=True),
    "non-reentrant, nested": train_recomputed(Recomputed, False, nested=True),
    "of the whole model, micro-batches": train_recomputed(AllRecomputed, True, micro_batches=2),
}


@nested_warns
def test_checkpointing_with_a_weight_shared_by_segments(subtests: pytest.Subtests) -> None:
    check_each({kind: Case(SEGMENTS[kind], BOTH[way], 3) for kind, way in zip(SEGMENTS, BOTH, strict=True)}, subtests)


@on_ranks(2)
def test_a_shared_weight_does_arrive_late_once_and_is_waited_for_from_then_on(rank: int) -> None:
    """Without a further round its second gradient would have been lost."""
    model = Recomputed(reentrant=True, nested=False)
    arrivals: list[Tensor] = []
    model.shared.weight.register_post_accumulate_grad_hook(arrivals.append)
    optimizer = LowLevelZeroOptimizer(momentum(model), model=model, reduce_bucket_size=1)
    reductions = []
    for step in range(3):
        with sizes_of("all_reduce") as sizes:
            optimizer.backward(loss_at(model, step)(rank))
            optimizer.step()
        reductions.append(len(sizes))
        optimizer.zero_grad()
    first, *later = reductions
    assert len(arrivals) == 2 * 3
    assert later[0] == later[1] < first


def backward(model: Any, x: Tensor, shared: bool) -> None:
    x = x.clone().requires_grad_()
    loss = checkpoint(model, x, use_reentrant=True).square().mean()
    if shared:
        loss = loss + checkpoint(model[0], x, use_reentrant=True).mean()
    loss.backward()


@on_ranks(2, [(2, False, 1), (1, True, 2)])
def test_plain_backwards_that_nest_others_end_with_sharded_gradients(
    rank: int, micro_batches: int, shared: bool, stage: int
) -> None:
    """All gradients come in nested backwards; torch's clipping then reads the norm of the sum."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    model, alone = net(layers=2), net(layers=2)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    of_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(micro_batches):
            backward(model, x[3 * rank :][:3], shared)
            backward(alone, x, shared)
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.4) for each in (model, alone)]
        torch.testing.assert_close(*norms)
        for each in (optimizer, of_alone):
            each.step()
            each.zero_grad()
    torch.testing.assert_close([*model.parameters()], [*alone.parameters()], rtol=0, atol=1e-6)
