"""Staged: buffers of a device through the host, for a backend that carries the host's alone; as when ranks share a GPU.

Copies wait for the device: it is a way for tests and small runs, not a fast one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..work import Work
from .backend import Backend

_HOST = torch.device("cpu")


class Staged(Backend):
    """Brings buffers to the host, hands them to another backend, and brings back what comes of them.

    Args:
        host: carries the host's buffers.
    """

    def __init__(self, host: Backend) -> None:
        super().__init__(host.rank, host.size)
        self._host = host

    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """As ``host`` does it."""
        device = buffer.device
        return self._host.reduce_scatter(self._staged(buffer)).then(lambda row: row.to(device))

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """As ``host`` does it; never in place."""
        device = buffer.device
        return self._host.all_reduce(self._staged(buffer)).then(lambda total: total.to(device))

    def sum(self, value: Tensor) -> Work[Tensor]:
        """As ``host`` does it."""
        return self._host.sum(value.to(_HOST)).then(lambda total: total.to(value.device))

    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """Of ``buffer`` its own row goes to the host, and all come back."""
        staged = torch.empty(buffer.shape, dtype=buffer.dtype, device=_HOST)
        staged[self.rank].copy_(buffer[self.rank])
        return self._host.all_gather(staged).then(buffer.copy_)

    def all_to_all(self, buffer: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]) -> Work[Tensor]:
        """As ``host`` does it."""
        staged = torch.empty(into.shape, dtype=into.dtype, device=_HOST)
        return self._host.all_to_all(buffer.to(_HOST), sizes, staged, sizes_into).then(into.copy_)

    def _staged(self, buffer: Tensor) -> Tensor:
        return self._host.new_buffer(buffer.shape[1], buffer.dtype, _HOST).copy_(buffer)
