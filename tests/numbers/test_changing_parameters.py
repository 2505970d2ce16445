"""What an optimizer trains changes in mid-run: frozen for a while, thawed, added."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases_expecting, run_ranks
from tests.support.scripts import (
    BOTH,
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


def test_freezing_and_thawing_in_mid_run_is_followed(subtests: pytest.Subtests) -> None:
    def script(side: Alone) -> nn.Module:
        model = net()
        optimizer = side.wrap(momentum(model), model)
        for step in range(5):
            model[1].requires_grad_(step not in (1, 2))
            steps(side, model, optimizer, [step])
        return model

    check_each({way: Case(script, {"reduce_bucket_size": 20, **BOTH[way]}, 3) for way in BOTH}, subtests)


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

    cases = product(STAGES, WAYS_TO_ADD)
    check_each({f"{stage}, {way}": Case(script_of(way), STAGES[stage], 3) for stage, way in cases}, subtests)


def sgd(held: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(held, lr=0.05, momentum=0.9, weight_decay=0.01)


def test_an_added_group_trains_from_rank_zero_s_parameters(subtests: pytest.Subtests) -> None:
    def script(side: Alone) -> nn.Module:
        model = net(seed=side.rank if isinstance(side, Together) else 0)
        optimizer = side.wrap(momentum(model[0]), model)
        steps(side, model, optimizer, range(2))
        model.zero_grad()
        optimizer.add_param_group({"params": model[2].parameters(), "weight_decay": 0.3})
        steps(side, model, optimizer, range(2, 4))
        return nn.ModuleList([model[0], model[2]])

    check_each({stage: Case(script, STAGES[stage], 3) for stage in STAGES}, subtests)


def test_a_group_can_be_added_between_backward_and_step(subtests: pytest.Subtests) -> None:
    def script(side: Alone) -> nn.Module:
        model = net()
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
        by_ranks = isinstance(side, Together)
        optimizer = side.wrap(sgd(groups[:1] if by_ranks else groups), model)
        side.backward(optimizer, side.mean(loss_at(model[:1], 0)))
        if by_ranks:
            optimizer.add_param_group(groups[1])
        side.backward(optimizer, side.mean(loss_at(model[:2], 1)))
        side.step(optimizer)
        return model

    check_each({stage: Case(script, STAGES[stage], 3) for stage in STAGES}, subtests)


def test_what_is_frozen_for_a_while_may_train_again_when_a_group_has_come_meanwhile() -> None:
    def train(rank: int, world_size: int) -> Tensor:
        model, late = nn.Linear(2, 1), nn.Parameter(torch.ones(2))
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        model.weight.requires_grad_(False)
        optimizer.add_param_group({"params": [late]})
        model.weight.requires_grad_(True)
        before = model.weight.detach().clone()
        optimizer.backward(model(late).sum())
        optimizer.step()
        return model.weight - before

    assert all(torch.equal(moved, torch.full((1, 2), -1.0)) for moved in run_ranks(train, 2))


def test_adding_what_is_there_already_is_refused_and_changes_nothing() -> None:
    def train(rank: int, world_size: int) -> int:
        model = net()
        optimizer = LowLevelZeroOptimizer(adamw(model[:2]), model=model)
        with pytest.raises(ValueError, match=r"1\.weight.*one it has"):
            optimizer.add_param_group({"params": [model[2].weight, model[1].weight]})
        steps(Together(rank), model, optimizer, range(1))
        return len(optimizer.param_groups)

    assert run_ranks(train, 2) == [1, 1]
