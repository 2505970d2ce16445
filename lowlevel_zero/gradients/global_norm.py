"""The global norm of all gradients, and the factor that clips by it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ..communication.shard_group import ShardGroup
from ..communication.work import Work


@dataclass(eq=False, repr=False)
class GlobalNorm:
    """The L2 norm of all gradients: each rank measures its slices, and squares are summed over the ranks.

    It is what ``torch.nn.utils.clip_grad_norm_`` reports of the whole gradients, times a scale. An element that is
    inf or NaN on any rank makes it so on all. Nothing here waits for a device.
    """

    _group: ShardGroup  # the ranks
    _device: torch.device  # where the norm shall be
    _dtype: torch.dtype = torch.float32  # in which squares are summed at least; alike on all ranks
    is_empty: bool = True  # this rank has measured no piece
    is_judged: bool = False  # the observer of the step has been told of it
    scale: float | Tensor = 1.0  # averages and unscales sums, and so the norm
    _started: bool = False
    _pending: Work[Tensor] | None = None
    _total: Tensor | None = None  # the sum of squares
    _value: Tensor | None = None

    def measure(self, pieces: Iterable[Tensor], scale: float | Tensor = 1.0) -> None:
        """Measure this rank's pieces, and start summing their squares over the ranks. Communicates, once.

        All ranks call it. The norm is multiplied by ``scale``.
        """
        self.scale = scale
        norms: list[Tensor] = []
        for piece in pieces:
            dtype = torch.promote_types(piece.dtype, torch.float32)
            self._dtype = torch.promote_types(dtype, self._dtype)
            norms.append(torch.linalg.vector_norm(piece, dtype=dtype).to(self._device))
        squares = torch.zeros((), dtype=self._dtype, device=self._device)
        if norms:
            squares += torch.stack([norm.to(self._dtype) for norm in norms]).square().sum()
        self.is_empty = not norms
        self._pending = self._group.sum_scalar(squares)
        self._started = True

    def catch_up(self) -> bool:
        """Start the sum, without pieces, unless started, and wait; return whether the norm is known. Communicates."""
        if not self._started:
            self.measure(())
        with suppress(RuntimeError):
            return bool(self.value.dim() == 0)
        return False

    @property
    def value(self) -> Tensor:
        """Wait for the sum, and return the norm, 0-d, fp32 at least; raise ``RuntimeError`` if an error has lost it."""
        assert self._started, "not started"
        pending, self._pending = self._pending, None
        if pending is not None:
            self._total = pending.wait()
        if self._value is None:
            if self._total is None:
                raise RuntimeError(
                    "expected the norm of the gradients, lost it to an error before: call optimizer.zero_grad() on "
                    "every rank, and begin the step anew"
                )
            self._value = self._total.sqrt() * self.scale
        return self._value


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, 0-d and at most 1, that brings gradients of this ``norm`` down to ``max_norm``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
