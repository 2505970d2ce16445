"""Shared memory: processes of one host read each other's buffers where they were packed.

All collectives are one: a rank packs its part into a block of its memory, sends each peer a record of where it lies,
waits for a record from each, and reads the others' parts. Its next record says which blocks it has read, and a block
that all have read is used again. No rank waits for that: while no block is free, buffers get fresh ones, since a rank
may be a whole backward ahead of its peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar
from weakref import ref

import torch
from torch import Tensor

from ..flat_buffers import keep_own, lay_end_to_end
from ..work import OnDemand, Work
from .backend import KINDS, HostBackend, Kind, Trade, referent
from .memory_pool import Block, Memory

T = TypeVar("T")

# Bytes of idle blocks that are kept from step to step, at most, eight buffers of the default size: getting memory anew
# takes three times as long as packing it.
KEPT = 32 * 2**20

# Ranks up to which each reads all buffers whole in an all-reduce, which meets once. More meet twice: each rank sums its
# own row of all buffers, and then copies the others' sums.
READ_WHOLE = 3


class SharedMemory(HostBackend):
    """A backend whose ranks read buffers of optimizer ``number`` in each other's ``memory``, which all of them map."""

    # Ranks that compute on the same cores are seldom abreast: let one that is ahead go on.
    in_flight = 8
    limits_all_reduce = True
    shares_memory = True

    def __init__(self, rank: int, memory: Memory, number: int) -> None:
        super().__init__(rank, len(memory.maps) + 1)
        self._pool = ref(memory)
        self.chain = OnDemand()
        self._first_kind = KINDS * number
        self._handed_out: dict[int, Block] = {}

    def new_buffer(self, row: int, dtype: torch.dtype, device: torch.device, rows: int | None = None) -> Tensor:
        """Return an uninitialised buffer, ``[rows or size, row]``, in a block of shared memory, for one reduction."""
        rows = rows or self.size
        return self._in_block(rows * row, dtype).view(rows, row)

    def _in_block(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Take a block for ``numel`` elements, note it as handed out, and return its tensor."""
        block, packed = referent(self._pool).take(numel, dtype)
        self._handed_out[packed.data_ptr()] = block
        return packed

    def _take_back(self, buffer: Tensor) -> None:
        """Let the block of ``buffer`` be used again if no peer knows of it, as where a padded copy was sent instead."""
        block = self._handed_out.pop(buffer.data_ptr(), None)
        if block is not None:
            block.readers.clear()

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """Start summing; up to ``READ_WHOLE`` ranks each sum all buffers whole, more in two steps. Communicates."""
        if self.size > READ_WHOLE:
            work = super().all_reduce(buffer)
            self._take_back(buffer)
            return work
        flat = buffer.view(-1)
        total = self.trade(Trade(Kind.REDUCE, flat, None, [len(flat)] * self.size), self.adding(flat))
        return total.then(lambda flat: flat.view(buffer.shape))

    def _row_of_sum(self, total: Tensor) -> Tensor:
        """Return an uninitialised row, not of ``total`` but in a block of shared memory, where other ranks read it."""
        return self._in_block(total.shape[1], total.dtype)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Copy ``own`` into a block and into ``rows``, and start reading others' from their blocks. Communicates."""
        sizes = list(map(Tensor.numel, own))
        packed = self._in_block(sum(sizes), rows[0].dtype)
        lay_end_to_end(packed, own)
        keep_own(own, rows, self.rank)  # from own, not the block: an fp32 master is its row already

        def copy(theirs: dict[int, Tensor]) -> None:
            for of, packed in theirs.items():
                torch.split_with_sizes_copy(packed, sizes, out=[each[of] for each in rows])

        return self.trade(Trade(Kind.GATHER, packed, None, [len(packed)] * self.size), copy)

    def held(self) -> list[Tensor]:
        """Return the blocks that are in use or kept."""
        return referent(self._pool).held()

    def trim(self, for_good: bool = False) -> None:
        """Free idle blocks but ``KEPT`` bytes; ``for_good``: free all, and tell peers which of theirs were read."""
        memory = self._pool()
        if memory is None:
            return
        for block in self._handed_out.values():  # of buffers that couldn't be filled: no peer knows of them
            block.readers.clear()
        self._handed_out.clear()
        while for_good and any(peer.finished for peer in memory.pipe.peers.values()):
            memory.pipe.tell(0)  # which blocks this process has finished with, for its peers to do the same
        memory.trim(0 if for_good else KEPT)

    def trade(self, what: Trade, read: Callable[[dict[int, Tensor]], T]) -> Work[T]:
        """Send others a record of where the buffer lies; ``wait`` awaits theirs and reads their parts. Communicates.

        A buffer outside of a block is copied into one.
        """
        memory, own = referent(self._pool), what.buffer
        block = self._handed_out.pop(own.data_ptr(), None)
        if block is None:
            block, packed = memory.take(len(own), own.dtype)
            own = packed.copy_(own)
        starts = [own.element_size() * before for before in accumulate(what.sizes, initial=0)] if what.sizes else ()
        key = memory.pipe.tell(self._first_kind + what.kind, block.offset, starts, own.nbytes)

        def finish() -> T:
            memory = referent(self._pool)
            places = memory.pipe.receive(key, memory.timeout)
            parts = {}
            try:
                for of, theirs in memory.maps.items():
                    if what.coming[of] and what.sizes is None and places[of].nbytes != own.nbytes:
                        raise RuntimeError(
                            f"expected {own.nbytes} bytes from rank {of}, as many as it gets, got {places[of].nbytes} "
                            "bytes of another call: let every rank make the same calls in the same order"
                        )
                    if what.coming[of]:
                        offset = places[of].offset + places[of].start
                        parts[of] = torch.frombuffer(theirs, dtype=own.dtype, count=what.coming[of], offset=offset)
                if what.into is not None:
                    for of, part in parts.items():
                        what.into[of].copy_(part)
                return read(parts)
            finally:
                block.readers.discard(self.rank)
                for of, place in places.items():
                    memory.pipe.peers[of].finished.append(place.offset)

        def ready() -> bool:
            return referent(self._pool).pipe.has(key)

        return Work(finish, ready, (what.buffer,))
