"""The backends' interface, what they share, and the backend of one rank."""

from __future__ import annotations

import ctypes
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..flat_buffers import keep_own, lay_end_to_end, unpack
from ..work import Work

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
    """

    in_flight = 3
    limits_all_reduce = False
    all_reduce_only_reads = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def new_buffer(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer to be filled and handed to one reduction; what it holds is undefined."""
        return torch.empty(self.size, row, dtype=dtype, device=device)

    @abstractmethod
    def reduce_scatter(self, buffer: Tensor) -> Work[Tensor]:
        """Start summing; the result is this rank's row of the sum, ``[row]``."""

    @abstractmethod
    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """Start summing; the result has ``buffer``'s shape, and may be ``buffer``."""

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


class HostBackend(Backend):
    """Carries the tensors of hosts, and small messages between them.

    Attributes:
        shares_memory: all ranks are processes of one host, and read what they need where it lies.
    """

    shares_memory = False

    @abstractmethod
    def exchange(self, few: Tensor, kind: int, combine: Callable[[Tensor], T]) -> Work[T]:
        """Start telling all ranks a few numbers, as many on each; ``combine`` makes the result of everybody's, stacked.

        Those of one ``kind`` have an order of their own. Of presence maps ``done`` tells when they have come; of others
        that may only be known by waiting. ``few`` must stay as it is until then.
        """

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

    def exchange(self, few: Tensor, kind: int, combine: Callable[[Tensor], T]) -> Work[T]:
        """``few`` alone."""
        return Work(lambda: combine(few[None]), tensors=(few,))

    def reduce_scatter(self, buffer: Tensor) -> Work[Tensor]:
        """The one row."""
        return Work(lambda: buffer[0], tensors=(buffer,))

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """``buffer``."""
        return Work(lambda: buffer, tensors=(buffer,))

    def all_to_all(self, buffer: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]) -> Work[Tensor]:
        """A copy."""
        into.copy_(buffer)
        return Work(lambda: into, tensors=(into,))

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """A copy, where ``own`` is one."""
        keep_own(own, rows, self.rank)
        return Work(lambda: None)
