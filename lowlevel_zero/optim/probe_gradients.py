"""The gradients that probes step with, and the slices of the parameters that they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

# Yields the gradients of one step after the other for the whole parameters that it is given, as they are then.
Gradients: TypeAlias = Callable[[Sequence[Tensor], torch.Generator], Iterator[list[Tensor]]]

RANKS = 3  # of which the first one's slices are tried, and the last one's of small parameters; they end inside rows
SIZES = (0.01, 0.01, 0.01, 1.0, 0.3, 3.0, 1.0, 1.0, 1000.0, 1000.0, 1.0, 1.0)  # of the gradients of each step
_ALONG = 0.003  # less than the angle at which AdamP begins, for the largest parameter that is tried


def first_slice(tensor: Tensor) -> Tensor:
    return tensor.flatten()[: -(-tensor.numel() // RANKS)]


def first_matrices(tensor: Tensor) -> Tensor:
    """Return the first half of a stack of matrices."""
    return tensor[: len(tensor) // 2]


def last_slice(tensor: Tensor) -> Tensor:
    """Return the flat slice, a view if possible, of the last of ``RANKS`` ranks that has elements."""
    size = len(first_slice(tensor))
    return tensor.flatten()[(tensor.numel() - 1) // size * size :]


def lasting(weights: Sequence[Tensor], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Yield noisy gradients with a constant direction, so that momenta build up.

    In some steps the first slice has none, as rows of an embedding. A scalar's direction outweighs the noise, or steps
    of one size could end where they began.
    """
    directions = [randn(weight.shape, generator) for weight in weights]
    directions = [each + each.sign() if each.dim() == 0 else each for each in directions]
    for number, size in enumerate(SIZES):
        grads = [size * (direction + 0.5 * randn(direction.shape, generator)) for direction in directions]
        for grad in grads:
            if grad.dim():
                first_slice(grad).mul_(number % 5 != 3)
        yield grads


def brief(weights: Sequence[Tensor], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Yield gradients of two steps, which take little time for large parameters."""
    directions = [randn(weight.shape, generator) for weight in weights]
    for size in (0.01, 1.0):
        yield [size * direction for direction in directions]


def still(weights: Sequence[Tensor], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Yield gradients of zeros, beside which weight decay is the whole movement, however small it is."""
    for _ in SIZES:
        yield [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]


def orthogonal(weights: Sequence[Tensor], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Yield each step's gradients: first random ones, then ones across the weights' rows but for ``_ALONG``.

    AdamP and SGDP remove the part that is parallel to the weights (Heo et al., 2021).
    """
    yield [randn(weight.shape, generator) for weight in weights]
    for _ in SIZES[1:]:
        grads = []
        for weight in weights:
            rows, noise = weight.detach().flatten(1), randn(weight.shape, generator).flatten(1)
            unit = torch.nn.functional.normalize(rows)
            across = noise - (noise * unit).sum(1, keepdim=True) * unit
            grads.append((across + _ALONG * unit * across.norm(dim=1, keepdim=True)).view(weight.shape))
        yield grads


def growing(weights: Sequence[Tensor], generator: torch.Generator, noise: float, inward: int) -> Iterator[list[Tensor]]:
    """Yield gradients that grow, and lead the weights towards zero, or away from it with ``inward`` -1.

    Some step sizes follow the fall or the growth of norms. Gradients rise along the elements, so slices move by other
    shares of their norms than the whole does.
    """
    ramps = [torch.linspace(0.1, 1, w.numel(), dtype=torch.float32, device="cpu").view(w.shape) for w in weights]
    for number in range(len(SIZES)):
        units = [(ramp, weight.detach() / weight.detach().std()) for ramp, weight in zip(ramps, weights, strict=True)]
        yield [2**number * ramp * (noise * randn(unit.shape, generator) + inward * unit) for ramp, unit in units]


def randn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
