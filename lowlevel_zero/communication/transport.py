"""Transports: interchangeable ways of bringing wires to other ranks; here the interface, and the backend's own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

# torch 2.13 renames the two and warns on the old names.
_RENAMED = hasattr(dist, "reduce_scatter_single")
_reduce_scatter_single = getattr(dist, "reduce_scatter_single" if _RENAMED else "reduce_scatter_tensor")
_all_gather_single = getattr(dist, "all_gather_single" if _RENAMED else "all_gather_into_tensor")

# Elements of a tensor that are copied faster than the copy is set up.
_TINY = 4096

S = TypeVar("S")
T = TypeVar("T")


class Pending(Generic[T]):
    """A collective that is under way: its work handles, its tensors, and how they become the result.

    Attributes:
        tensors: what the collective reads and writes; kept alive here until the result is taken.
    """

    __slots__ = ("_around", "_done", "_finish", "_works", "tensors")

    def __init__(
        self,
        works: Sequence[dist.Work],
        tensors: tuple[Tensor, ...],
        finish: Callable[[], T],
        done: Callable[[], bool] | None = None,
    ) -> None:
        self._works = works
        self._finish = finish
        self._done = done
        self._around: Callable[[Callable[[], T]], T] | None = None
        self.tensors = tensors

    def done(self) -> bool:
        """Whether ``wait`` would return at once, as far as can be told."""
        return all(work.is_completed() for work in self._works) if self._done is None else self._done()

    def within(self, around: Callable[[Callable[[], T]], T]) -> Pending[T]:
        """Have ``around`` do the waiting: it is given what waits, and returns what that returns."""
        self._around = around
        return self

    def wait(self) -> T:
        """The result, once. On CUDA the current stream waits, not the host."""
        return self._take() if self._around is None else self._around(self._take)

    def _take(self) -> T:
        for work in self._works:
            work.wait()
        return self._finish()

    def unclaimed(self) -> Pending[None]:
        """What keeps the collective going, and no more, when nobody will take its result."""
        return Pending(self._works, self.tensors, _nothing, self._done)


class Transport(ABC):
    """Carries wires, ``[size, row]`` and contiguous, between the ranks of one group.

    Every rank starts the same reductions in the same order, and the same gathers.

    Attributes:
        rank: this process's rank in the group.
        size: ranks in the group.
        in_flight: reductions that are worth having under way: enough to keep the network busy, few enough for stage
            2's memory, since each holds a wire.
        keeps_wires: an all-reduced wire is kept as the sum, or what takes as much: it may as well be under way.
    """

    in_flight = 3
    keeps_wires = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def new_wire(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A wire to be filled and handed to one reduction; what it holds is undefined."""
        return torch.empty(self.size, row, dtype=dtype, device=device)

    @abstractmethod
    def reduce_scatter(self, wire: Tensor) -> Pending[Tensor]:
        """Start summing; the result is this rank's row, ``[row]``. ``wire`` must stay as it is until then."""

    @abstractmethod
    def all_reduce(self, wire: Tensor) -> Pending[Tensor]:
        """Start summing; the result has ``wire``'s shape, and may be ``wire``."""

    @abstractmethod
    def all_gather(self, wire: Tensor) -> Pending[Tensor]:
        """Start filling ``wire``, of which every rank gives its own row; in place."""

    @abstractmethod
    def all_to_all(
        self, wire: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]
    ) -> Pending[Tensor]:
        """Start handing 1-D ``wire`` out, ``sizes[r]`` elements to rank ``r``; ``into`` is filled so by the others.

        The result is ``into``, ``sizes_into[r]`` elements of it from rank ``r``; both must stay as they are until then.
        """

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Pending[None]:
        """Start filling ``rows``, each ``[size, s]`` and of one dtype, with every rank's ``own``, each ``[s]``.

        Several travel end to end in a wire whose rows have ``row`` elements; one alone needs no wire.
        """
        if len(own) == 1:
            keep_own(own, rows, self.rank)
            return then(self.all_gather(rows[0]), lambda wire: None)
        wire = rows[0].new_empty(self.size, row)
        numel = sum(each.numel() for each in own)
        lay_end_to_end(wire[self.rank, :numel], own)
        wire[self.rank, numel:].zero_()  # fp8 looks at whole blocks
        return then(self.all_gather(wire), lambda wire: unpack(wire, rows))

    def held(self) -> list[Tensor]:
        """Memory that is kept from wire to wire."""
        return []

    def rest(self, for_good: bool = False) -> None:  # noqa: B027
        """Nothing is under way on this rank: keep no more memory than is worth it, or none."""


class Direct(Transport):
    """Between the ranks of one group: what other transports are made of.

    Attributes:
        orders_gathers_apart: a gather may start at any time between the same two others; else also between the same
            two reductions, on all ranks.
    """

    orders_gathers_apart = False

    @abstractmethod
    def swap(self, wire: Tensor) -> Pending[Tensor]:
        """Start handing row ``j`` to rank ``j``; the result, ``[size, row]``, is what the ranks have for this one.

        In one order with reductions, of which it is a part. ``wire`` must stay as it is until then.
        """


class HostTransport(Direct):
    """Between hosts, whose tensors these are.

    Attributes:
        shares_memory: all ranks are processes of one host, and read what they need where it lies.
    """

    shares_memory = False

    @abstractmethod
    def exchange_few(self, few: Tensor, kind: int) -> Pending[list[Tensor]]:
        """Start telling all ranks a few numbers (1-D), as many on each; the result is everybody's, in rank order.

        Those of one ``kind`` have an order of their own. ``few`` must stay as it is until the result is there.
        """

    def noticed(self, pending: Pending[T]) -> Pending[T]:
        """One that is ``done`` when it is; as it comes, that of another may only be known by waiting for it."""
        return pending


