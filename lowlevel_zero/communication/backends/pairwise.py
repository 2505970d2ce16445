"""Pairwise: messages over gloo; each row goes straight to the rank that wants it, which sums.

gloo's native reduce-scatter and all-gather are several times slower, and sum 16-bit gradients in 16 bits. And its
collectives come in one order, all of them: here each optimizer has an order of its own, and in it each kind of message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat_buffers import in_rows, keep_own, lay_end_to_end, sum_rows
from ..runtime import Threads
from ..work import OnThread, Work
from .backend import AGREED, BUFFERS, GATHER, HAND_OUT, KINDS, MAXIMUM, PRESENT, REDUCE, SPREAD, HostBackend, PeerError

T = TypeVar("T")

_LARGE = 2**17  # elements that take longer to be copied twice than to be sent by themselves


class Pairwise(HostBackend):
    """Messages from rank to rank.

    Args:
        group: a gloo group. Its collectives aren't used. It is held by its context alone.
        threads: those that wait for what others wait for.
        number: of the optimizer whose messages these are.
        buffers: a gloo group over the same ranks, whose connections carry buffers, lest a few numbers wait behind them;
            None: ``group``, too.

    Attributes:
        peers: whom to send to and receive from, turn by turn. Few ranks send buffers over gloo: a loop will do.
    """

    limits_all_reduce = all_reduce_only_reads = True

    def __init__(
        self, group: dist.ProcessGroup, threads: Threads, number: int = 0, buffers: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group, self._buffers = ref(group), ref(buffers or group)
        self._ranks = dist.get_process_group_ranks(group)
        self._first_tag = KINDS * number
        self._sums, self._maps = OnThread(threads), OnThread(threads)
        turns = range(1, self.size)
        self.peers = [((self.rank + turn) % self.size, (self.rank - turn) % self.size) for turn in turns]
        self._in_rounds = [peer for turn, peer in zip(turns, self.peers, strict=True) if turn & (turn - 1) == 0]

    def reduce_scatter(self, buffer: Tensor) -> Work[Tensor]:
        """Each rank gets everybody's version of its own row, and sums them."""
        others = torch.empty_like(buffer[1:])
        works = self.send_and_receive([(buffer[to], others[at]) for at, (to, _) in enumerate(self.peers)], REDUCE)
        into = others[0] if self.size == 2 else None
        return _work(works, lambda: sum_rows([buffer[self.rank], *others], into), buffer, others)

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """Each rank sums a row, in rank order, and sends it to all others, whatever it is at then."""
        rows = in_rows(buffer, self.size)
        total = torch.empty_like(rows)
        theirs = {of: torch.empty_like(rows[0]) for _, of in self.peers}
        works = self.send_and_receive([(rows[to], theirs[of]) for to, of in self.peers], REDUCE)

        failed: list[RuntimeError] = []

        def sum_own() -> None:
            versions = theirs | {self.rank: rows[self.rank]}
            try:
                sum_rows([versions[rank] for rank in range(self.size)], total[self.rank])
            except RuntimeError as error:  # the others wait for the row, whatever it holds
                failed.append(error)

        def spread(_: None) -> Work[Tensor]:
            works = self.send_and_receive([(total[self.rank], total[of]) for _, of in self.peers], SPREAD)
            return _work(works, whole, total)

        def whole() -> Tensor:
            for error in failed:
                raise error
            return total.view(-1)[: buffer.numel()].view(buffer.shape)

        return self._sums.after(_work(works, sum_own, rows, *theirs.values()), spread)

    def all_to_all(self, buffer: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]) -> Work[Tensor]:
        """Each rank sends every other one what is for it."""
        mine, theirs = buffer.split_with_sizes(list(sizes)), into.split_with_sizes(list(sizes_into))
        works = self.send_and_receive([(mine[to], theirs[of]) for to, of in self.peers], HAND_OUT)
        theirs[self.rank].copy_(mine[self.rank])
        return _work(works, lambda: into, buffer, into)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Each rank sends its own row to all others: what is large straight from where it is, the rest end to end."""
        keep_own(own, rows, self.rank)
        large = [each for each in rows if each.shape[1] >= _LARGE]
        small = [each for each in rows if each.shape[1] < _LARGE]
        sizes = [each.shape[1] for each in small]
        packed = rows[0].new_empty(self.size, sum(sizes))
        if small:
            lay_end_to_end(packed[self.rank], [each[self.rank] for each in small])
        works: list[_Message] = []
        for each in (*large, packed):
            works += self.send_and_receive([(each[self.rank], each[of]) for _, of in self.peers], GATHER)

        def unpack_theirs() -> None:
            for _, of in self.peers if small else ():
                torch.split_with_sizes_copy(packed[of], sizes, out=[each[of] for each in small])

        return _work(works, unpack_theirs, packed, *rows)

    def exchange(self, few: Tensor, kind: int, combine: Callable[[Tensor], T]) -> Work[T]:
        """All ranks to all others; but what is agreed on, and a maximum, in rounds."""
        if combine is MAXIMUM:
            return cast("Work[T]", self._maximum(few.clone(), kind))
        if kind == AGREED:
            return Work(lambda: combine(self._gathered(few)), tensors=(few,))
        parts = few.expand(self.size, *few.shape).clone()
        works = self.send_and_receive([(few, parts[of]) for _, of in self.peers], kind)
        return _work(works, lambda: combine(parts), few)

    def _maximum(self, few: Tensor, kind: int) -> Work[Tensor]:
        """In rounds, each of which doubles the number of ranks whose maximum this one has; in place.

        Hosts agree on every backend, with any number of ranks: so messages grow with its logarithm. (Dissemination:
        Hensgen, Finkel and Manber, 1988.) A thread runs the rounds of presence maps, whatever this rank is at.
        """

        def run_rounds() -> Tensor:
            theirs = torch.empty_like(few)
            for peer in self._in_rounds:
                for work in self.send_and_receive([(few, theirs)], kind, [peer]):
                    work.wait()
                torch.maximum(few, theirs, out=few)
            return few

        if kind != PRESENT:
            return Work(run_rounds, tensors=(few,))
        return self._maps.after(Work(run_rounds, tensors=(few,)), lambda most: Work(lambda: most))

    def _gathered(self, few: Tensor) -> Tensor:
        """Everybody's, in rounds, each of which doubles the number of ranks whose this has. (Bruck et al., 1997.)"""
        had = few.new_empty(self.size, *few.shape)  # of this rank, of the one before it, ...
        had[0] = few
        for at, peer in enumerate(self._in_rounds):
            mine, theirs = had[: self.size - 2**at][: 2**at], had[2**at :][: 2**at]
            for work in self.send_and_receive([(mine, theirs)], AGREED, [peer]):
                work.wait()
        return had[[(self.rank - rank) % self.size for rank in range(self.size)]]

    def send_and_receive(
        self, pairs: Sequence[tuple[Tensor, Tensor]], kind: int, peers: Sequence[tuple[int, int]] | None = None
    ) -> list[_Message]:
        """Start sending the first and receiving into the second of a pair, a pair a turn; what is empty stays."""
        group = self._buffers() if kind in BUFFERS else self._group()
        if group is None:
            raise RuntimeError("expected a process group to send messages over, found it destroyed")
        tag, works = self._first_tag + kind, []
        for (to, of), (mine, theirs) in zip(self.peers if peers is None else peers, pairs, strict=True):
            if theirs.numel():
                works.append(_Message.started(group.recv, theirs, of, tag, self._ranks[of]))
            if mine.numel():
                works.append(_Message.started(group.send, mine, to, tag, self._ranks[to]))
        return works


class _Message(NamedTuple):
    """One that is under way, to or from a peer, which its errors name by its global rank."""

    work: dist.Work
    rank: int

    @classmethod
    def started(cls, begin: Callable[..., dist.Work], tensor: Tensor, peer: int, tag: int, rank: int) -> _Message:
        """A tensor on its way."""
        try:
            return cls(begin([tensor], peer, tag), rank)
        except RuntimeError as error:
            raise PeerError(rank, str(error)) from error

    def wait(self) -> None:
        """Return when it has gone, or come."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise PeerError(self.rank, str(error)) from error


def _work(works: list[_Message], make: Callable[[], T], *tensors: Tensor) -> Work[T]:
    def finish() -> T:
        for work in works:
            work.wait()
        works.clear()  # each holds its connection, whoever keeps this
        return make()

    return Work(finish, lambda: all(each.work.is_completed() for each in works), tensors)
