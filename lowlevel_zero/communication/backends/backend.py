"""The interface of backends, the collectives that hosts' backends share, and the backend of one rank."""

from __future__ import annotations

import ctypes
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import ReferenceType

import torch
from torch import Tensor

from ..flat_buffers import are_apart, in_rows, keep_own, lay_end_to_end, sum_rows, take_apart, unpack
from ..work import Chain, Work

KINDS = 16  # at most

# Elements of a bucket where the caller has chosen none. A host's is to stay in its cache. A device's takes the host
# half a millisecond from backward to gather, whatever its size, in which a link of a node carries as many as Megatron's
# default has: 40 million.
HOST_BUCKET, DEVICE_BUCKET = 2**20, 40 * 2**20

T = TypeVar("T")


class Kind(IntEnum):
    """A kind of collective between hosts, whose collectives have an order of their own.

    Kinds below ``AGREEMENT`` carry buckets.
    """

    REDUCE = 1
    GATHER_SUM = 2  # the second half of an all-reduce
    GATHER = 3
    ALL_TO_ALL = 4
    AGREEMENT = 5
    SUM = 6
    PRESENCE_MAP = 7


def referent(reference: ReferenceType[T]) -> T:
    """Return the object of a weak reference; raise ``RuntimeError`` if its process group has been destroyed."""
    found = reference()
    if found is None:
        raise destroyed()
    return found


def destroyed() -> RuntimeError:
    """Return the error for a call of an optimizer whose process group has been destroyed."""
    return RuntimeError(
        "expected the process group over which the optimizer was constructed, found it destroyed: construct "
        "another optimizer after torch.distributed.init_process_group() or new_group()"
    )


class Backend(ABC):
    """Carries flat buffers, ``[size, row]``, between the ranks of one group; collectives return works.

    Every rank starts the same reductions in the same order, and the same gathers. What a work reads or writes must
    stay as it is until it is over.

    Attributes:
        bucket_size: elements of a bucket of a host's gradients where the caller has chosen none, alike on all ranks.
        in_flight: how many reductions to have under way: enough to keep the network busy, few enough for stage 2's
            memory, since each holds a buffer.
        gathers_in_flight: how many gathers to have under way in a step; each may hold a buffer.
        limits_all_reduce: ``in_flight`` bounds all-reduces too, since their sums are further buffers.
        all_reduce_only_reads: ``all_reduce`` neither writes to its buffer nor copies it: a gradient may be one.
        chain: starts the second half of an all-reduce after its first; a backend with an own all-reduce has none.
    """

    bucket_size = HOST_BUCKET
    in_flight = 3
    gathers_in_flight = 2  # one buffer is filled while the other is gathered
    limits_all_reduce = False
    all_reduce_only_reads = False
    chain: Chain

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def new_buffer(self, row: int, dtype: torch.dtype, device: torch.device, rows: int | None = None) -> Tensor:
        """Return an uninitialised buffer, ``[rows, row]``, for one reduction; ``rows``: None is ``size``."""
        return torch.empty(rows or self.size, row, dtype=dtype, device=device)

    @abstractmethod
    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """Start summing ``buffer``; the result is this rank's row of the sum, maybe in ``into``. Communicates."""

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """Start summing ``buffer``; the result has its shape, and may be ``buffer``. Communicates.

        Each rank sums a row, and sends it to all others. All memory is allocated now: where a sum fails on one rank,
        the others still get a row.
        """
        rows = in_rows(buffer, self.size)  # of any shape: it may be another level's row
        shape, numel, total = buffer.shape, buffer.numel(), torch.empty_like(rows)
        own = self._row_of_sum(total)
        first = self.reduce_scatter(rows, own)
        gathered = self.chain.after(first, lambda row: self._gather_sum(row, total), own.zero_)
        return gathered.then(lambda _: total.view(-1)[:numel].view(shape))

    def _row_of_sum(self, total: Tensor) -> Tensor:
        """Return the memory into which this rank sums its row of an all-reduce: a view of that row of ``total``."""
        return total[self.rank]

    def _gather_sum(self, row: Tensor, total: Tensor) -> Work[None]:
        """Start filling ``total`` with all ranks' summed rows. Communicates."""
        return self.gather([row], [total], len(row))

    @abstractmethod
    def reduce(self, buffer: Tensor, owner: int) -> Work[Tensor]:
        """Start summing ``buffer`` to the rank ``owner``; the result is 1-D, and empty on others. Communicates."""

    def sum(self, value: Tensor) -> Work[Tensor]:
        """Start summing a few numbers, maybe in place, to the same bits on all ranks. Communicates."""
        return self.all_reduce(value)

    @abstractmethod
    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Start filling ``rows``, each ``[size, s]``, with every rank's ``own``, each ``[s]``. Communicates.

        Where it takes a buffer to carry several, they lie end to end in its rows, which have ``row`` elements.
        """

    @abstractmethod
    def broadcast_from(self, owner: int, own: Sequence[Tensor], whole: Sequence[Tensor]) -> Work[None]:
        """Start filling ``whole``, 1-D and of one dtype, with ``owner``'s ``own``; others' isn't read. Communicates."""

    def held(self) -> list[Tensor]:
        """Return the memory that is used or kept for buffers: none, unless a backend overrides this."""
        return []

    def trim(self, for_good: bool = False) -> None:  # noqa: B027
        """Free idle memory of buffers, all of it if ``for_good``; does nothing unless a backend overrides this."""


