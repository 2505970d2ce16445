"""Training that goes on at other numbers of ranks, beside plain torch in one process: clipped, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.testing import random_loss
from tests.support.ranks import run_ranks
from tests.support.saving import load_by, save_by

SHARES = 12  # of each batch, of which all ranks take as many
BATCHES = 2  # of a step; every second step syncs the last alone
MAX_NORM = 1.0  # less than any step's
LEGS = ((2, range(4)), (3, range(4, 8)), (4, range(8, 12)))  # a number of ranks, and its steps

Pair = tuple[nn.Module, Any]


def largest_difference(
    make: Callable[[nn.Module], Optimizer],
    make_model: Callable[[], nn.Module],
    way: str,
    folder: Path,
    **options: Any,
) -> float:
    """Return how far ranks and one process end apart at most, as a share of the way that a parameter has gone.

    In fp64, whose roundings are no mistakes. ``way``: as ``save_by`` takes it.
    """

    def pair() -> Pair:
        torch.manual_seed(0)
        model = make_model().double()
        optimizer = make(model)
        getattr(optimizer, "train", bool)()  # schedule-free ones step in that mode alone
        return model, optimizer

    def on_rank(rank: int, world_size: int, steps: range) -> list[Tensor]:
        model, optimizer = pair()
        sharded = LowLevelZeroOptimizer(optimizer, model=model, clip_grad_norm=MAX_NORM, **options)
        if steps.start:
            load_by(way, folder / str(steps.start), model, sharded)
        for step in steps:
            for batch in range(BATCHES):
                alone = step % 2 and batch < BATCHES - 1
                with sharded.no_sync() if alone else nullcontext():
                    sharded.backward(_mean_loss(model, step, batch, range(rank, SHARES, world_size)))
            sharded.step()
            sharded.zero_grad()
        sharded.verify()
        save_by(way, folder / str(steps.stop), model, sharded)
        return [p.detach().clone() for p in model.parameters()]

    starts, expected = [p.detach().clone() for p in pair()[0].parameters()], _train_alone(*pair())
    for world_size, steps in LEGS:
        of_ranks = run_ranks(on_rank, world_size, steps)
    differences = [
        (own - end).abs().max() / (end - start).abs().max()
        for got in of_ranks
        for own, end, start in zip(got, expected, starts, strict=True)
    ]
    return float(torch.stack(differences).max())  # which is NaN if one is


def _train_alone(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    for step in range(LEGS[-1][1].stop):
        for batch in range(BATCHES):
            _mean_loss(model, step, batch, range(SHARES)).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def _mean_loss(model: nn.Module, step: int, batch: int, shares: range) -> Tensor:
    losses = [random_loss(model, BATCHES * step + batch, share) for share in shares]
    return torch.stack(losses).sum() / len(shares)
