"""Optimizers that nobody knows, as users write them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lowlevel_zero.optim.probe import probe_elements


def matrix() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 4))]


class Stranger(Optimizer):
    """An optimizer that a class below tells only a direction to go."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                p.sub_(group["lr"] * self.direction(p, p.grad, self.state[p], group))

    def direction(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise ``TypeError`` unless a probe finds that slices are stepped as whole parameters are."""
    difference = probe_elements(optimizer)
    if difference is not None:
        raise TypeError(difference)


def average(state: dict[str, Any], key: str, value: Tensor, beta: float = 0.9) -> Tensor:
    """An exponential average, kept in the state."""
    mean = state.setdefault(key, torch.zeros_like(value)).lerp_(value, 1 - beta)
    assert isinstance(mean, Tensor)
    return mean


def adam(state: dict[str, Any], g: Tensor) -> Tensor:
    return average(state, "m", g) / (average(state, "v", g * g, 0.99).sqrt() + 1e-8)


class AdamByHand(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return adam(state, g)


class ScaledByNorms(Stranger):
    """LAMB under another name."""

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        u = adam(state, g)
        return u * (p.norm() / u.norm()).clamp(max=10)


class OrthogonalMatrices(Stranger):
    """Muon under another name: matrices are orthogonalised, all else is Adam's."""

    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        if p.ndim != 2 or not group.get("whiten", True):
            return adam(state, g)
        x = average(state, "m", g)
        x = x / (x.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x


class Noisy(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g + torch.randn_like(g)


class NoisyInPython(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g * random.random()


class NoisyInNumpy(Stranger):
    def direction(self, p, g, state, group):  # type: ignore[no-untyped-def]
        return g * np.random.rand()