class BufferBackend(Backend):
    """Carries one buffer at a time: several pieces travel end to end in one, and one piece alone needs none."""

    @abstractmethod
    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """Start filling ``buffer`` in place with every rank's own row of it; the result is ``buffer``. Communicates."""

    @abstractmethod
    def broadcast(self, buffer: Tensor, owner: int) -> Work[Tensor]:
        """Start filling 1-D ``buffer`` in place with the rank ``owner``'s; the result is ``buffer``. Communicates."""

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Start gathering ``own`` into ``rows``: one piece in place, several by way of one buffer. Communicates."""
        if len(own) == 1:
            keep_own(own, rows, self.rank)
            return self.all_gather(rows[0]).then(lambda _: None)
        buffer = rows[0].new_empty(self.size, row)
        numel = sum(map(Tensor.numel, own))
        lay_end_to_end(buffer[self.rank, :numel], own)
        return self.all_gather(buffer).then(lambda _: unpack(buffer, rows))

    def broadcast_from(self, owner: int, own: Sequence[Tensor], whole: Sequence[Tensor]) -> Work[None]:
        """Start broadcasting the owner's pieces, as one buffer, into ``whole``. Communicates."""
        if len(whole) == 1:
            if self.rank == owner and are_apart(own, whole):
                whole[0].copy_(own[0])
            return self.broadcast(whole[0], owner).then(lambda _: None)
        buffer = whole[0].new_empty(sum(map(Tensor.numel, whole)))
        if self.rank == owner:
            lay_end_to_end(buffer, own)
        return self.broadcast(buffer, owner).then(lambda _: take_apart(buffer, whole))


class Trade(NamedTuple):
    """The parts that a rank sends and receives in one collective of hosts.

    Attributes:
        kind: trades of one kind have an order of their own.
        buffer: 1-D; it must stay unchanged until the trade is over.
        sizes: how many elements of ``buffer`` go to rank 0, 1, ..., in this order; None: each rank gets all of it.
        coming: how many elements rank 0, 1, ... sends to this one.
        into: the memory for each rank's part; None: the backend's own, until the part has been read.
    """

    kind: Kind
    buffer: Tensor
    sizes: Sequence[int] | None
    coming: Sequence[int]
    into: Sequence[Tensor] | None = None


