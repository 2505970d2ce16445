"""``requires_grad`` set through ``param_groups``, as trainers that train several optimizers in turn set it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.covering import covering
from tests.support.on_ranks import on_ranks


def by_itself(optimizer: Any, loss: Tensor) -> None:
    loss.backward()


def through_it(optimizer: Any, loss: Tensor) -> None:
    optimizer.backward(loss)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(3, 5)

    def loss(self, at: int, second: bool = True) -> Tensor:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(at))
        used = self.second(x) if second else self.second(x).detach()
        return (self.first(x).sin() + used.cos()).square().mean()


def two(model: Two) -> LowLevelZeroOptimizer:
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.second.parameters())}]
    adam = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    return LowLevelZeroOptimizer(adam, model=model, partition_grad=True, reduce_bucket_size=4)


@on_ranks(2, covering(*[(False, True)] * 3))
def test_a_gradient_that_was_cleared_is_no_earlier_one(rank: int, plain: bool, other: bool, clears: bool) -> None:
    """``model.zero_grad()`` took the gradient of the backward before: what comes next can be told from it."""
    model, beside = Two(), Two()
    optimizer, _ = two(model), two(beside) if other else None
    with optimizer.no_sync():
        optimizer.backward(model.loss(0))
    if other:
        model.loss(5).backward()
    if clears:
        model.zero_grad()
    before = [p.detach().clone() for p in model.first.parameters()]
    for p in optimizer.param_groups[0]["params"]:
        p.requires_grad = False
    run_back = by_itself if plain else through_it
    if clears:
        run_back(optimizer, model.loss(1))
    else:
        with pytest.raises(RuntimeError, match="first.(weight|bias): expected no earlier .*zero_grad"):
            run_back(optimizer, model.loss(1))
        optimizer.zero_grad()
    optimizer.step()
    assert all(map(torch.equal, before, model.first.parameters()))
