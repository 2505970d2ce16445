"""An error while gradients are packed or summed, which a loop catches: no rank steps before all have begun anew."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from lowlevel_zero.bookkeeping import bucket_store
from lowlevel_zero.bookkeeping.gradient_store import GradientStore
from tests.support.covering import covering
from tests.support.internals import always_detect, finish_late
from tests.support.oracle import check_close
from tests.support.ranks import run_cases
from tests.support.scripts import (
    STAGES,
    WAYS,
    Alone,
    Together,
    loss_at,
    momentum,
    net,
    parameters_of,
    steps,
)

PLACES = {"packing": (bucket_store, "pack"), "summing": (GradientStore, "accumulate")}


class OutOfMemoryHere(RuntimeError):
    pass


class Failing:
    """Raises at some calls of a function."""

    def __init__(self, patch: pytest.MonkeyPatch, place: tuple[Any, str], calls: range) -> None:
        self.calls = calls
        self.called = 0
        self.function = getattr(*place)
        patch.setattr(*place, lambda *args: self.call(*args))

    def call(self, *args: Any) -> Any:
        self.called += 1
        if self.called - 1 in self.calls:
            raise OutOfMemoryHere("no room for a buffer")
        return self.function(*args)


def train(
    rank: int, world_size: int, stage: str, way: str, place: str, calls: range, detecting: bool, caught: str
) -> dict[str, Tensor]:
    """A step of three fails on rank 0; the loop begins anew at once, or is told to by its next step."""
    with pytest.MonkeyPatch.context() as patch:
        if detecting:
            always_detect(patch)
        side = Together(rank, **STAGES[stage], **WAYS[way])
        model = net()
        optimizer = side.wrap(momentum(model), model)
        steps(side, model, optimizer, [0])
        with pytest.MonkeyPatch.context() as broken:
            if rank == 0:
                finish_late(broken, done=True)
                failing = Failing(broken, PLACES[place], calls)
            with suppress(OutOfMemoryHere):
                side.backward(optimizer, side.mean(loss_at(model, 1)))
            if rank == 0:
                assert failing.called > calls.start, "it hasn't failed"
        if caught == "at the step":
            with pytest.raises(RuntimeError, match=r"lost some on this rank to an error.*no room for a buffer"):
                side.step(optimizer)
        optimizer.zero_grad()
        steps(side, model, optimizer, [2, 3])
        return parameters_of(model)


def test_training_goes_on_after_an_error_that_lost_gradients(subtests: pytest.Subtests) -> None:
    calls = [range(1), range(2, 3), range(7, 8), range(3, 5), range(3, 99)]
    ways = covering(STAGES, WAYS, PLACES, calls, (False, True), ("at once", "at the step"))
    alone = Alone(2)
    model = net()
    steps(alone, model, momentum_kept := momentum(model), [0])
    steps(alone, model, momentum_kept, [2, 3])
    for way, ran in run_cases(train, 2, ways, timeout=20.0):
        with subtests.test(str(way)):
            check_close(parameters_of(model), ran.values(), 2e-6)
            assert not torch.equal(model[0].weight, net()[0].weight)
