"""Levels: wires that are reduced and gathered over two groups in turn, so that little crosses the outer one.

Ranks form a grid, ``[outer, inner]``: an inner group is near, all on one host say, and an outer one joins those that
have the same place in theirs. A reduction first scatters the wire over the inner group; what is left, ``1 / inner`` of
it, crosses the outer one. (The idea is that of hierarchical all-reduce, as in Horovod, and of PyTorch's hybrid FSDP.)

::

    Nested: slices over both levels                 Replicated: slices over the inner level
    wire [inner * outer, row]                       wire [inner, row]
      inner reduce-scatter -> [outer, row]            inner reduce-scatter -> [row]
      outer reduce-scatter -> [row]                   outer all-reduce     -> [row]

A slice's number is ``inner * outer_size + outer``: so what the outer level wants of a wire lies in one piece.

The second level starts when the first is done, whatever this rank is at (see ``sequel``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .sequel import Sequel
from .transport import Pending, Transport, then


class Levels(Transport):
    """Wires over a grid of ranks.

    Args:
        outer: brings wires across inner groups.
        inner: brings wires within one.
        sequel: orders the two.
        rank: of the slices that parameters are cut into, this process's.
        size: how many there are.
    """

    def __init__(self, outer: Transport, inner: Transport, sequel: Sequel, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._outer = outer
        self._inner = inner
        self._sequel = sequel
        self.in_flight = inner.in_flight

    def new_wire(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where the inner level wants it."""
        wire = self._inner.new_wire(self.size // self._inner.size * row, dtype, device)
        return wire.view(self.size, row)

    def reduce_scatter(self, wire: Tensor) -> Pending[Tensor]:
        """A block of rows within, then across."""
        return self._sequel.after(self._inner.reduce_scatter(self._blocks(wire)), self._reduce_across)

    @abstractmethod
    def _reduce_across(self, block: Tensor) -> Pending[Tensor]:
        """From the sum of this rank's block over the inner group to the sum of its row over all."""

    def all_reduce(self, wire: Tensor) -> Pending[Tensor]:
        """A block within, across, and all blocks within again; the sum is a new tensor."""
        block = self._sequel.after(self._inner.reduce_scatter(self._blocks(wire)), self._outer.all_reduce)
        return self._sequel.after(block, partial(self._spread, like=wire))

    def _spread(self, block: Tensor, like: Tensor) -> Pending[Tensor]:
        whole = torch.empty_like(like)
        return then(self._inner.gather([block], [self._blocks(whole)], block.numel()), lambda _: whole)

    def _blocks(self, wire: Tensor) -> Tensor:
        """``[inner, rows of one inner rank]``."""
        return wire.view(self._inner.size, -1)


class Nested(Levels):
    """Each rank of the grid has a slice of its own.

    Args:
        straight: brings what is for one rank alone straight to it, over a group of all ranks.
        places: of who has slice 0, 1, 2, ... in that group.
    """

    def __init__(
        self,
        outer: Transport,
        inner: Transport,
        sequel: Sequel,
        rank: int,
        size: int,
        straight: Transport,
        places: Sequence[int],
    ) -> None:
        super().__init__(outer, inner, sequel, rank, size)
        self._straight = straight
        self._by_place = sorted(range(size), key=places.__getitem__)

    def _reduce_across(self, block: Tensor) -> Pending[Tensor]:
        return self._outer.reduce_scatter(block.view(self._outer.size, -1))

    def all_gather(self, wire: Tensor) -> Pending[Tensor]:
        """The rows of this rank's block across, then all blocks within."""
        blocks = self._blocks(wire)
        block = blocks[self._inner.rank].view(self._outer.size, -1)

        def spread(_: None) -> Pending[Tensor]:
            return then(self._inner.gather([block.view(-1)], [blocks], block.numel()), lambda _: wire)

        return self._sequel.after(self._outer.gather([wire[self.rank]], [block], wire.shape[1]), spread)

    def all_to_all(
        self, wire: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]
    ) -> Pending[Tensor]:
        """Straight: nothing of it becomes less on the way over a third rank."""
        parts, parts_into = wire.split_with_sizes(list(sizes)), into.split_with_sizes(list(sizes_into))
        leaving = torch.cat([parts[number] for number in self._by_place], out=torch.empty_like(wire))
        sizes_by_place = [[each[number] for number in self._by_place] for each in (sizes, sizes_into)]
        coming = self._straight.all_to_all(leaving, sizes_by_place[0], torch.empty_like(into), sizes_by_place[1])

        def renumber(come: Tensor) -> Tensor:
            for number, part in zip(self._by_place, come.split_with_sizes(sizes_by_place[1]), strict=True):
                parts_into[number].copy_(part)
            return into

        return then(coming, renumber)


class Replicated(Levels):
    """Inner groups have the same slices."""

    def _reduce_across(self, block: Tensor) -> Pending[Tensor]:
        return self._outer.all_reduce(block)

    def all_gather(self, wire: Tensor) -> Pending[Tensor]:
        """Within: what another inner group has is the same."""
        return self._inner.all_gather(wire)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Pending[None]:
        """Within."""
        return self._inner.gather(own, rows, row)

    def all_to_all(
        self, wire: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]
    ) -> Pending[Tensor]:
        """Within: each inner group does the same."""
        return self._inner.all_to_all(wire, sizes, into, sizes_into)
