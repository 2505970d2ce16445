"""What tests switch in the package that no option does. Each of these raises if what it replaces is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from lowlevel_zero import LowLevelZeroOptimizer, rounds
from lowlevel_zero.alignment import Alignment
from lowlevel_zero.bookkeeping import gather_store
from lowlevel_zero.forecast import Forecast
from tests.support.patching import patch_rank

T = TypeVar("T")


def pack_without_alignment(patch: pytest.MonkeyPatch) -> None:
    """Slices lie end to end in buckets, whose rows end with the last."""
    for module in (rounds, gather_store):
        patch.setattr(module, "alignment_of", lambda *_: Alignment())


def always_forecast(patch: pytest.MonkeyPatch) -> None:
    """Forecasts are on from the start, and stay on."""
    build = Forecast.__init__

    def built(self: Forecast, parameters: Any, family: int) -> None:
        build(self, parameters, family)
        self.on = True

    def end_step(self: Forecast) -> None:
        self._begin_step()

    patch.setattr(Forecast, "__init__", built)
    patch.setattr(Forecast, "end_step", end_step)


def with_and_without_forecasts(train: Callable[..., T]) -> Callable[..., tuple[T, T]]:
    """For ``run_ranks``: ``train`` done by each rank as it is, and once more with forecasts on from the start."""

    def both(rank: int, world_size: int, *args: Any) -> tuple[T, T]:
        plain = train(rank, world_size, *args)
        with pytest.MonkeyPatch.context() as patch:
            always_forecast(patch)
            return plain, train(rank, world_size, *args)

    return both


def as_on_a_device(optimizer: LowLevelZeroOptimizer) -> LowLevelZeroOptimizer:
    """A device's hosts don't wait to agree in every step: there the buckets alone tell of a late gradient."""
    for family in optimizer._families:
        patch_rank(family.reducer, "_on_host", False)
    return optimizer
