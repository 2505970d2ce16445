"""Activation checkpointing: weights that recomputed segments share, whose gradients come twice, or late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.ranks import run_ranks
from tests.support.scripts import (
    BOTH,
    Alone,
    Case,
    Script,
    check_each,
    loss_at,
    momentum,
)

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


def test_a_shared_weight_does_arrive_late_once_and_is_waited_for_from_then_on() -> None:
    """What the tests above are about: without a further round its second gradient would have been lost."""

    def count(rank: int, world_size: int) -> tuple[int, list[int]]:
        model = Recomputed(reentrant=True, nested=False)
        arrivals = 0

        def arrive(p: Tensor) -> None:
            nonlocal arrivals
            arrivals += 1

        model.shared.weight.register_post_accumulate_grad_hook(arrive)
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model, reduce_bucket_size=1)
        reductions = []
        for step in range(3):
            with counted("all_reduce") as calls:
                optimizer.backward(loss_at(model, step)(rank))
                optimizer.step()
            reductions.append(len(calls))
            optimizer.zero_grad()
        return arrivals, reductions

    for arrivals, (first, *later) in run_ranks(count, 2):
        assert arrivals == 2 * 3
        assert later[0] == later[1] < first


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """The sizes of the wires that go through one of the group's collectives."""
    calls: list[int] = []
    collective = getattr(ShardGroup, name)

    def counting(group: ShardGroup, wire: Tensor, *how: Any) -> Any:
        calls.append(wire.numel())
        return collective(group, wire, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardGroup, name, counting)
        yield calls


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("micro_batches", "shared"), [(2, False), (1, True)])
def test_plain_backwards_that_nest_others_end_with_sharded_gradients(
    micro_batches: int, shared: bool, stage: int
) -> None:
    """All gradients come in nested backwards; torch's clipping then reads the norm of the sum."""

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def backward(model: Any, x: Tensor) -> None:
        x = x.clone().requires_grad_()
        loss = checkpoint(model, x, use_reentrant=True).square().mean()
        if shared:
            loss = loss + checkpoint(model[0], x, use_reentrant=True).mean()
        loss.backward()

    def train(rank: int, world_size: int) -> float:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        model, alone = net(), net()
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        of_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(micro_batches):
                backward(model, x[3 * rank :][:3])
                backward(alone, x)
            norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.4) for each in (model, alone)]
            torch.testing.assert_close(*norms)
            for each in (optimizer, of_alone):
                each.step()
                each.zero_grad()
        return max(
            (own - other).abs().max().item() for own, other in zip(model.parameters(), alone.parameters(), strict=True)
        )

    assert max(run_ranks(train, 2, timeout=30)) < 1e-6