class HostBackend(Backend):
    """Carries tensors of the CPU, and small messages; all its collectives are made of ``trade``.

    Attributes:
        shares_memory: all ranks are processes of one host, and read each other's buffers in shared memory.
    """

    shares_memory = False

    @abstractmethod
    def trade(self, what: Trade, read: Callable[[dict[int, Tensor]], T]) -> Work[T]:
        """Start sending parts to the others; the result is ``read`` of a dict by rank of their parts. Communicates."""

    def _gather_sum(self, row: Tensor, total: Tensor) -> Work[None]:
        """Start gathering all ranks' summed rows into ``total``. Communicates."""
        keep_own([row], [total], self.rank)
        parts = Trade(Kind.GATHER_SUM, row, None, [len(row)] * self.size, total.unbind())
        return self.trade(parts, lambda _: None)

    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """Start summing this rank's row of all buffers, in rank order, in ``into`` or other memory. Communicates."""
        sizes = [buffer.shape[1]] * self.size
        return self.trade(Trade(Kind.REDUCE, buffer.view(-1), sizes, sizes), self.adding(buffer[self.rank], into))

    def reduce(self, buffer: Tensor, owner: int) -> Work[Tensor]:
        """Start summing all buffers on the owner, in rank order; the result, 1-D, is empty on others. Communicates."""
        flat = buffer.view(-1)
        sizes = [len(flat) if rank == owner else 0 for rank in range(self.size)]
        read = self.adding(flat) if self.rank == owner else lambda _: flat.new_empty(0)
        return self.trade(Trade(Kind.REDUCE, flat, sizes, [sizes[self.rank]] * self.size), read)

    def adding(self, own: Tensor, into: Tensor | None = None) -> Callable[[dict[int, Tensor]], Tensor]:
        """Return a function that returns the sum of ``own`` and others' parts, in rank order, in ``into`` if given."""

        def add(theirs: dict[int, Tensor]) -> Tensor:
            reuses = into is None and self.size == 2 and not self.shares_memory
            room = next(iter(theirs.values())) if reuses else into
            parts = theirs | {self.rank: own}
            return sum_rows([*map(parts.__getitem__, range(self.size))], room)

        return add

    def broadcast_from(self, owner: int, own: Sequence[Tensor], whole: Sequence[Tensor]) -> Work[None]:
        """Start copying the owner's tensors, packed end to end, into ``whole``. Communicates."""
        count = sum(map(Tensor.numel, whole))
        if self.rank == owner:
            packed = self.new_buffer(count, whole[0].dtype, whole[0].device, 1)[0]
            lay_end_to_end(packed, own)
            if are_apart(own, whole):
                take_apart(packed, whole)  # not from ``own``, which may be of another dtype
            return self.trade(Trade(Kind.GATHER, packed, None, [0] * self.size), lambda _: None)
        coming = [count if rank == owner else 0 for rank in range(self.size)]
        parts = Trade(Kind.GATHER, whole[0].new_empty(0), [0] * self.size, coming)
        return self.trade(parts, lambda theirs: take_apart(theirs[owner], whole))

    def exchange_rows(self, buffer: Tensor) -> Work[Tensor]:
        """Start an all-to-all of rows; the result is new: each rank's row for this one, in order. Communicates."""
        sizes, theirs = [buffer.shape[1]] * self.size, torch.empty_like(buffer)
        theirs[self.rank].copy_(buffer[self.rank])
        return self.trade(Trade(Kind.ALL_TO_ALL, buffer.view(-1), sizes, sizes, theirs.unbind()), lambda _: theirs)

    def _combined(self, few: Tensor, kind: Kind, combine: Callable[[Tensor], Tensor]) -> Work[Tensor]:
        """Start gathering a few numbers of each rank; ``combine`` makes the result of them, stacked. Communicates."""

        def read(theirs: dict[int, Tensor]) -> Tensor:
            parts = theirs | {self.rank: few.view(-1)}
            return combine(torch.stack([*map(parts.__getitem__, range(self.size))]).view(self.size, *few.shape))

        return self.trade(Trade(kind, few.view(-1), None, [few.numel()] * self.size), read)

    def maximum(self, few: Tensor, kind: Kind) -> Work[Tensor]:
        """Start taking the element-wise maximum of a few numbers, which stay unchanged until then. Communicates.

        Presence maps alone make progress by themselves, and their ``ready`` tells when they have come.
        """
        return self._combined(few, kind, partial(torch.amax, dim=0))

    def sum(self, value: Tensor) -> Work[Tensor]:
        """Start summing a few numbers in rank order. Communicates."""
        return self._combined(value, Kind.SUM, partial(torch.sum, dim=0))

    def all_gather_object(self, mine: T) -> list[T]:
        """Return every rank's ``mine`` in rank order, pickled on the way. Communicates."""
        data = bytearray(pickle.dumps(mine))
        length = self.maximum(torch.tensor([len(data)], device="cpu"), Kind.AGREEMENT).wait()
        rows = torch.zeros(self.size, int(length), dtype=torch.uint8, device="cpu")
        rows[self.rank, : len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        rows = self.maximum(rows, Kind.AGREEMENT).wait()
        # torch may be installed without numpy
        return [pickle.loads(ctypes.string_at(row.data_ptr(), row.nbytes)) for row in rows]


class Alone(HostBackend):
    """The backend of a group of one rank: every collective is local."""

    def trade(self, what: Trade, read: Callable[[dict[int, Tensor]], T]) -> Work[T]:
        """Return a work whose ``wait`` returns ``read({})``: there is no other rank to trade with."""
        return Work(lambda: read({}), tensors=(what.buffer,))

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """Return a work whose result is ``buffer`` itself."""
        return Work(lambda: buffer, tensors=(buffer,))

    def broadcast_from(self, owner: int, own: Sequence[Tensor], whole: Sequence[Tensor]) -> Work[None]:
        """Copy ``own`` into ``whole`` now, unless it is the same memory; the work has nothing left to wait for."""
        if are_apart(own, whole):
            torch._foreach_copy_(list(whole), list(own))
        return Work(lambda: None)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Copy ``own`` into ``rows`` now, unless it is the same memory; the work has nothing left to wait for."""
        keep_own(own, rows, self.rank)
        return Work(lambda: None)
