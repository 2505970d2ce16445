"""The backends' interface, what they share, and the backend of one rank."""

from __future__ import annotations

import ctypes
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..flat_buffers import in_rows, keep_own, lay_end_to_end, sum_rows, unpack
from ..work import Chain, Work

# Each has an order of its own between hosts: reductions, sums on their way back, gathers, all_to_all; agreements,
# sums of a few numbers, presence maps.
REDUCE, SPREAD, GATHER, HAND_OUT, AGREED, ADDED, PRESENT = range(1, 8)
BUFFERS = range(REDUCE, AGREED)  # of them
KINDS = 16  # at most

T = TypeVar("T")

# What becomes of everybody's few numbers, stacked.
MAXIMUM: Callable[[Tensor], Tensor] = partial(torch.amax, dim=0)
_SUM: Callable[[Tensor], Tensor] = partial(torch.sum, dim=0)


class PeerError(RuntimeError):
    """A message to another rank, or from it, didn't get through.

    Attributes:
        rank: that rank's global one.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class Backend(ABC):
    """Carries flat buffers, ``[size, row]`` and contiguous, between the ranks of one group.

    Every rank starts the same reductions in the same order, and the same gathers. What a work reads or writes must
    stay as it is until it is over.

    Args:
        rank: this process's rank in the group.
        size: ranks in the group.

    Attributes:
        in_flight: reductions that are worth having under way: enough to keep the network busy, few enough for stage
            2's memory, since each holds a buffer.
        limits_all_reduce: ``in_flight`` holds for all-reduces too, whose buffers are not what remains of them.
        all_reduce_only_reads: it doesn't write to its buffer, nor copy it: so that may be a gradient.
        chain: starts the second half of an all-reduce after its first, where the backend has no all-reduce of its own.
    """

    in_flight = 3
    limits_all_reduce = False
    all_reduce_only_reads = False
    chain: Chain

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def new_buffer(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer to be filled and handed to one reduction; what it holds is undefined."""
        return torch.empty(self.size, row, dtype=dtype, device=device)

    @abstractmethod
    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """Start summing; the result is this rank's row of the sum, ``[row]``, and may be ``into``."""

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """Start summing; the result has ``buffer``'s shape, and may be ``buffer``.

        Each rank sums a row, and hands it to all others, whatever it is at then.
        """
        rows = in_rows(buffer, self.size)  # of any shape: it may be another level's row
        shape, numel, total = buffer.shape, buffer.numel(), torch.empty_like(rows)
        scattered = self.reduce_scatter(rows, total[self.rank])
        failed: list[RuntimeError] = []

        def summed() -> Tensor:
            try:
                return scattered.wait()
            except PeerError:
                raise
            except RuntimeError as error:  # the others wait for the row, whatever it holds
                failed.append(error)
                return total[self.rank]

        def whole(_: None) -> Tensor:
            for error in failed:
                raise error
            return total.view(-1)[:numel].view(shape)

        first = Work(summed, scattered.done, scattered.tensors)
        return self.chain.after(first, lambda row: self._spread(row, total)).then(whole)

    def _spread(self, row: Tensor, total: Tensor) -> Work[None]:
        """Start filling ``total`` with the rows that all ranks have summed."""
        return self.gather([row], [total], len(row))

    @abstractmethod
    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """Start filling ``buffer``, of which every rank gives its own row; in place."""

    @abstractmethod
    def all_to_all(self, buffer: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]) -> Work[Tensor]:
        """Start handing 1-D ``buffer`` out, ``sizes[r]`` elements to rank ``r``.

        The result is ``into``, ``sizes_into[r]`` elements of it from rank ``r``.
        """

    @abstractmethod
    def sum(self, value: Tensor) -> Work[Tensor]:
        """Start summing a few numbers, in place: to the same bits on all ranks."""

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Start filling ``rows``, each ``[size, s]`` and of one dtype, with every rank's ``own``, each ``[s]``.

        Several travel end to end in a buffer whose rows have ``row`` elements; one alone needs no buffer.
        """
        if len(own) == 1:
            keep_own(own, rows, self.rank)
            return self.all_gather(rows[0]).then(lambda _: None)
        buffer = rows[0].new_empty(self.size, row)
        numel = sum(map(Tensor.numel, own))
        lay_end_to_end(buffer[self.rank, :numel], own)
        buffer[self.rank, numel:].zero_()  # fp8 looks at whole blocks
        return self.all_gather(buffer).then(lambda _: unpack(buffer, rows))

    def exchange_rows(self, buffer: Tensor) -> Work[Tensor]:
        """Start handing row ``r`` to rank ``r``; the result, ``[size, row]``, is what the ranks have for this one."""
        sizes = [buffer.shape[1]] * self.size
        theirs = buffer.new_empty(buffer.shape)
        return self.all_to_all(buffer.view(-1), sizes, theirs.view(-1), sizes).then(lambda _: theirs)

    def held(self) -> list[Tensor]:
        """Memory that is kept from buffer to buffer."""
        return []

    def trim(self, for_good: bool = False) -> None:  # noqa: B027
        """Nothing is under way on this rank: keep no more memory than is worth it, or none."""


class Trade(NamedTuple):
    """What a rank has for the others in one collective, and how much they have for it.

    Attributes:
        kind: trades of one kind have an order of their own.
        buffer: 1-D; it must stay as it is until the trade is over.
        sizes: elements of ``buffer`` for rank 0, 1, ..., in this order; None: all of it is for each.
        coming: elements that rank 0, 1, ... has for this one.
        into: by rank, where its part is to lie afterwards; None: anywhere, until it has been read.
    """

    kind: int
    buffer: Tensor
    sizes: Sequence[int] | None
    coming: Sequence[int]
    into: Sequence[Tensor] | None = None


class HostBackend(Backend):
    """Carries the tensors of hosts, and small messages between them.

    Attributes:
        shares_memory: all ranks are processes of one host, and read what they need where it lies.
    """

    shares_memory = False

    @abstractmethod
    def trade(self, what: Trade, read: Callable[[dict[int, Tensor]], T]) -> Work[T]:
        """Start handing this rank's parts to the others, and reading theirs: what all collectives of hosts are made of.

        ``read`` makes the result of the others' parts, by rank, in turn from the rank before this one on.
        """

    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """Each rank sums its own row of all buffers, in the order of ranks."""
        own, sizes = buffer[self.rank], [buffer.shape[1]] * self.size

        def add(theirs: dict[int, Tensor]) -> Tensor:
            reuses = into is None and self.size == 2 and not self.shares_memory
            room = next(iter(theirs.values())) if reuses else into
            rows = theirs | {self.rank: own}
            return sum_rows([*map(rows.__getitem__, range(self.size))], room)

        return self.trade(Trade(REDUCE, buffer.view(-1), sizes, sizes), add)

    def all_to_all(self, buffer: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]) -> Work[Tensor]:
        """Each rank's part straight to it."""
        parts = into.split_with_sizes(list(sizes_into))
        parts[self.rank].copy_(buffer.split_with_sizes(list(sizes))[self.rank])
        return self.trade(Trade(HAND_OUT, buffer, sizes, sizes_into, parts), lambda _: into)

    def exchange(self, few: Tensor, kind: int, combine: Callable[[Tensor], T]) -> Work[T]:
        """Start telling all ranks a few numbers, as many on each; ``combine`` makes the result of everybody's, stacked.

        Those of one ``kind`` have an order of their own. Of presence maps ``done`` tells when they have come; of others
        that may only be known by waiting. ``few`` must stay as it is until then.
        """

        def read(theirs: dict[int, Tensor]) -> T:
            parts = theirs | {self.rank: few.view(-1)}
            return combine(torch.stack([*map(parts.__getitem__, range(self.size))]).view(self.size, *few.shape))

        return self.trade(Trade(kind, few.view(-1), None, [few.numel()] * self.size), read)

    def sum(self, value: Tensor) -> Work[Tensor]:
        """Everybody's, in rank order."""
        return self.exchange(value, ADDED, _SUM)

    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """As pieces, of which there is one."""
        return self.gather([buffer[self.rank]], [buffer], buffer.shape[1]).then(lambda _: buffer)

    def all_gather_object(self, mine: object) -> list[Any]:
        """Every rank's ``mine`` in rank order, pickled; in one order with agreements."""
        data = bytearray(pickle.dumps(mine))
        length = self.exchange(torch.tensor([len(data)], device="cpu"), AGREED, MAXIMUM).wait()
        data.extend(bytes(int(length) - len(data)))
        return self.exchange(torch.frombuffer(data, dtype=torch.uint8), AGREED, _unpickled).wait()


def _unpickled(parts: Tensor) -> list[Any]:
    # torch may have come without numpy
    return [pickle.loads(ctypes.string_at(part.data_ptr(), part.nbytes)) for part in parts]


class Alone(HostBackend):
    """One rank: what it has is everybody's."""

    def trade(self, what: Trade, read: Callable[[dict[int, Tensor]], T]) -> Work[T]:
        """Nobody has anything."""
        return Work(lambda: read({}), tensors=(what.buffer,))

    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """The one row."""
        return Work(lambda: buffer[0], tensors=(buffer,))

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """``buffer``."""
        return Work(lambda: buffer, tensors=(buffer,))

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """A copy, where ``own`` is one."""
        keep_own(own, rows, self.rank)
        return Work(lambda: None)
