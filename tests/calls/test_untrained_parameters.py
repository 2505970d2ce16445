"""Parameters that get gradients and that nobody trains: one warning, by name, on the ranks that have them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases, run_ranks

ODD = 1


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def wrap(params: Any, model: nn.Module) -> LowLevelZeroOptimizer:
    return LowLevelZeroOptimizer(torch.optim.SGD(params, lr=0.1), model=model)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = model(x).square().mean()
    return loss


def replace(model: nn.Sequential) -> None:
    model[2] = nn.Linear(4, 4)


def add(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def replace_frozen(model: nn.Sequential) -> None:
    model[2] = nn.Linear(4, 4).requires_grad_(False)


def leave(model: nn.Sequential) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A change to the model, and the names that a warning tells.

    Attributes:
        change: made before step ``before``, on one rank or, with ``on_all``, on all.
        names: empty: there is no warning.
        trained: which parameters the optimizer gets at construction.
        plain: backwards are plain ones.
    """

    change: Callable[[nn.Sequential], None]
    names: str
    before: int = 2
    on_all: bool = True
    trained: Callable[[nn.Sequential], list[nn.Parameter]] = lambda model: list(model.parameters())
    plain: bool = False


CASES = {
    "nothing": Case(leave, ""),
    "a layer that is replaced": Case(replace, "2.weight, 2.bias"),
    "a layer that one rank alone replaces, and a plain backward": Case(
        replace, "2.weight, 2.bias", before=5, on_all=False, plain=True
    ),
    "a layer that is added": Case(add, "4.weight, 4.bias"),
    "a layer that is frozen": Case(replace_frozen, ""),
    "one that was never handed over": Case(
        leave, "0.weight, 0.bias", trained=lambda model: list(model[2:].parameters())
    ),
}


def warnings_of(train: Callable[[], Any]) -> list[str]:
    """What is warned of while ``train`` runs, in this process."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lowlevel_zero")
    logger.addHandler(handler)
    try:
        train()
    finally:
        logger.removeHandler(handler)
    return lines


def live(rank: int, world_size: int, name: str) -> tuple[list[str], list[str]]:
    """What is warned of within the step after the change, and in the steps after that."""
    case = CASES[name]
    model = net()
    optimizer = wrap(case.trained(model), model)

    def train(*steps: int) -> None:
        for step in steps:
            if step == case.before and (case.on_all or rank == ODD):
                case.change(model)
            loss = loss_of(model, rank, step)
            loss.backward() if case.plain else optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    soon = case.before + 2
    return warnings_of(lambda: train(*range(soon))), warnings_of(lambda: train(*range(soon, 9)))


def test_one_warning_names_them(subtests: pytest.Subtests) -> None:
    for (name,), ran in run_cases(live, 2, [(name,) for name in CASES], one_group=True):
        with subtests.test(name):
            case = CASES[name]
            for rank, (soon, later) in enumerate(ran.values()):
                assert later == []
                if case.names and (case.on_all or rank == ODD):
                    assert len(soon) == 1
                    assert soon[0].startswith(f"{case.names}: got a gradient on rank {rank}, but no LowLevelZeroOpt")
                else:
                    assert soon == []


def test_several_optimizers_of_a_model_warn_together() -> None:
    def train(rank: int, world_size: int) -> tuple[list[str], list[str]]:
        model = net()
        optimizers = [wrap(model[0].parameters(), model), wrap(model[2].parameters(), model)]

        def step(at: int) -> None:
            optimizers[0].zero_grad()
            optimizers[1].zero_grad()
            with optimizers[0].backward_pass(loss_of(model, rank, at)) as loss, optimizers[1].backward_pass(loss):
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()

        model[3].requires_grad_(False)
        return warnings_of(lambda: step(0)), warnings_of(lambda: (model[3].requires_grad_(True), step(1)))

    for rank, (before, after) in enumerate(run_ranks(train, 2)):
        assert before == []
        assert len(after) == 1
        assert after[0].startswith(f"3.weight, 3.bias: got a gradient on rank {rank}, but no LowLevelZeroOptimizer")
