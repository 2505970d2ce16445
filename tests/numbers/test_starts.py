"""What training starts from: rank 0's parameters, buffers, masters and state, and dtypes that are forced."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.on_ranks import on_ranks
from tests.support.oracle import Run, build, check_close, groups, loss_of, train_rank
from tests.support.scripts import STAGES, Alone, Case, Script, Together, adamw, check_each, net, parameters_of, steps


@on_ranks(3)
def test_ranks_start_from_rank_zero_s_parameters_and_buffers(rank: int) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).requires_grad_(False))
        for _ in range(seed + 1):
            model(torch.randn(8, 3))  # moves the statistics
        return model

    model, first = made(rank), made(0)
    LowLevelZeroOptimizer(adamw(model), model=model)
    check_close(first.state_dict(), [model.state_dict()], 0.0)


# State from before


class InLists(torch.optim.SGD):
    """Keeps momenta in lists, of gradients that it normalises: whole parameters are stepped."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            (momentum,) = self.state[p].setdefault("momenta", [torch.zeros_like(p)])
            p.sub_(momentum.mul_(0.9).add_(p.grad / p.grad.norm()), alpha=0.05)


BEFORE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, initial_accumulator_value=0.3),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.05, t0=0.0),
    "in lists": InLists,
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-2),
}


def test_an_optimizer_that_has_trained_goes_on_from_rank_zero_s_state(subtests: pytest.Subtests) -> None:
    def script_of(make: str, world_size: int) -> Script:
        def script(side: Alone) -> nn.Module:
            own = side.rank if isinstance(side, Together) else 0
            model = net(seed=own)
            inner = BEFORE[make](model.parameters())
            steps(Alone(world_size), model, inner, (10 * own, 10 * own + 1))
            optimizer = side.wrap(inner, model)
            steps(side, model, optimizer, (2, 3, 4))
            return model

        return script

    cases = [(make, size, stage) for make, (size, stage) in zip(BEFORE, cycle(((3, "stage1"), (2, "stage2"))))]
    check_each(
        {f"{make}, {size} ranks": Case(script_of(make, size), STAGES[stage], size) for make, size, stage in cases},
        subtests,
    )


# Forced dtypes


@on_ranks(2, product(STAGES, (torch.bfloat16, torch.float16)))
def test_a_forced_dtype_is_as_if_the_model_had_it(rank: int, stage: str, dtype: torch.dtype) -> None:
    run = Run(steps=3, dtype=dtype, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05))
    run = run.with_options(initial_scale=256.0, **STAGES[stage])
    model = build(Run())
    optimizer = LowLevelZeroOptimizer(run.optimizer(groups(model)), model=model, forced_dtype=dtype, **run.options)
    for step in range(3):
        optimizer.backward(loss_of(model, run, step, 0, rank))
        optimizer.step()
        optimizer.zero_grad()
    assert {p.dtype for p in model.parameters()} == {dtype}
    check_close(parameters_of(train_rank(rank, 2, run).model), [parameters_of(model)], 0.0)
