"""Optimizers of rare habits, which a split could get wrong in silence: what is chosen, and that it trains alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lowlevel_zero.optim.splits import choose_splits, may_write_unused
from lowlevel_zero.testing import assert_trains_alike
from tests.support.on_ranks import on_ranks
from tests.support.rules import Net, Rule, normalised, over_parameters, ruled


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


def with_signs(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    """Counts in whole numbers how often each element's sign stays."""
    if not state:
        state["sign"], state["stays"] = (torch.zeros_like(p, dtype=dtype) for dtype in (torch.int8, torch.int32))
    sign = gradient.sign().to(torch.int8)
    state["stays"] += sign == state["sign"]
    state["sign"].copy_(sign)
    return gradient.sign().div(1 + state["stays"])


def by_attributes(model: nn.Module) -> Optimizer:
    """Scale updates by a tensor of one number, and double those of marked parameters; all have these attributes."""
    for number, p in enumerate(model.parameters()):
        p.scale, p.marks = torch.tensor(0.5 * number), {"double"} if number % 2 else set()  # type: ignore[attr-defined]
    return ruled(lambda p, g, _: g * p.scale * (2 if "double" in p.marks else 1))(model.parameters())  # type: ignore


def anchored(model: nn.Module) -> Optimizer:
    """Draw parameters to tensors that they have as attributes."""

    def update(p: Any, gradient: Tensor, state: Any) -> Tensor:
        return gradient + 0.1 * (p - p.anchor) if hasattr(p, "anchor") else gradient

    for p in model.parameters():
        p.anchor = torch.zeros_like(p)  # type: ignore[attr-defined]
    return ruled(update)(model.parameters())


def by_roles(model: nn.Module) -> Optimizer:
    """Normalise the updates of parameters that have the role of a matrix."""

    def update(p: Any, gradient: Tensor, state: Any) -> Tensor:
        return normalised(gradient) if p.role == "matrix" else gradient.sign()

    for name, p in model.named_parameters():
        p.role, p.label = "matrix" if "weight" in name and "e" not in name[:2] else "other", name  # type: ignore
    return ruled(update)(model.parameters())


ALIKE: dict[str, tuple[Any, str]] = {
    "what is no parameter is skipped": (over_parameters(SkipsWhatIsNoParameter), "elements"),
    "clamped": (over_parameters(Clamped), "elements"),
    "clamped in silence": (over_parameters(ClampedInSilence), "elements"),
    "averages": (over_parameters(Averaging), "elements"),
    "whole numbers for each element": (over_parameters(ruled(with_signs)), "elements"),
    "attributes that are no numbers": (by_attributes, "elements"),
    "attributes of a parameter's shape": (anchored, "parameters"),
    "roles that are texts": (by_roles, "parameters"),
}


@on_ranks(2, ALIKE)
def test_it_trains_as_in_one_process(rank: int, case: str) -> None:
    make, split = ALIKE[case]
    found = assert_trains_alike(make, Net, 14, tolerance=0, stage=2)
    assert {*found.splits} == {split}


@pytest.mark.parametrize("cls", [Clamped, ClampedInSilence, Averaging])
def test_what_is_written_at_once_or_with_the_same_values_is_known(cls: type[Optimizer]) -> None:
    assert may_write_unused(cls(Net().parameters(), lr=0.05))  # type: ignore[call-arg]


def late_by_a_vector(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    """Normalises updates from the 51st step on, by a counter of the shape (1,)."""
    state["step"] = state.get("step", torch.zeros(1)) + 1
    return gradient.sign() if state["step"] <= 50 else normalised(gradient)


def plain_by_a_vector(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    """Divides by such a counter."""
    state["step"] = state.get("step", torch.zeros(1)) + 1
    return gradient / float(state["step"])


def with_a_momentum(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    """The same late rule, beside a momentum."""
    momentum: Tensor = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(gradient)
    return late_by_a_vector(p, momentum, state)


def now_and_then(p: Tensor, gradient: Tensor, state: Any) -> Tensor:
    """Normalises an update in every 200th step alone."""
    state["step"] = state.get("step", 0) + 1
    return gradient.sign() if state["step"] % 200 else normalised(gradient)


@pytest.mark.parametrize("rule", [late_by_a_vector, plain_by_a_vector, with_a_momentum, now_and_then])
def test_what_is_seldom_or_counts_in_a_vector_is_owned_whole(rule: Any) -> None:
    assert {*choose_splits(ruled(rule)(Net().parameters()))} == {"parameters"}


class ClipsNowAndThen(Rule):
    """Divides all parameters by their norm in every 200th step."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        params = [p for group in self.param_groups for p in group["params"] if self.count % 200 == 0]
        for p in params:
            p.div_(torch.stack([each.norm() for each in params]).norm())


class RestsIfOneIsLarge(Rule):
    """Skips a step in which some gradient has a large element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if all(p.grad.abs().max() < 3 for p in held if p.grad is not None):
            super().step()


@pytest.mark.parametrize("cls", [ClipsNowAndThen, RestsIfOneIsLarge])
def test_what_looks_at_all_parameters_at_times_is_refused(cls: type[Rule]) -> None:
    with pytest.raises(TypeError, match="its updates depend on other parameters"):
        choose_splits(cls(Net().parameters()))
