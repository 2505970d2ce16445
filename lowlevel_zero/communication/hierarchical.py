"""Hierarchical collectives: over two groups in turn, so that little crosses the outer one.

Ranks form a grid, ``[outer, inner]``: an inner group is near, all on one host say, and an outer one joins those that
have the same place in theirs. A reduction first scatters the buffer over the inner group; what is left, ``1 / inner``
of it, crosses the outer one. (The idea is that of hierarchical all-reduce, as in Horovod, and of PyTorch's HSDP.)

::

    Nested: slices over both levels                 Replicated (HSDP): slices over the inner level
    buffer [inner * outer, row]                     buffer [inner, row]
      inner reduce-scatter -> [outer, row]            inner reduce-scatter -> [row]
      outer reduce-scatter -> [row]                   outer all-reduce     -> [row]

A slice's number is ``inner * outer_size + outer``: so what the outer level wants of a buffer lies in one piece.

The second level starts when the first is done, whatever this rank is at (see ``chaining``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .backends.backend import Backend
from .work import Chain, Work


class Hierarchical(Backend):
    """Buffers over a grid of ranks.

    Args:
        outer: brings buffers across inner groups.
        inner: brings buffers within one.
        chain: orders the two.
        rank: of the slices that parameters are cut into, this process's.
        size: how many there are.
    """

    def __init__(self, outer: Backend, inner: Backend, chain: Chain, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._outer = outer
        self._inner = inner
        self._chain = chain
        self.in_flight = inner.in_flight

    def new_buffer(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where the inner level wants it."""
        buffer = self._inner.new_buffer(self.size // self._inner.size * row, dtype, device)
        return buffer.view(self.size, row)

    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """A block of rows within, then across."""
        return self._chain.after(self._inner.reduce_scatter(self._blocks(buffer)), self._reduce_across)

    @abstractmethod
    def _reduce_across(self, block: Tensor) -> Work[Tensor]:
        """From the sum of this rank's block over the inner group to the sum of its row over all."""

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """A block within, across, and all blocks within again; the sum is a new tensor.

        The last part comes behind the first one of the next buffer, which so travels within while this one is across.
        """
        scattered = self._inner.reduce_scatter(self._blocks(buffer))
        self._chain.go_on()
        block = self._chain.after(scattered, self._outer.all_reduce)
        return self._chain.behind(block, partial(self._spread_within, like=buffer))

    def _spread_within(self, block: Tensor, like: Tensor) -> Work[Tensor]:
        whole = torch.empty_like(like)
        return self._inner.gather([block], [self._blocks(whole)], block.numel()).then(lambda _: whole)

    def _blocks(self, buffer: Tensor) -> Tensor:
        """``[inner, rows of one inner rank]``."""
        return buffer.view(self._inner.size, -1)


class Nested(Hierarchical):
    """Each rank of the grid has a slice of its own.

    Args:
        straight: brings what is for one rank alone straight to it, over a group of all ranks.
        places: of who has slice 0, 1, 2, ... in that group.
    """

    def __init__(
        self,
        outer: Backend,
        inner: Backend,
        chain: Chain,
        rank: int,
        size: int,
        straight: Backend,
        places: Sequence[int],
    ) -> None:
        super().__init__(outer, inner, chain, rank, size)
        self._straight = straight
        self._by_place = sorted(range(size), key=places.__getitem__)

    def _reduce_across(self, block: Tensor) -> Work[Tensor]:
        return self._outer.reduce_scatter(block.view(self._outer.size, -1))

    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """The rows of this rank's block across, then all blocks within."""
        blocks = self._blocks(buffer)
        block = blocks[self._inner.rank].view(self._outer.size, -1)

        def spread(_: None) -> Work[Tensor]:
            return self._inner.gather([block.view(-1)], [blocks], block.numel()).then(lambda _: buffer)

        return self._chain.after(self._outer.gather([buffer[self.rank]], [block], buffer.shape[1]), spread)

    def sum(self, value: Tensor) -> Work[Tensor]:
        """Between hosts straight; on a device within, then across, which is sure to be by the device's own means."""
        if value.is_cpu:
            return self._straight.sum(value)
        return self._chain.after(self._inner.sum(value), self._outer.sum)

    def all_to_all(self, buffer: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]) -> Work[Tensor]:
        """Straight: nothing of it becomes less on the way over a third rank."""
        parts, parts_into = buffer.split_with_sizes(list(sizes)), into.split_with_sizes(list(sizes_into))
        leaving = torch.cat([parts[number] for number in self._by_place], out=torch.empty_like(buffer))
        sizes_by_place = [[each[number] for number in self._by_place] for each in (sizes, sizes_into)]
        coming = self._straight.all_to_all(leaving, sizes_by_place[0], torch.empty_like(into), sizes_by_place[1])

        def renumber(come: Tensor) -> Tensor:
            for number, part in zip(self._by_place, come.split_with_sizes(sizes_by_place[1]), strict=True):
                parts_into[number].copy_(part)
            return into

        return coming.then(renumber)


class Replicated(Hierarchical):
    """Inner groups have the same slices."""

    def _reduce_across(self, block: Tensor) -> Work[Tensor]:
        return self._outer.all_reduce(block)

    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """Within: what another inner group has is the same."""
        return self._inner.all_gather(buffer)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Within."""
        return self._inner.gather(own, rows, row)

    def sum(self, value: Tensor) -> Work[Tensor]:
        """Over the slices, each once: within."""
        return self._inner.sum(value)

    def all_to_all(self, buffer: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]) -> Work[Tensor]:
        """Within: each inner group does the same."""
        return self._inner.all_to_all(buffer, sizes, into, sizes_into)
