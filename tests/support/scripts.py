"""Scripts of a training: plain torch in one process and ranks do the same, and must end with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.internals import with_and_without_detection
from tests.support.numbers import STAGES, trained
from tests.support.oracle import check_close, parameters_of
from tests.support.ranks import run_ranks

WAYS: dict[str, dict[str, Any]] = {"bare": {"bare": True}, "driven": {"bare": False}}
BOTH: dict[str, dict[str, Any]] = {
    f"{stage}, {way}": {**STAGES[stage], **WAYS[way]} for stage, way in product(STAGES, WAYS)
}


TIMEOUT = 20.0


class Alone:
    """One process that does every rank's share, with plain torch."""

    def __init__(self, world_size: int, clip: float = 0.0) -> None:
        self.ranks = range(world_size)
        self.clip = clip

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        return optimizer

    def mean(self, of: Callable[[int], Any]) -> Any:
        """Return the mean of a loss over the ranks."""
        return torch.stack([of(rank) for rank in self.ranks]).mean(0)

    def backward(self, optimizer: Any, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def step(self, optimizer: Any) -> None:
        if self.clip > 0:
            members = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(members, self.clip)
        optimizer.step()

    def no_sync(self, optimizer: Any) -> Any:
        return nullcontext()


class Together(Alone):
    """One rank of several."""

    def __init__(self, rank: int, clip: float = 0.0, bare: bool = False, **options: Any) -> None:
        self.rank = rank
        self.bare = bare
        self.options = {"reduce_bucket_size": 1, "clip_grad_norm": clip, **options}

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        return LowLevelZeroOptimizer(optimizer, model=model, **self.options)

    def mean(self, of: Callable[[int], Any]) -> Any:
        return of(self.rank)

    def backward(self, optimizer: Any, loss: Tensor, **options: Any) -> None:
        if self.bare:
            loss.backward(**options)
        else:
            optimizer.backward(loss, **options)

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def no_sync(self, optimizer: Any) -> Any:
        return optimizer.no_sync()


Script = Callable[[Alone], nn.Module]
"""Trains with whichever side it is given, and returns the model."""


class Case(NamedTuple):
    """A script for so many ranks, with options of ``Together``."""

    script: Script
    options: dict[str, Any]
    world_size: int = 2


def check_each(cases: Mapping[str, Case], subtests: pytest.Subtests, timeout: float = TIMEOUT) -> None:
    """``check`` of each."""
    for name, case, ran in trained(cases, train_both, timeout=timeout):
        with subtests.test(name):
            judge(case, ran.values())


def check(script: Script, world_size: int = 2, **options: Any) -> None:
    """The numbers of one process, whether the ranks find out beforehand what a backward will use or not."""
    case = Case(script, options, world_size)
    judge(case, run_ranks(train_both, world_size, case, timeout=TIMEOUT))


@with_and_without_detection
def train_both(rank: int, world_size: int, case: Case) -> dict[str, Tensor]:
    return parameters_of(case.script(Together(rank, **case.options)))


def judge(case: Case, got: list[tuple[dict[str, Tensor], ...]], tolerance: float = 2e-6) -> None:
    clip = case.options.get("clip", 0.0)
    expected = parameters_of(case.script(Alone(case.world_size, clip)))
    for ranks in zip(*got, strict=True):
        check_close(expected, ranks, tolerance)


def net(seed: int = 0, layers: int = 4, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def data(step: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_at(model: nn.Module, step: int) -> Callable[[int], Tensor]:
    def loss(rank: int) -> Tensor:
        out: Tensor = model(data(step, rank).to(next(model.parameters()).dtype)).float().square().mean()
        return out

    return loss


def steps(side: Alone, model: nn.Module, optimizer: Any, batches: Iterable[int]) -> None:
    """A whole step of ``loss_at`` each."""
    for batch in batches:
        side.backward(optimizer, side.mean(loss_at(model, batch)))
        side.step(optimizer)
        optimizer.zero_grad()
