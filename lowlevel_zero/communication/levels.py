"""Levels: wires that are reduced and gathered over two groups in turn, so that little crosses the outer one.

Ranks form a grid, ``[outer, inner]``: an inner group is near, all on one host say, and an outer one joins those that
have the same place in theirs. A reduction first scatters the wire over the inner group; what is left, ``1 / inner`` of
it, crosses the outer one. (The idea is that of hierarchical all-reduce, as in Horovod, and of PyTorch's hybrid FSDP.)

::

    Nested: slices over both levels                 Replicated: slices over the inner level
    wire [inner * outer, row]                       wire [inner, row]
      inner reduce-scatter -> [outer, row]            inner reduce-scatter -> [row]
      outer reduce-scatter -> [row]                   outer all-reduce     -> [row]

A slice's number is ``inner * outer_size + outer``: so what the outer level wants of a wire lies in one piece.

The second level starts when the first is done, whatever this rank is at: others may be waiting for its part. On a
device a stream sees to that, on the host a thread, in the order in which first levels were started.
"""

from __future__ import annotations

import atexit
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from ..streams import Streams
from .transport import Pending, Transport, then

# How long a thread may take to finish what peers may never do their part of.
_SECONDS_AT_EXIT = 10.0

S = TypeVar("S")
T = TypeVar("T")


class Sequel(Protocol):
    """Has what comes second done after what came first, and nobody wait for it."""

    def after(self, first: Pending[S], start: Callable[[S], Pending[T]]) -> Pending[T]:
        """Start a collective with the first one's result; sequels start in the order of these calls."""


class OnStream:
    """A stream of its own waits for the first, and the second starts from there.

    Args:
        streams: of the wires' device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def after(self, first: Pending[S], start: Callable[[S], Pending[T]]) -> Pending[T]:
        """At once, as far as the host can tell."""
        with self._streams.copies():
            second = start(first.wait())
        return Pending((), (*first.tensors, *second.tensors), second.wait, second.done)


class OnThread:
    """A thread waits for the first and starts the second. It ends when this object is gone and all has started."""

    def __init__(self) -> None:
        self._tasks: _Tasks = SimpleQueue()
        self._thread: Thread | None = None

    def after(self, first: Pending[S], start: Callable[[S], Pending[T]]) -> Pending[T]:
        """One task after the other; an error is raised by the result's ``wait``."""
        if self._thread is None:
            self._thread = Thread(target=_work, args=(self._tasks,), name="lowlevel_zero levels", daemon=True)
            self._thread.start()
            _at_work[self._thread] = self._tasks
            finalize(self, self._tasks.put, None).atexit = False
        second: Future[Pending[T]] = Future()
        self._tasks.put(partial(_carry_on, first, start, second))
        return Pending((), first.tensors, lambda: second.result().wait(), partial(_is_done, second))


_Tasks: TypeAlias = "SimpleQueue[Callable[[], None] | None]"
_at_work: WeakKeyDictionary[Thread, _Tasks] = WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """Let threads finish before the interpreter goes: one that came back from a wait afterwards would abort it."""
    for tasks in _at_work.values():
        tasks.put(None)
    for thread in list(_at_work):
        thread.join(_SECONDS_AT_EXIT)


@torch.no_grad()
def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()


def _carry_on(first: Pending[S], start: Callable[[S], Pending[T]], second: Future[Pending[T]]) -> None:
    try:
        second.set_result(start(first.wait()))
    except BaseException as error:
        second.set_exception(error)


def _is_done(second: Future[Pending[T]]) -> bool:
    return second.done() and (second.exception() is not None or second.result().done())


