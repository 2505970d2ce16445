"""The global gradient norm, overflow and the clip factor, as tensors: nothing here waits for a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .collectives import ShardGroup


def global_norm(slices: Sequence[Tensor], unit: float | Tensor, group: ShardGroup, device: torch.device) -> Tensor:
    """L2 norm of a gradient of which each rank holds ``slices``: 0-d, on ``device``, fp32 (fp64 if a slice is).

    Squares are summed slice by slice in the order given, then over the ranks: one reduction of one number. It
    is what ``torch.nn.utils.clip_grad_norm_`` reports of the whole gradients, times ``unit``. An element that
    is inf or NaN on any rank makes it so on all.
    """
    dtype = torch.float64 if any(piece.dtype == torch.float64 for piece in slices) else torch.float32
    squares = torch.zeros((), dtype=dtype, device=device)
    if slices:
        norms = [torch.linalg.vector_norm(piece, dtype=dtype).to(device) for piece in slices]
        squares += torch.stack(norms).square().sum()
    return group.sum_scalar(squares).sqrt() * unit


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of ``norm`` are multiplied with so that they don't exceed ``max_norm``: 0-d, at most 1."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
