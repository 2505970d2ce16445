"""Parameters that are thawed and added in mid-run, and those that can't be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases_expecting, run_ranks
from tests.support.scripts import (
    STAGES,
    Alone,
    Case,
    Script,
    Together,
    adamw,
    check_each,
    loss_at,
    momentum,
    net,
    steps,
)

THAWED_TOO_LATE: dict[str, Callable[..., Any]] = {
    "backward": lambda optimizer, model, rank: optimizer.backward(loss_at(model, 0)(rank)),
    "step": lambda optimizer, model, rank: (loss_at(model, 0)(rank).backward(), optimizer.step()),
}


def test_thawing_what_was_frozen_at_construction_is_refused_by_name(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, act: str) -> None:
        model = net()
        model[1].weight.requires_grad_(False)
        optimizer = LowLevelZeroOptimizer(adamw(model), model=model)
        steps(Together(rank), model, optimizer, range(1))
        model[1].weight.requires_grad_(True)
        THAWED_TOO_LATE[act](optimizer, model, rank)

    for (act,), ran in run_cases_expecting(train, 2, [(act,) for act in THAWED_TOO_LATE]):
        with subtests.test(act=act):
            for error in ran.raised():
                assert error.type == "RuntimeError"
                assert error.message.startswith("1.weight: ")
                assert "add_param_group" in error.message


# How a group of one layer may be handed over.
WAYS_TO_ADD: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda layer: list(layer.parameters()),
    "generator": lambda layer: layer.parameters(),
    "one": lambda layer: layer.weight,
}


def test_what_was_frozen_can_be_thawed_and_added(subtests: pytest.Subtests) -> None:
    def script_of(way: str) -> Script:
        def script(side: Alone) -> nn.Module:
            model = net()
            model[1].requires_grad_(False)
            held = [p for p in model.parameters() if p.requires_grad]
            optimizer = side.wrap(momentum(model) if isinstance(side, Together) else sgd(held), model)
            steps(side, model, optimizer, range(2))
            (model[1].weight if way == "one" else model[1]).requires_grad_(True)
            optimizer.add_param_group({"params": WAYS_TO_ADD[way](model[1]), "lr": 0.1})
            steps(side, model, optimizer, range(2, 4))
            saved = optimizer.state_dict()
            added = 1 if way == "one" else 2
            assert len(saved["param_groups"][1]["params"]) == added
            assert len(saved["state"]) == 6 + added
            return model

        return script

    check_each({way: Case(script_of(way), STAGES["stage2"]) for way in WAYS_TO_ADD}, subtests)


def sgd(held: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(held, lr=0.05, momentum=0.9, weight_decay=0.01)


def test_adding_what_is_there_already_is_refused_and_changes_nothing() -> None:
    def train(rank: int, world_size: int) -> int:
        model = net()
        optimizer = LowLevelZeroOptimizer(adamw(model[:2]), model=model)
        with pytest.raises(ValueError, match=r"1\.weight.*one it has"):
            optimizer.add_param_group({"params": [model[2].weight, model[1].weight]})
        steps(Together(rank), model, optimizer, range(1))
        return len(optimizer.param_groups)

    assert run_ranks(train, 2) == [1, 1]
