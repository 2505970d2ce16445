"""Shared memory: the processes of one host read each other's buffers right where these were packed.

All collectives are one: a rank packs what it has into a block of its memory, tells each peer where it lies, waits until
all have told the same, and reads theirs. Who has read a block says so in its next record, and when all have, the block
is used again. Nobody ever waits for that: while none is free, buffers get fresh ones, since a rank may be a whole
backward ahead of its peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar
from weakref import ref

import torch
from torch import Tensor

from ..flat_buffers import keep_own, lay_end_to_end, sum_rows
from ..work import Work
from .backend import GATHER, HAND_OUT, KINDS, REDUCE, HostBackend
from .memory_pool import Block, Memory

T = TypeVar("T")

# Bytes of idle blocks that are kept from step to step, at most, eight buffers of the default size: getting memory anew
# takes three times as long as packing it.
KEPT = 32 * 2**20


class SharedMemory(HostBackend):
    """Buffers in the memory of all ranks.

    Args:
        rank: of this process.
        memory: the ranks', which ends with their process group.
        number: of the optimizer whose buffers these are.
    """

    # Ranks that compute on the same cores are seldom abreast: let one that is ahead go on.
    in_flight = 8
    limits_all_reduce = True
    shares_memory = True

    def __init__(self, rank: int, memory: Memory, number: int) -> None:
        super().__init__(rank, len(memory.maps) + 1)
        self._pool = ref(memory)
        self._first_kind = KINDS * number
        self._handed_out: dict[int, Block] = {}

    @property
    def _memory(self) -> Memory:
        memory = self._pool()
        if memory is None:
            raise RuntimeError("expected the shared memory of a process group, which has been destroyed")
        return memory

    def new_buffer(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer in a block; each is handed to one reduction."""
        block, buffer = self._memory.take(self.size * row, dtype)
        self._handed_out[buffer.data_ptr()] = block
        return buffer.view(self.size, row)

    def reduce_scatter(self, buffer: Tensor) -> Work[Tensor]:
        """Each rank sums its own row of all buffers, from its own version on, in turn."""
        own = buffer[self.rank]
        starts = range(0, buffer.nbytes, own.nbytes)
        sizes = [own.numel()] * self.size
        return self._start(REDUCE, buffer, starts, sizes, lambda theirs: sum_rows([own, *theirs.values()]))

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """Every rank sums all rows, in rank order: to the same bits."""

        def add(theirs: dict[int, Tensor]) -> Tensor:
            theirs[self.rank] = buffer.view(-1)
            return sum_rows([theirs[rank] for rank in range(self.size)]).view(buffer.shape)

        return self._start(REDUCE, buffer, (), [buffer.numel()] * self.size, add)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Each rank copies what it lacks out of the others' blocks, straight to where it belongs."""
        sizes = list(map(Tensor.numel, own))
        numel = sum(sizes)
        block, packed = self._memory.take(numel, rows[0].dtype)
        lay_end_to_end(packed, own)
        keep_own(own, rows, self.rank)  # from own, not the block: an fp32 master is its row already

        def copy(theirs: dict[int, Tensor]) -> None:
            for of, packed in theirs.items():
                torch.split_with_sizes_copy(packed, sizes, out=[each[of] for each in rows])

        return self._start(GATHER, packed, (), [numel] * self.size, copy, block)

    def all_to_all(self, buffer: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]) -> Work[Tensor]:
        """Each rank copies its part out of the others' blocks."""
        mine, parts = buffer.split_with_sizes(list(sizes)), into.split_with_sizes(list(sizes_into))
        parts[self.rank].copy_(mine[self.rank])
        starts = [buffer.element_size() * before for before in accumulate(sizes, initial=0)]

        def copy(theirs: dict[int, Tensor]) -> Tensor:
            for of, part in theirs.items():
                parts[of].copy_(part)
            return into

        return self._start(HAND_OUT, buffer, starts, sizes_into, copy)

    def exchange(self, few: Tensor, kind: int, combine: Callable[[Tensor], T]) -> Work[T]:
        """All of it to all."""

        def read(theirs: dict[int, Tensor]) -> T:
            theirs[self.rank] = few.view(-1)
            parts = torch.stack(list(map(theirs.__getitem__, range(self.size))))
            return combine(parts.view(self.size, *few.shape))

        return self._start(kind, few, (), [few.numel()] * self.size, read)

    def held(self) -> list[Tensor]:
        """Blocks, in use or kept."""
        return self._memory.held()

    def trim(self, for_good: bool = False) -> None:
        """Give back what idle blocks take, but for what the next step needs anyway."""
        memory = self._pool()
        if memory is None:
            return
        for block in self._handed_out.values():  # of buffers that couldn't be filled: no peer knows of them
            block.readers.clear()
        self._handed_out.clear()
        while for_good and any(peer.finished for peer in memory.pipe.peers.values()):
            memory.pipe.tell(0)  # which blocks this process has finished with, for its peers to do the same
        memory.trim(0 if for_good else KEPT)

    # ---- the one way of all of them ----

    def _start(
        self,
        kind: int,
        buffer: Tensor,
        starts: Sequence[int],
        sizes: Sequence[int],
        read: Callable[[dict[int, Tensor]], T],
        block: Block | None = None,
    ) -> Work[T]:
        """Tell the peers where a buffer lies, and read theirs when they have told the same.

        Args:
            kind: of collective.
            buffer: this rank's; one that doesn't lie in a block is copied into one.
            starts: from which byte on it is for rank 0, 1, ...; empty: all of it is for all.
            sizes: how many elements of theirs are for this rank.
            read: makes the result of the peers' parts, by rank in turn; those of no elements aren't there.
            block: where ``buffer`` lies, if that is known.
        """
        memory = self._memory
        mine = block or self._handed_out.pop(buffer.data_ptr(), None)
        if mine is None:
            mine, packed = memory.take(buffer.numel(), buffer.dtype)
            packed.copy_(buffer.view(-1))
        key = memory.pipe.tell(self._first_kind + kind, mine.offset, starts)

        def finish() -> T:
            memory = self._memory
            places = memory.pipe.receive(key, memory.timeout)
            parts = {}
            for of, theirs in memory.maps.items():
                if sizes[of]:
                    offset = places[of].offset + places[of].start
                    parts[of] = torch.frombuffer(theirs, dtype=buffer.dtype, count=sizes[of], offset=offset)
            try:
                return read(parts)
            finally:
                mine.readers.discard(self.rank)
                for of, place in places.items():
                    memory.pipe.peers[of].finished.append(place.offset)

        return Work(finish, lambda: self._memory.pipe.has(key), (buffer,))