class Levels(Transport):
    """Wires over a grid of ranks.

    Args:
        outer: brings wires across inner groups.
        inner: brings wires within one.
        sequel: orders the two.
        rank: of the slices that parameters are cut into, this process's.
        size: how many there are.
    """

    def __init__(self, outer: Transport, inner: Transport, sequel: Sequel, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._outer = outer
        self._inner = inner
        self._sequel = sequel
        self.in_flight = inner.in_flight

    def new_wire(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where the inner level wants it."""
        wire = self._inner.new_wire(self.size // self._inner.size * row, dtype, device)
        return wire.view(self.size, row)

    def reduce_scatter(self, wire: Tensor) -> Pending[Tensor]:
        """A block of rows within, then across."""
        return self._sequel.after(self._inner.reduce_scatter(self._blocks(wire)), self._reduce_across)

    @abstractmethod
    def _reduce_across(self, block: Tensor) -> Pending[Tensor]:
        """From the sum of this rank's block over the inner group to the sum of its row over all."""

    def all_reduce(self, wire: Tensor) -> Pending[Tensor]:
        """A block within, across, and all blocks within again; the sum is a new tensor."""
        block = self._sequel.after(self._inner.reduce_scatter(self._blocks(wire)), self._outer.all_reduce)
        return self._sequel.after(block, partial(self._spread, like=wire))

    def _spread(self, block: Tensor, like: Tensor) -> Pending[Tensor]:
        whole = torch.empty_like(like)
        return then(self._inner.gather([block], [self._blocks(whole)], block.numel()), lambda _: whole)

    def _blocks(self, wire: Tensor) -> Tensor:
        """``[inner, rows of one inner rank]``."""
        return wire.view(self._inner.size, -1)


class Nested(Levels):
    """Each rank of the grid has a slice of its own.

    Args:
        straight: brings what is for one rank alone straight to it, over a group of all ranks.
        places: of who has slice 0, 1, 2, ... in that group.
    """

    def __init__(
        self,
        outer: Transport,
        inner: Transport,
        sequel: Sequel,
        rank: int,
        size: int,
        straight: Transport,
        places: Sequence[int],
    ) -> None:
        super().__init__(outer, inner, sequel, rank, size)
        self._straight = straight
        self._by_place = sorted(range(size), key=places.__getitem__)

    def _reduce_across(self, block: Tensor) -> Pending[Tensor]:
        return self._outer.reduce_scatter(block.view(self._outer.size, -1))

    def all_gather(self, wire: Tensor) -> Pending[Tensor]:
        """The rows of this rank's block across, then all blocks within."""
        blocks = self._blocks(wire)
        block = blocks[self._inner.rank].view(self._outer.size, -1)

        def spread(_: None) -> Pending[Tensor]:
            return then(self._inner.gather([block.view(-1)], [blocks], block.numel()), lambda _: wire)

        return self._sequel.after(self._outer.gather([wire[self.rank]], [block], wire.shape[1]), spread)

    def all_to_all(
        self, wire: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]
    ) -> Pending[Tensor]:
        """Straight: nothing of it becomes less on the way over a third rank."""
        parts, parts_into = wire.split_with_sizes(list(sizes)), into.split_with_sizes(list(sizes_into))
        leaving = torch.cat([parts[number] for number in self._by_place], out=torch.empty_like(wire))
        sizes_by_place = [[each[number] for number in self._by_place] for each in (sizes, sizes_into)]
        coming = self._straight.all_to_all(leaving, sizes_by_place[0], torch.empty_like(into), sizes_by_place[1])

        def renumber(come: Tensor) -> Tensor:
            for number, part in zip(self._by_place, come.split_with_sizes(sizes_by_place[1]), strict=True):
                parts_into[number].copy_(part)
            return into

        return then(coming, renumber)


class Replicated(Levels):
    """Inner groups have the same slices."""

    def _reduce_across(self, block: Tensor) -> Pending[Tensor]:
        return self._outer.all_reduce(block)

    def all_gather(self, wire: Tensor) -> Pending[Tensor]:
        """Within: what another inner group has is the same."""
        return self._inner.all_gather(wire)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Pending[None]:
        """Within."""
        return self._inner.gather(own, rows, row)

    def all_to_all(
        self, wire: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]
    ) -> Pending[Tensor]:
        """Within: each inner group does the same."""
        return self._inner.all_to_all(wire, sizes, into, sizes_into)
