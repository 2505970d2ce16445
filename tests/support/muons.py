"""Muon as users write it, for parameters that aren't matrices themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Row = tuple[str, Callable[[nn.Module], Optimizer], type[nn.Module], dict[str, Any]]
"""A name, a maker of an optimizer, a model, and further arguments for the wrapper."""


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, by five steps of Newton and Schulz."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.mT if x.size(-2) > x.size(-1) else x
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (2.0315 * a @ a - 4.7750 * a) @ x
    return x.mT if matrices.size(-2) > matrices.size(-1) else x


class Muon(Optimizer):
    """Steps by the orthogonalised momenta of matrices, and of other parameters by their signs."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                matrices = self.matrices(momentum, group)
                update = momentum.sign() if matrices is None else orthogonal(matrices).reshape(p.shape)
                p.sub_(update, alpha=group["lr"])

    def matrices(self, momentum: Tensor, group: Mapping[str, Any]) -> Tensor | None:
        """Return the matrices of a momentum, of ``[..., m, n]``, or None if it has none."""
        return momentum if momentum.dim() == 2 else None


class OfExperts(Muon):
    """Takes ``[experts, m, n]`` for a matrix of each expert."""

    def matrices(self, momentum: Tensor, group: Mapping[str, Any]) -> Tensor | None:
        return momentum if momentum.dim() >= 2 else None


class OfHeads(Muon):
    """Takes ``[3 * heads * m, n]`` for a matrix of each head, in groups that tell their number of heads."""

    def matrices(self, momentum: Tensor, group: Mapping[str, Any]) -> Tensor | None:
        return momentum.view(3 * group["heads"], -1, momentum.size(1)) if "heads" in group else None


class OfKernels(Muon):
    """Takes a kernel for a matrix with a row of each channel that comes out."""

    def matrices(self, momentum: Tensor, group: Mapping[str, Any]) -> Tensor | None:
        return momentum.flatten(1) if momentum.dim() >= 2 else None


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.up, self.down = (nn.Parameter(0.3 * torch.randn(4, m, n)) for m, n in ((6, 9), (9, 6)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)
        self.qkv = nn.Linear(8, 24, bias=False)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Conv2d(2, 6, 3), nn.Conv1d(6, 4, 2), nn.Linear(4, 3)


def of_heads(model: Any) -> Optimizer:
    """Give the matrix of queries, keys and values two heads, in a group of its own."""
    others = [p for p in model.parameters() if p is not model.qkv.weight]
    return OfHeads([{"params": [model.qkv.weight], "heads": 2}, {"params": others}])


def muons() -> Iterator[Row]:
    """Yield rows as those of ``benchmarks.any_optimizer``. No trial has three matrices for each head."""
    yield "Muon of experts", lambda model: OfExperts(model.parameters()), Experts, {}
    yield "Muon of heads", of_heads, Attention, {"split": "parameters"}
    yield "Muon of kernels", lambda model: OfKernels(model.parameters()), Convolutions, {}
