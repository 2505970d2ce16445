"""Staged: wires of a device through the host, for a backend that carries the host's alone; as when ranks share a GPU.

Copies wait for the device: it is a way for tests and small runs, not a fast one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .transport import Pending, Transport

_HOST = torch.device("cpu")


class Staged(Transport):
    """Brings wires to the host, hands them to another transport, and brings back what comes of them.

    Args:
        host: carries the host's wires.
    """

    def __init__(self, host: Transport) -> None:
        super().__init__(host.rank, host.size)
        self._host = host

    def reduce_scatter(self, wire: Tensor) -> Pending[Tensor]:
        """As ``host`` does it."""
        return _brought_back(self._host.reduce_scatter(self._staged(wire)), wire.device)

    def all_reduce(self, wire: Tensor) -> Pending[Tensor]:
        """As ``host`` does it; never in place."""
        return _brought_back(self._host.all_reduce(self._staged(wire)), wire.device)

    def all_gather(self, wire: Tensor) -> Pending[Tensor]:
        """Of ``wire`` its own row goes to the host, and all come back."""
        staged = torch.empty(wire.shape, dtype=wire.dtype, device=_HOST)
        staged[self.rank].copy_(wire[self.rank])
        pending = self._host.all_gather(staged)
        return Pending((), (*pending.tensors, wire), lambda: wire.copy_(pending.wait()), pending.done)

    def all_to_all(
        self, wire: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]
    ) -> Pending[Tensor]:
        """As ``host`` does it."""
        staged = torch.empty(into.shape, dtype=into.dtype, device=_HOST)
        pending = self._host.all_to_all(wire.to(_HOST), sizes, staged, sizes_into)
        return Pending((), (*pending.tensors, into), lambda: into.copy_(pending.wait()), pending.done)

    def _staged(self, wire: Tensor) -> Tensor:
        staged = self._host.new_wire(wire.shape[1], wire.dtype, _HOST)
        return staged.copy_(wire)


def _brought_back(pending: Pending[Tensor], device: torch.device) -> Pending[Tensor]:
    return Pending((), pending.tensors, lambda: pending.wait().to(device), pending.done)
