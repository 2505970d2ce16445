"""Pairwise messages over gloo: each row is sent straight to the rank that sums it.

gloo's native reduce-scatter and all-gather are several times slower, and sum 16-bit gradients in 16 bits. And all of
its collectives have one order: here each optimizer has an order of its own, and in it each kind of message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat_buffers import keep_own, lay_end_to_end
from ..runtime import Threads, runtime
from ..work import OnThread, PeerError, Work
from .backend import KINDS, Backend, HostBackend, Kind, Trade, referent

T = TypeVar("T")

# Short messages are slow: 2 ranks reduce 48 MB in 83 ms by buckets of 2**20 elements, in 48 ms by those of 2**22.
_LEAST_BUCKET, _BUCKET_PER_RANK = 2**22, 2**21  # elements
_ROWS_GATHERED = 16  # of gathers under way, which may hold a buffer of all rows each
_LARGE = 2**17  # elements that take longer to be copied twice than to be sent by themselves


class Pairwise(HostBackend):
    """A backend of point-to-point messages over gloo's ``group``, in the order of optimizer ``number``.

    ``buffers``: a group over the same ranks, whose connections carry buffers, so that a few numbers never wait behind
    them; None: ``group`` carries both. It keeps neither alive.

    Attributes:
        peers: the ranks to send to and to receive from, turn by turn.
    """

    limits_all_reduce = all_reduce_only_reads = True

    def __init__(
        self, group: dist.ProcessGroup, threads: Threads, number: int = 0, buffers: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.bucket_size = max(_LEAST_BUCKET, self.size * _BUCKET_PER_RANK)
        self.gathers_in_flight = max(Backend.gathers_in_flight, _ROWS_GATHERED // self.size)
        self._group, self._buffers = ref(group), ref(buffers or group)
        self._ranks = dist.get_process_group_ranks(group)
        self._first_tag = KINDS * number
        self.chain, self._maps = OnThread(threads), runtime().worker("lowlevel_zero presence maps", threads)
        turns = range(1, self.size)
        self.peers = [((self.rank + turn) % self.size, (self.rank - turn) % self.size) for turn in turns]
        self._in_rounds = [peer for turn, peer in zip(turns, self.peers, strict=True) if turn & (turn - 1) == 0]

    def trade(self, what: Trade, read: Callable[[dict[int, Tensor]], T]) -> Work[T]:
        """Start sending a message to each other rank; the result is ``read`` of the messages from all. Communicates."""
        buffer, places = what.buffer, what.into
        parts = [buffer] * self.size if what.sizes is None else buffer.split_with_sizes(list(what.sizes))
        if places is None:
            sizes = [0 if rank == self.rank else size for rank, size in enumerate(what.coming)]
            places = buffer.new_empty(sum(sizes)).split_with_sizes(sizes)
        theirs = {of: places[of] for _, of in self.peers}
        works = self.send_and_receive([(parts[to], theirs[of]) for to, of in self.peers], what.kind)
        return _work(works, lambda: read(theirs), buffer, *theirs.values())

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Start gathering every rank's ``own`` into ``rows``; small pieces travel in one message. Communicates."""
        keep_own(own, rows, self.rank)
        large = [each for each in rows if each.shape[1] >= _LARGE]
        small = [each for each in rows if each.shape[1] < _LARGE]
        sizes = [each.shape[1] for each in small]
        packed = rows[0].new_empty(self.size, sum(sizes))
        if small:
            lay_end_to_end(packed[self.rank], [each[self.rank] for each in small])
        works: list[Work[object]] = []
        for each in (*large, packed):
            works += self.send_and_receive([(each[self.rank], each[of]) for _, of in self.peers], Kind.GATHER)

        def unpack_theirs() -> None:
            for _, of in self.peers if small else ():
                torch.split_with_sizes_copy(packed[of], sizes, out=[each[of] for each in small])

        return _work(works, unpack_theirs, packed, *rows)

    def maximum(self, few: Tensor, kind: Kind) -> Work[Tensor]:
        """Return a work of the maximum over all ranks, whose ``wait`` runs log2(ranks) rounds. Communicates.

        Hosts agree on every backend, with any number of ranks, so the messages grow with its logarithm. (Dissemination:
        Hensgen, Finkel and Manber, 1988.) For presence maps a thread runs them, at once.
        """
        most = few.clone()

        def run_rounds() -> Tensor:
            theirs = torch.empty_like(most)
            for peer in self._in_rounds:
                for work in self.send_and_receive([(most, theirs)], kind, [peer]):
                    work.wait()
                torch.maximum(most, theirs, out=most)
            return most

        if kind is not Kind.PRESENCE_MAP:
            return Work(run_rounds, tensors=(most,))
        done = self._maps.submit(run_rounds)
        return Work(done.result, done.done, (most,))

    def send_and_receive(
        self, pairs: Sequence[tuple[Tensor, Tensor]], kind: Kind, peers: Sequence[tuple[int, int]] | None = None
    ) -> list[Work[object]]:
        """Start sending each pair's first tensor and receiving its second, by the group of ``kind``. Communicates."""
        group = referent(self._buffers if kind < Kind.AGREEMENT else self._group)
        works: list[Work[object]] = []

        def start(begin: Callable[..., dist.Work], tensor: Tensor, peer: int) -> None:
            named = partial(_of_peer, self._ranks[peer])
            work = named(partial(begin, [tensor], peer, self._first_tag + kind))
            works.append(Work(partial(named, work.wait), work.is_completed))

        for (to, of), (mine, theirs) in zip(self.peers if peers is None else peers, pairs, strict=True):
            if theirs.numel():
                start(group.recv, theirs, of)
            if mine.numel():
                start(group.send, mine, to)
        return works


def _of_peer(rank: int, act: Callable[[], T]) -> T:
    """Return ``act()``; raise ``PeerError``, which names the other side's global ``rank``, if it fails."""
    try:
        return act()
    except RuntimeError as error:
        raise PeerError(rank, str(error)) from error


def _work(works: list[Work[object]], make: Callable[[], T], *tensors: Tensor) -> Work[T]:
    """Return a work that waits for all messages in ``works``, then returns ``make()``; it keeps ``tensors`` alive."""

    def finish() -> T:
        for work in works:
            work.wait()
        works.clear()  # each holds its connection, whoever keeps this
        return make()

    return Work(finish, lambda: all(each.ready() for each in works), tensors)
