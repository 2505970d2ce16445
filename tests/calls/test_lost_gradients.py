"""An error while gradients are packed or summed, which a loop catches: no rank steps before all have begun anew."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count, product
from typing import Any

import pytest
from torch import Tensor

from lowlevel_zero.bookkeeping import bucket_store
from lowlevel_zero.bookkeeping.gradient_store import GradientStore
from tests.support.internals import finish_late
from tests.support.oracle import check_close
from tests.support.ranks import run_cases
from tests.support.scripts import (
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


def fail_at_the_third_call(patch: pytest.MonkeyPatch, place: tuple[Any, str]) -> None:
    function, calls = getattr(*place), count(1)

    def failing(*args: Any) -> Any:
        if next(calls) == 3:
            raise OutOfMemoryHere("no room for a buffer")
        return function(*args)

    patch.setattr(*place, failing)


def train(rank: int, world_size: int, place: str, caught: str) -> dict[str, Tensor]:
    """A step of three fails on rank 0; the loop begins anew at once, or is told to by its next step."""
    side = Together(rank, partition_grad=True)
    model = net()
    optimizer = side.wrap(momentum(model), model)
    steps(side, model, optimizer, [0])
    with pytest.MonkeyPatch.context() as broken:
        if rank == 0:
            finish_late(broken, done=True)
            fail_at_the_third_call(broken, PLACES[place])
        with pytest.raises(OutOfMemoryHere) if rank == 0 else nullcontext():
            side.backward(optimizer, side.mean(loss_at(model, 1)))
    if caught == "at the step":
        with pytest.raises(RuntimeError, match=r"lost some on this rank to an error.*no room for a buffer"):
            side.step(optimizer)
    optimizer.zero_grad()
    steps(side, model, optimizer, [2, 3])
    return parameters_of(model)


def test_training_goes_on_after_an_error_that_lost_gradients(subtests: pytest.Subtests) -> None:
    alone, model = Alone(2), net()
    steps(alone, model, momentum(model), [0, 2, 3])
    for way, ran in run_cases(train, 2, list(product(PLACES, ("at once", "at the step"))), timeout=20.0):
        with subtests.test(str(way)):
            check_close(parameters_of(model), ran.values(), 2e-6)
