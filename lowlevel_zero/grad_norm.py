"""The global gradient norm, overflow and the clip factor, as tensors: nothing here waits for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from .communication.collectives import ShardGroup
from .communication.transport import Pending


class GlobalNorm:
    """L2 norm of a gradient of which each rank holds slices: measured piece by piece, then summed over the ranks.

    It is what ``torch.nn.utils.clip_grad_norm_`` reports of the whole gradients, times ``unit``. An element that is
    inf or NaN on any rank makes it so on all. Squares are summed in the order in which pieces are added.

    Args:
        group: the ranks.
        device: where the norm shall be.
        unit: what it is multiplied with.
        dtype: in which squares are summed at least; alike on all ranks.
    """

    def __init__(
        self, group: ShardGroup, device: torch.device, unit: float | Tensor, dtype: torch.dtype = torch.float32
    ) -> None:
        self._group = group
        self._device = device
        self._unit = unit
        self._dtype = dtype
        self._norms: list[Tensor] = []
        self._pending: Pending[Tensor] | None = None
        self._value: Tensor | None = None

    def add(self, piece: Tensor) -> None:
        """Measure one more piece of this rank's, in fp32 at least."""
        dtype = torch.promote_types(piece.dtype, torch.float32)
        self._norms.append(torch.linalg.vector_norm(piece, dtype=dtype).to(self._device))

    def start(self) -> None:
        """All pieces have been added: start summing over the ranks, one number; all ranks call it."""
        dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in self._norms) else self._dtype
        squares = torch.zeros((), dtype=dtype, device=self._device)
        if self._norms:
            squares += torch.stack([norm.to(dtype) for norm in self._norms]).square().sum()
        self._pending = self._group.sum_scalar(squares)

    @property
    def value(self) -> Tensor:
        """0-d, fp32 (fp64 if a piece is)."""
        if self._value is None:
            assert self._pending is not None, "not started"
            self._value = self._pending.wait().sqrt() * self._unit
        return self._value


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of ``norm`` are multiplied with so that they don't exceed ``max_norm``: 0-d, at most 1."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
