"""The staged backend carries a device's buffers through the host, for ranks that share a GPU over gloo.

Copies wait for the device: it is for tests and small runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..work import Work
from .backend import Backend, BufferBackend

_HOST = torch.device("cpu")


class Staged(BufferBackend):
    """Copies buffers to the host, has another backend, ``host``, carry them, and copies the results back."""

    def __init__(self, host: Backend) -> None:
        super().__init__(host.rank, host.size)
        self._host = host

    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """Copy the buffer to the host, and start summing there; the row is copied back. Communicates."""
        return self._sum(self._host.reduce_scatter, buffer)

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """Copy the buffer to the host, and start summing there; the sum is a new tensor. Communicates."""
        return self._sum(self._host.all_reduce, buffer)

    def reduce(self, buffer: Tensor, owner: int) -> Work[Tensor]:
        """Copy the buffer to the host, and start reducing to ``owner`` there. Communicates."""
        return self._sum(self._host.reduce, buffer, owner)

    def _sum(self, start: Callable[..., Work[Tensor]], buffer: Tensor, *args: int) -> Work[Tensor]:
        """Start a sum of ``buffer``'s copy on the host, whose result is copied back. Communicates."""
        device = buffer.device
        staged = self._host.new_buffer(buffer.shape[1], buffer.dtype, _HOST, len(buffer)).copy_(buffer)
        return start(staged, *args).then(lambda total: total.to(device))

    def sum(self, value: Tensor) -> Work[Tensor]:
        """Copy a few numbers to the host, and start summing there. Communicates."""
        return self._host.sum(value.to(_HOST)).then(lambda total: total.to(value.device))

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Start gathering ``own`` into ``rows``, end to end: fp8 would take padding for numbers. Communicates."""
        return super().gather(own, rows, sum(map(Tensor.numel, own)))

    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """Copy this rank's row to the host, and start gathering there; rows are copied back. Communicates."""
        staged = torch.empty(buffer.shape, dtype=buffer.dtype, device=_HOST)
        staged[self.rank].copy_(buffer[self.rank])
        return self._host.gather([staged[self.rank]], [staged], buffer.shape[1]).then(lambda _: buffer.copy_(staged))

    def broadcast(self, buffer: Tensor, owner: int) -> Work[Tensor]:
        """Start a broadcast from ``owner`` through the host; ``buffer`` gets the result. Communicates."""
        staged = buffer.to(_HOST)
        return self._host.broadcast_from(owner, [staged], [staged]).then(lambda _: buffer.copy_(staged))


def is_staged(device: torch.device) -> bool:
    """Return whether gloo carries tensors of ``device`` through copies on the host."""
    return device.type != "cpu"
