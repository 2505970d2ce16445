"""Shared memory: the processes of one host read each other's buffers right where these were packed.

A rank packs a buffer into a block of its memory and tells each peer where it lies. That message is also what orders
memory: whoever has received it sees what was written before it was sent. Who has read a block says so, and when all
have, the block is used again. Nobody ever waits for that: while none is free, buffers get fresh ones, since a rank may
be a whole backward ahead of its peers. A few numbers travel in the message itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ..flat_buffers import keep_own, lay_end_to_end, sum_rows
from ..work import Work
from .backend import GATHER, HAND_OUT, KINDS, REDUCE, HostBackend, bytes_of
from .control_pipe import INLINE, Key, Message
from .memory_pool import Block, Pool

T = TypeVar("T")

# Bytes of idle blocks that are kept from step to step, at most, eight buffers of the default size: getting memory anew
# takes three times as long as packing it.
KEPT = 32 * 2**20

_NOWHERE = Block(0, 0, 0)


class SharedMemory(HostBackend):
    """Buffers in the memory of all ranks.

    Args:
        rank: of this process.
        pool: the ranks' memory.
        number: of the optimizer whose buffers these are.
    """

    # Ranks that compute on the same cores are seldom abreast: let one that is ahead go on.
    in_flight = 8
    limits_all_reduce = True
    orders_gathers_apart = True
    shares_memory = True

    def __init__(self, rank: int, pool: Pool, number: int) -> None:
        super().__init__(rank, len(pool.peers) + 1)
        self._pool, self._pipe = pool, pool.own.pipe
        self._first_kind = KINDS * number
        self._serials: defaultdict[int, int] = defaultdict(int)
        self._handed_out: dict[int, Block] = {}
        self._peers = {of: pool.peers[of] for of in ((rank - turn) % self.size for turn in range(1, self.size))}

    def new_buffer(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer in a block; each is handed to one reduction."""
        block, buffer = self._packed(self.size * row, dtype)
        self._handed_out[buffer.data_ptr()] = block
        return buffer.view(self.size, row)

    def reduce_scatter(self, buffer: Tensor) -> Work[Tensor]:
        """Each rank sums its own row of all buffers, from its own version on, in turn."""
        own, block = buffer[self.rank], self._block_of(buffer)
        key = self._tell(REDUCE, block)

        def finish() -> Tensor:
            messages = self._pipe.receive(key, self._pool.timeout)
            theirs = self._views(messages, own.numel(), own.dtype, own.nbytes * self.rank)
            total = sum_rows([own, *theirs.values()])
            self._release(block, messages)
            return total

        return Work(finish, partial(self._pipe.has, key), (buffer,))

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """Every rank sums all rows, in rank order: to the same bits."""
        block = self._block_of(buffer)
        key = self._tell(REDUCE, block)

        def finish() -> Tensor:
            messages = self._pipe.receive(key, self._pool.timeout)
            versions = self._views(messages, buffer.numel(), buffer.dtype) | {self.rank: buffer.view(-1)}
            total = sum_rows([versions[rank] for rank in range(self.size)]).view(buffer.shape)
            self._release(block, messages)
            return total

        return Work(finish, partial(self._pipe.has, key), (buffer,))

    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """As pieces, of which there is one."""
        return self.gather([buffer[self.rank]], [buffer], buffer.shape[1]).then(lambda _: buffer)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Each rank copies what it lacks out of the others' blocks, straight to where it belongs."""
        sizes = list(map(Tensor.numel, own))
        block, packed = self._packed(sum(sizes), rows[0].dtype)
        lay_end_to_end(packed, own)
        keep_own(own, rows, self.rank)  # from own, not the block: an fp32 master is its row already
        key = self._tell(GATHER, block)

        def finish() -> None:
            messages = self._pipe.receive(key, self._pool.timeout)
            for of, view in self._views(messages, sum(sizes), rows[0].dtype).items():
                torch.split_with_sizes_copy(view, sizes, out=[each[of] for each in rows])
            self._release(block, messages)

        return Work(finish, partial(self._pipe.has, key))

    def all_to_all(self, buffer: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]) -> Work[Tensor]:
        """Each rank copies its part out of the others' blocks."""
        mine, parts = buffer.split_with_sizes(list(sizes)), into.split_with_sizes(list(sizes_into))
        parts[self.rank].copy_(mine[self.rank])
        block = self._block_of(buffer)
        key = self._tell(HAND_OUT, block, starts=[buffer.element_size() * sum(sizes[:to]) for to in range(self.size)])

        def finish() -> Tensor:
            messages = self._pipe.receive(key, self._pool.timeout)
            for of, message in messages.items():
                if sizes_into[of]:
                    parts[of].copy_(self._view(of, message.offset, sizes_into[of], into.dtype))
            self._release(block, messages)
            return into

        return Work(finish, partial(self._pipe.has, key), (buffer,))

    def exchange(self, few: Tensor, kind: int, combine: Callable[[list[Tensor]], T]) -> Work[T]:
        """In the messages themselves, or in a block if they are too many for that."""
        if few.nbytes > INLINE:
            return self._exchange_blocks(few, kind, combine)
        key = self._tell(kind, part=bytes_of(few))

        def finish() -> T:
            parts = [few] * self.size
            for of, message in self._pipe.receive(key, self._pool.timeout).items():
                parts[of] = torch.frombuffer(bytearray(message.part), dtype=few.dtype)
            return combine(parts)

        return Work(finish, partial(self._pipe.has, key))

    def _exchange_blocks(self, few: Tensor, kind: int, combine: Callable[[list[Tensor]], T]) -> Work[T]:
        block = self._block_of(few)
        key = self._tell(kind, block)

        def finish() -> T:
            messages = self._pipe.receive(key, self._pool.timeout)
            parts = self._views(messages, few.numel(), few.dtype) | {self.rank: few}
            combined = combine([parts[rank].clone() for rank in range(self.size)])
            self._release(block, messages)
            return combined

        return Work(finish, partial(self._pipe.has, key))

    def held(self) -> list[Tensor]:
        """Blocks, in use or kept."""
        return self._pool.own.held()

    def trim(self, for_good: bool = False) -> None:
        """Give back what idle blocks take, but for what the next step needs anyway."""
        self._pool.own.trim(0 if for_good else KEPT)

    # ---- blocks ----

    def _packed(self, numel: int, dtype: torch.dtype) -> tuple[Block, Tensor]:
        """A block, and its first elements, 1-D; of nothing, none."""
        block = self._pool.own.take(numel * dtype.itemsize)
        if numel == 0:
            return block, torch.empty(0, dtype=dtype, device="cpu")
        return block, torch.frombuffer(self._pool.own.map, dtype=dtype, count=numel, offset=block.offset)

    def _block_of(self, buffer: Tensor) -> Block:
        """The block that ``buffer`` was packed into; one that lies elsewhere is copied."""
        block = self._handed_out.pop(buffer.data_ptr(), None)
        if block is None:
            block, packed = self._packed(buffer.numel(), buffer.dtype)
            packed.copy_(buffer.view(-1))
        return block

    def _views(self, messages: dict[int, Message], numel: int, dtype: torch.dtype, start: int = 0) -> dict[int, Tensor]:
        """What the peers' blocks hold from byte ``start`` on, turn by turn; to be read until ``_release``."""
        return {of: self._view(of, messages[of].offset + start, numel, dtype) for of in self._peers}

    def _view(self, of: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._peers[of].map, dtype=dtype, count=numel, offset=offset)

    def _release(self, block: Block, messages: dict[int, Message]) -> None:
        """This rank has finished with a block of its own, and with its peers'."""
        self._pool.own.map[block.readers + self.rank] = 0
        for of, message in messages.items():
            self._peers[of].map[message.readers + self.rank] = 0

    # ---- messages ----

    def _tell(self, kind: int, block: Block = _NOWHERE, part: bytes = b"", starts: Sequence[int] | None = None) -> Key:
        """Tell the peers of the next collective of a kind: where a block lies, and their parts in it; its key."""
        serial = self._serials[kind]
        self._serials[kind] = serial + 1
        key = self._first_kind + kind, serial
        for of, peer in self._peers.items():
            offset = block.offset if starts is None else block.offset + starts[of]
            peer.pipe.send(key, self.rank, offset, block.readers, part)
        return key
