"""Optimizers that step each parameter by a rule of their own, and a small model for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.tensor(1.0))


class Rule(Optimizer):
    """Steps each parameter that has a gradient by a rule of its own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(group["lr"] * self.update(p, p.grad, self.state[p]))

    def begin(self) -> None:
        """Do what is done once a step."""

    def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
        return gradient


Update = Callable[[Tensor, Tensor, Any], Tensor]


def normalised(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1e-6)


def ruled(rule: Update, *, base: type[Rule] = Rule) -> type[Rule]:
    """A class that takes its updates from a function of parameter, gradient and state."""

    class Ruled(base):  # type: ignore[misc, valid-type]
        def update(self, p: Tensor, gradient: Tensor, state: Any) -> Tensor:
            return rule(p, super().update(p, gradient, state), state)

    return Ruled


def over_parameters(cls: Callable[..., Optimizer]) -> Callable[[nn.Module], Optimizer]:
    return lambda model: cls(model.parameters())