class Alone(HostTransport):
    """One rank: what it has is everybody's."""

    def exchange_few(self, few: Tensor, kind: int) -> Pending[list[Tensor]]:
        """``few``."""
        return Pending((), (few,), lambda: [few])

    def swap(self, wire: Tensor) -> Pending[Tensor]:
        """``wire``."""
        return Pending((), (wire,), lambda: wire)

    def reduce_scatter(self, wire: Tensor) -> Pending[Tensor]:
        """The one row."""
        return Pending((), (wire,), lambda: wire[0])

    def all_reduce(self, wire: Tensor) -> Pending[Tensor]:
        """``wire``."""
        return Pending((), (wire,), lambda: wire)

    def all_gather(self, wire: Tensor) -> Pending[Tensor]:
        """``wire``."""
        return Pending((), (wire,), lambda: wire)

    def all_to_all(
        self, wire: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]
    ) -> Pending[Tensor]:
        """A copy."""
        into.copy_(wire)
        return Pending((), (into,), lambda: into)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Pending[None]:
        """A copy, where ``own`` is one."""
        keep_own(own, rows, self.rank)
        return Pending((), (), lambda: None)


class Native(Direct):
    """The backend's own collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group

    def swap(self, wire: Tensor) -> Pending[Tensor]:
        """As bytes, since gloo doesn't swap all dtypes."""
        theirs = torch.empty_like(wire)
        work = dist.all_to_all_single(_bytes(theirs), _bytes(wire), group=self._group, async_op=True)
        return Pending((cast(dist.Work, work),), (wire, theirs), lambda: theirs)

    def reduce_scatter(self, wire: Tensor) -> Pending[Tensor]:
        """One collective into a fresh row."""
        row = wire.new_empty(wire.shape[1])
        work = _reduce_scatter_single(row, wire.view(-1), group=self._group, async_op=True)
        return Pending((work,), (wire, row), lambda: row)

    def all_reduce(self, wire: Tensor) -> Pending[Tensor]:
        """In place."""
        work = dist.all_reduce(wire, group=self._group, async_op=True)
        return Pending((cast(dist.Work, work),), (wire,), lambda: wire)

    def all_gather(self, wire: Tensor) -> Pending[Tensor]:
        """In place."""
        work = _all_gather_single(wire.view(-1), wire[self.rank], group=self._group, async_op=True)
        return Pending((work,), (wire,), lambda: wire)

    def all_to_all(
        self, wire: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]
    ) -> Pending[Tensor]:
        """One collective."""
        work = dist.all_to_all_single(into, wire, list(sizes_into), list(sizes), group=self._group, async_op=True)
        return Pending((cast(dist.Work, work),), (wire, into), lambda: into)


class SumsInFp32(Native):
    """The backend's own, but for reduce-scatters of 16-bit wires: each rank sums in fp32 what the others hand it.

    As many bytes travel, and no sum is rounded more than once. (Megatron's way.)
    """

    def reduce_scatter(self, wire: Tensor) -> Pending[Tensor]:
        """A swap, and a sum that is rounded to the wire's dtype."""
        if wire.element_size() > 2:
            return super().reduce_scatter(wire)
        return then(self.swap(wire), lambda theirs: sum_rows_in_fp32(theirs, theirs.dtype))


def sum_rows_in_fp32(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of ``[size, row]`` over the first dimension, then rounded to ``dtype``; at any size in one call."""
    return rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)).to(dtype)


def in_rows(tensor: Tensor, rows: int) -> Tensor:
    """The elements as ``[rows, -1]``, with zeros behind them; the tensor's own memory where it needs none."""
    short = -tensor.numel() % rows
    return (F.pad(tensor.flatten(), (0, short)) if short else tensor).view(rows, -1)


def unpack(wire: Tensor, rows: Sequence[Tensor]) -> None:
    """Copy the columns of ``wire`` (``[size, row]``) out into ``rows``, each ``[size, s]``: one multi-tensor call."""
    sizes = [each.shape[1] for each in rows]
    torch.split_with_sizes_copy(wire[:, : sum(sizes)], sizes, dim=1, out=list(rows))


def lay_end_to_end(into: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy 1-D ``pieces`` of one dtype into ``into``, cast to its dtype."""
    if pieces[0].dtype == into.dtype:
        torch.cat(list(pieces), out=into)
    elif into.numel() < _TINY * len(pieces):
        end_to_end = pieces[0].new_empty(into.numel())
        torch.cat(list(pieces), out=end_to_end)  # where there is no ``out`` a surrounding autocast has a say
        into.copy_(end_to_end)  # one more pass, but not several microseconds a piece
    else:
        torch._foreach_copy_(into.split_with_sizes([piece.numel() for piece in pieces]), list(pieces))


def keep_own(own: Sequence[Tensor], rows: Sequence[Tensor], rank: int) -> None:
    """Copy ``own`` into their rows of ``rows``, unless they are those rows."""
    if own[0].data_ptr() != rows[0][rank].data_ptr():
        torch._foreach_copy_([each[rank] for each in rows], list(own))


def _nothing() -> None:
    pass


def then(pending: Pending[S], act: Callable[[S], T]) -> Pending[T]:
    """What ``act`` makes of the result, when it is waited for."""
    return Pending((), pending.tensors, lambda: act(pending.wait()), pending.done)


def _bytes(wire: Tensor) -> Tensor:
    return wire.view(-1).view(torch.uint8)
