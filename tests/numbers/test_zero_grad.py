"""``zero_grad`` and ``step`` wherever a loop may call them: numbers are those of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from torch import nn

from tests.support.covering import covering
from tests.support.scripts import STAGES, WAYS, Alone, Case, Script, check_each, loss_at, momentum, net


def zero_first(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    optimizer.zero_grad(to_none)
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    side.step(optimizer)


def zero_between_backward_and_step(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    side.step(optimizer)
    optimizer.zero_grad(to_none)
    side.backward(optimizer, side.mean(loss_at(model, 1)))
    optimizer.zero_grad(to_none)
    side.step(optimizer)  # to zeros: momentum and decay still move what had a gradient
    side.backward(optimizer, side.mean(loss_at(model, 2)))
    side.step(optimizer)


def zero_amid_accumulation(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    optimizer.zero_grad(to_none)
    side.backward(optimizer, side.mean(loss_at(model, 1)))
    side.backward(optimizer, side.mean(loss_at(model, 2)))
    side.step(optimizer)


def zero_amid_no_sync(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    with side.no_sync(optimizer):
        side.backward(optimizer, side.mean(loss_at(model, 0)))
    optimizer.zero_grad(to_none)
    with side.no_sync(optimizer):
        side.backward(optimizer, side.mean(loss_at(model, 1)))
    side.backward(optimizer, side.mean(loss_at(model, 2)))
    side.step(optimizer)


def zero_after_part_was_used(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    """What never had a gradient isn't stepped, whatever became of the others'."""
    for step in range(3):
        side.backward(optimizer, side.mean(loss_at(model[:2], step)))  # type: ignore[index]
        side.step(optimizer)
        optimizer.zero_grad(to_none)
        side.step(optimizer)


def zero_twice(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    optimizer.zero_grad(not to_none)
    optimizer.zero_grad(to_none)
    side.backward(optimizer, side.mean(loss_at(model, 1)))
    side.step(optimizer)


def step_without_gradients(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    side.step(optimizer)
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    side.step(optimizer)
    optimizer.zero_grad(to_none)
    side.step(optimizer)
    side.step(optimizer)


def step_twice(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    side.step(optimizer)
    side.step(optimizer)
    optimizer.zero_grad(to_none)
    side.backward(optimizer, side.mean(loss_at(model, 1)))
    side.step(optimizer)


def gradients_stay_over_steps(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    for step in range(4):
        side.backward(optimizer, side.mean(loss_at(model if step % 2 else model[:2], step)))  # type: ignore[index]
        side.step(optimizer)
        if step == 2:
            optimizer.zero_grad(to_none)


Moves = Callable[[Alone, nn.Module, Any, bool], None]

ANYWHERE: list[Moves] = [
    zero_first,
    zero_between_backward_and_step,
    zero_amid_accumulation,
    zero_amid_no_sync,
    zero_after_part_was_used,
    zero_twice,
    step_without_gradients,
    step_twice,
    gradients_stay_over_steps,
]


def test_zero_grad_and_step_anywhere(subtests: pytest.Subtests) -> None:
    def script_of(moves: Moves, to_none: bool) -> Script:
        def script(side: Alone) -> nn.Module:
            model = net()
            optimizer = side.wrap(momentum(model), model)
            moves(side, model, optimizer, to_none)
            optimizer.zero_grad()
            side.backward(optimizer, side.mean(loss_at(model, 9)))
            side.step(optimizer)
            return model

        return script

    cases = covering(ANYWHERE, STAGES, WAYS, (True, False))
    check_each(
        {
            f"{moves.__name__}, {stage}, {way}, {'to none' if to_none else 'to zeros'}": Case(
                script_of(moves, to_none), {**STAGES[stage], **WAYS[way]}
            )
            for moves, stage, way, to_none in cases
        },
        subtests,
    )


def test_gradients_stay_as_clipped(subtests: pytest.Subtests) -> None:
    """Clipping changes gradients in place, as torch's does; also those that no zero_grad has cleared since."""

    def script_of(moves: Moves) -> Script:
        def script(side: Alone) -> nn.Module:
            model = net()
            optimizer = side.wrap(momentum(model), model)
            moves(side, model, optimizer, True)
            return model

        return script

    def of(moves: Moves, stage: str) -> Case:
        return Case(script_of(moves), {"clip": 0.1, **STAGES[stage]}, 3)

    cases = product((step_twice, gradients_stay_over_steps), STAGES)
    check_each({f"{moves.__name__}, {stage}": of(moves, stage) for moves, stage in cases}, subtests)
