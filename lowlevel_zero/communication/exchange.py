"""Exchange: on gloo, each row goes straight to the rank that wants it, which sums.

gloo's native reduce-scatter and all-gather are several times slower, and sum 16-bit gradients in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .transport import Native, Pending

# Elements that fit a core's cache several times.
_BLOCK = 2**16

# Tags of messages between two ranks: reductions, gathers and the rest have an order of their own each. (Of a few
# numbers there are no messages.)
REDUCE, GATHER, HAND_OUT, AGREED, ADDED, PRESENT = 7001, 7002, 7003, 7004, 7005, 7006


class Exchange(Native):
    """Messages from rank to rank; an all-reduce is gloo's own.

    Attributes:
        peers: whom to send to and whom to receive from, turn by turn. gloo runs on few ranks: a loop is right.
    """

    orders_gathers_apart = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._global_ranks = dist.get_process_group_ranks(group)
        turns = range(1, self.size)
        self.peers = [((self.rank + turn) % self.size, (self.rank - turn) % self.size) for turn in turns]

    def swap(self, wire: Tensor) -> Pending[Tensor]:
        """Each row goes to the rank that it is for."""
        theirs = torch.empty_like(wire)
        theirs[self.rank] = wire[self.rank]
        works = self.send_and_receive([(wire[to], theirs[of]) for to, of in self.peers], REDUCE)
        return Pending(works, (wire, theirs), lambda: theirs)

    def reduce_scatter(self, wire: Tensor) -> Pending[Tensor]:
        """Each rank gets everybody's version of its own row, and sums them."""
        others = torch.empty_like(wire[1:])
        works = self.send_and_receive([(wire[to], others[at]) for at, (to, _) in enumerate(self.peers)], REDUCE)
        into = others[0] if self.size == 2 else None
        return Pending(works, (wire, others), lambda: sum_rows([wire[self.rank], *others], into))

    def all_gather(self, wire: Tensor) -> Pending[Tensor]:
        """Each rank sends its own row to all others."""
        works = self.send_and_receive([(wire[self.rank], wire[of]) for _, of in self.peers], GATHER)
        return Pending(works, (wire,), lambda: wire)

    def all_to_all(
        self, wire: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]
    ) -> Pending[Tensor]:
        """Each rank sends every other one what is for it."""
        mine, theirs = wire.split_with_sizes(list(sizes)), into.split_with_sizes(list(sizes_into))
        works = self.send_and_receive([(mine[to], theirs[of]) for to, of in self.peers], HAND_OUT)
        theirs[self.rank].copy_(mine[self.rank])
        return Pending(works, (wire, into), lambda: into)

    def send_and_receive(self, pairs: Sequence[tuple[Tensor, Tensor]], tag: int) -> list[dist.Work]:
        """Start sending the first and receiving into the second of a pair, a pair a turn; what is empty stays."""
        works: list[dist.Work | None] = []
        for (to, of), (mine, theirs) in zip(self.peers, pairs, strict=True):
            if theirs.numel():
                works.append(dist.irecv(theirs, src=self._global_ranks[of], group=self._group, tag=tag))
            if mine.numel():
                works.append(dist.isend(mine, dst=self._global_ranks[to], group=self._group, tag=tag))
        return [work for work in works if work is not None]


def sum_rows(rows: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """The sum of two rows or more, 1-D, from the first on, 16-bit ones in fp32; fresh, or ``into``.

    Two 16-bit numbers are added right as they are: their sum is rounded once either way. More rows are added a
    block at a time, so that the sum stays in the cache.
    """
    first, second, *others = rows
    if not others:
        return torch.add(first, second, out=into)
    total = torch.empty_like(first) if into is None else into
    blocks = [torch.split(row, _BLOCK) for row in (total, *rows)]
    for block, one, other, *more in zip(*blocks, strict=True):
        _sum_block(block, one, other, more)
    return total


def _sum_block(total: Tensor, first: Tensor, second: Tensor, others: Sequence[Tensor]) -> None:
    wide = torch.promote_types(total.dtype, torch.float32)
    if wide == total.dtype:
        torch.add(first, second, out=total)
        for row in others:
            total += row
    else:
        exact = first.to(wide).add_(second)
        for row in others:
            exact += row
        total.copy_(exact)
