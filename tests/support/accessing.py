"""A model whose values accessors read and write, and how it is trained."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.oracle import Run, build, groups
from tests.support.oracle import backward as backward


def wrapped(run: Run, **options: Any) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    model = build(run)
    options = {"reduce_bucket_size": 50, **run.options, **options}
    return model, LowLevelZeroOptimizer(run.optimizer(groups(model)), model=model, **options)


def train(optimizer: LowLevelZeroOptimizer, model: nn.Module, run: Run, steps: int, rank: int) -> None:
    for step in range(steps):
        backward(optimizer, model, run, step, rank)
        optimizer.step()
        optimizer.zero_grad()
