"""Shared memory: the processes of one host read each other's buffers right where these were packed.

All collectives are one: a rank packs what it has into a block of its memory, tells each peer where it lies, waits until
all have told the same, and reads theirs. Who has read a block says so in its next record, and when all have, the block
is used again. Nobody ever waits for that: while none is free, buffers get fresh ones, since a rank may be a whole
backward ahead of its peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NoReturn, TypeVar
from weakref import ref

import torch
from torch import Tensor

from ..flat_buffers import keep_own, lay_end_to_end, sum_rows
from ..work import Work
from .backend import GATHER, KINDS, REDUCE, HostBackend, Trade
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

    def new_buffer(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer in a block; each is handed to one reduction."""
        return self._in_block(self.size * row, dtype).view(self.size, row)

    def _in_block(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = self._pool() or _refuse()
        block, packed = memory.take(numel, dtype)
        self._handed_out[packed.data_ptr()] = block
        return packed

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """Every rank sums all rows, in rank order: to the same bits."""

        def add(theirs: dict[int, Tensor]) -> Tensor:
            theirs[self.rank] = buffer.view(-1)
            return sum_rows([*map(theirs.__getitem__, range(self.size))]).view(buffer.shape)

        return self.trade(Trade(REDUCE, buffer.view(-1), None, [buffer.numel()] * self.size), add)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Each rank copies what it lacks out of the others' blocks, straight to where it belongs."""
        sizes = list(map(Tensor.numel, own))
        packed = self._in_block(sum(sizes), rows[0].dtype)
        lay_end_to_end(packed, own)
        keep_own(own, rows, self.rank)  # from own, not the block: an fp32 master is its row already

        def copy(theirs: dict[int, Tensor]) -> None:
            for of, packed in theirs.items():
                torch.split_with_sizes_copy(packed, sizes, out=[each[of] for each in rows])

        return self.trade(Trade(GATHER, packed, None, [len(packed)] * self.size), copy)

    def held(self) -> list[Tensor]:
        """Blocks, in use or kept."""
        memory = self._pool() or _refuse()
        return memory.held()

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

    def trade(self, what: Trade, read: Callable[[dict[int, Tensor]], T]) -> Work[T]:
        """Tell the others where the buffer lies, and read theirs when they have told the same.

        A buffer that doesn't lie in a block is copied into one.
        """
        memory, own = self._pool() or _refuse(), what.buffer
        block = self._handed_out.pop(own.data_ptr(), None)
        if block is None:
            block, packed = memory.take(len(own), own.dtype)
            own = packed.copy_(own)
        starts = [own.element_size() * before for before in accumulate(what.sizes, initial=0)] if what.sizes else ()
        key = memory.pipe.tell(self._first_kind + what.kind, block.offset, starts, own.nbytes)

        def finish() -> T:
            memory = self._pool() or _refuse()
            places = memory.pipe.receive(key, memory.timeout)
            parts = {}
            try:
                for of, theirs in memory.maps.items():
                    if what.sizes is None and places[of].nbytes != own.nbytes:
                        raise RuntimeError(_of_another_call(of, own.nbytes, places[of].nbytes))
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

        def done() -> bool:
            memory = self._pool() or _refuse()
            return memory.pipe.has(key)

        return Work(finish, done, (what.buffer,))


def _refuse() -> NoReturn:
    """Raise for memory that is needed after it has ended."""
    raise RuntimeError("expected the shared memory of a process group, which has been destroyed")


def _of_another_call(rank: int, expected: int, got: int) -> str:
    """Return the message for a peer whose numbers aren't as many as this rank's."""
    return (
        f"expected {expected} bytes from rank {rank}, as many as it gets, got {got} bytes of another call: "
        "let every rank make the same calls in the same order"
    )
