"""Optimizers of rare habits, which a split could get wrong in silence: what is chosen, and that it trains alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lowlevel_zero.optim.splits import may_write_unused
from lowlevel_zero.testing import assert_trains_alike
from tests.numbers.test_strange_optimizers import Net, Rule, over_parameters
from tests.support.on_ranks import on_ranks


class SkipsWhatIsNoParameter(Rule):
    """Steps leaves of ``nn.Parameter`` that require grad alone."""

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        stepped = isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad
        return gradient if stepped else torch.zeros_like(gradient)


class Clamped(AdamW):
    """Clamps all parameters after each step, those without a gradient too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.clamp_(-0.1, 0.1)


class ClampedInSilence(SGD):
    """The same by ``p.data``, which leaves no trace of the write."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data.clamp_(-0.1, 0.1)


class Averaging(Rule):
    """Averages all parameters from the sixth step on."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"] if self.count > 5):
            mean = self.state[p].setdefault("mean", p.detach().clone())
            mean.add_((p - mean) / (self.count - 4))
            p.copy_(mean)


ALIKE: dict[str, tuple[Any, str]] = {
    "what is no parameter is skipped": (over_parameters(SkipsWhatIsNoParameter), "elements"),
    "clamped": (over_parameters(Clamped), "elements"),
    "clamped in silence": (over_parameters(ClampedInSilence), "elements"),
    "averages": (over_parameters(Averaging), "elements"),
}


@on_ranks(2, ALIKE)
def test_it_trains_as_in_one_process(rank: int, case: str) -> None:
    make, split = ALIKE[case]
    found = assert_trains_alike(make, Net, 14, tolerance=0, stage=2)
    assert {*found.splits} == {split}


@pytest.mark.parametrize("cls", [Clamped, ClampedInSilence, Averaging])
def test_what_is_written_at_once_or_with_the_same_values_is_known(cls: type[Optimizer]) -> None:
    assert may_write_unused(cls(Net().parameters(), lr=0.05))  # type: ignore[call-arg]
