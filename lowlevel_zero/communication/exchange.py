"""Exchange: over gloo, each row goes straight to the rank that wants it, which sums.

gloo's native reduce-scatter and all-gather are several times slower, and sum 16-bit gradients in 16 bits. And its
collectives come in one order, all of them: here each optimizer has an order of its own, and in it each kind of message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from .sequel import OnThread
from .transport import HostTransport, Pending, in_rows

# Elements that fit a core's cache several times.
_BLOCK = 2**16

# What ranks tell each other of.
REDUCE, SPREAD, GATHER, HAND_OUT, AGREED, ADDED, PRESENT = range(1, 8)
_KINDS = 16  # at most

T = TypeVar("T")


class Exchange(HostTransport):
    """Messages from rank to rank.

    Args:
        group: a gloo group. Its collectives aren't used.
        number: of the optimizer whose messages these are.

    Attributes:
        peers: whom to send to and whom to receive from, turn by turn. gloo runs on few ranks: a loop is right.
    """

    orders_gathers_apart = True

    def __init__(self, group: dist.ProcessGroup, number: int = 0) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = ref(group)  # which may have this in its own record
        self._first_kind = _KINDS * number
        self._sums, self._notices = OnThread(), OnThread()
        turns = range(1, self.size)
        self.peers = [((self.rank + turn) % self.size, (self.rank - turn) % self.size) for turn in turns]

    def kind(self, kind: int) -> int:
        """What this optimizer's messages of a kind are known by."""
        return self._first_kind + kind

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

    def all_reduce(self, wire: Tensor) -> Pending[Tensor]:
        """Each rank sums a row, in rank order, and sends it to all others, whatever it is at then.

        In place, if ``wire`` (of any shape) can be cut into as many rows as there are ranks.
        """
        rows = in_rows(wire, self.size)
        total = rows.view(-1)[: wire.numel()].view(wire.shape)
        theirs = {of: torch.empty_like(rows[0]) for _, of in self.peers}
        works = self.send_and_receive([(rows[to], theirs[of]) for to, of in self.peers], REDUCE)

        def sum_own() -> None:
            versions = theirs | {self.rank: rows[self.rank]}
            rows[self.rank].copy_(sum_rows([versions[rank] for rank in range(self.size)]))

        def spread(_: None) -> Pending[Tensor]:
            works = self.send_and_receive([(rows[self.rank], rows[of]) for _, of in self.peers], SPREAD)
            return Pending(works, (rows,), lambda: total)

        return self._sums.after(Pending(works, (rows, *theirs.values()), sum_own), spread)

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

    def exchange_few(self, few: Tensor, kind: int) -> Pending[list[Tensor]]:
        """All ranks to all others."""
        told = [few if rank == self.rank else torch.empty_like(few) for rank in range(self.size)]
        works = self.send_and_receive([(few, told[of]) for _, of in self.peers], kind)
        return Pending(works, tuple(told), lambda: told)

    def noticed(self, pending: Pending[T]) -> Pending[T]:
        """A thread waits, since gloo doesn't tell of a message before."""
        return self._notices.after(pending, lambda result: Pending((), (), lambda: result))

    def send_and_receive(self, pairs: Sequence[tuple[Tensor, Tensor]], kind: int) -> list[dist.Work]:
        """Start sending the first and receiving into the second of a pair, a pair a turn; what is empty stays."""
        works: list[dist.Work] = []
        group = self._group()
        assert group is not None
        for (to, of), (mine, theirs) in zip(self.peers, pairs, strict=True):
            if theirs.numel():
                works.append(group.recv([theirs], of, self.kind(kind)))
            if mine.numel():
                works.append(group.send([mine], to, self.kind(kind)))
        return works


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
