"""Hybrid sharding: each inner group holds all slices, and only sums cross between inner groups.

Ranks form a grid, ``[outer, inner]``: an inner group is near, all on one host say, and an outer one joins the ranks
that hold the same slice. A reduction first scatters a buffer over the inner group. What is left, ``1 / inner`` of it,
crosses the outer one, as soon as it is there. (The idea is that of hierarchical all-reduce, as in Horovod, and of
FSDP's HSDP.)

::

    buffer [inner, row]
      inner reduce-scatter -> [row]
      outer all-reduce     -> [row]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..work import Chain, Work
from .backend import Backend


class Hybrid(Backend):
    """Carries buffers by ``inner``, whose ranks are the slices, and sums across inner groups by ``outer``."""

    def __init__(self, outer: Backend, inner: Backend, chain: Chain) -> None:
        super().__init__(inner.rank, inner.size)
        self._outer = outer
        self._inner = inner
        self.chain = chain
        self.in_flight, self.gathers_in_flight = inner.in_flight, inner.gathers_in_flight

    def new_buffer(self, row: int, dtype: torch.dtype, device: torch.device, rows: int | None = None) -> Tensor:
        """Return a new buffer of the inner group's backend."""
        return self._inner.new_buffer(row, dtype, device, rows)

    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """Start summing this rank's row within, then across, with zeros if the sum within fails here. Communicates."""
        own = buffer.new_empty(buffer.shape[1]) if into is None else into
        return self.chain.after(self._inner.reduce_scatter(buffer, own), self._outer.all_reduce, own.zero_)

    def reduce(self, buffer: Tensor, owner: int) -> Work[Tensor]:
        """Start summing to ``owner`` in each inner group, then across the owners; empty on others. Communicates."""
        own = torch.empty_like(buffer).view(-1) if self.rank == owner else None  # before anything is begun
        within = self._inner.reduce(buffer, owner)
        return within if own is None else self.chain.after(within, self._outer.all_reduce, own.zero_)

    # ---- within: other inner groups have the same ----

    def broadcast_from(self, owner: int, own: Sequence[Tensor], whole: Sequence[Tensor]) -> Work[None]:
        """Start broadcasting ``own`` of the rank ``owner`` within the inner group. Communicates."""
        return self._inner.broadcast_from(owner, own, whole)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Start gathering ``own`` into ``rows`` within the inner group. Communicates."""
        return self._inner.gather(own, rows, row)

    def sum(self, value: Tensor) -> Work[Tensor]:
        """Start summing a few numbers within the inner group, so that each slice counts once. Communicates."""
        return self._inner.sum(value)
