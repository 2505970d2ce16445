"""Work: a collective that is under way, as every backend returns it; and chains: one starts when another is done.

The second collective of a chain starts whatever this rank is at then: others wait for its part. On a device a stream
sees to that, on the host a thread, in the order in which the first ones were started.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from ..streams import Streams

# How long threads may take to finish what peers may never do their part of.
_SECONDS_AT_EXIT = 10.0

S = TypeVar("S")
T = TypeVar("T")


@dataclass(slots=True)
class Work(Generic[T]):
    """A collective that is under way.

    Attributes:
        wait: returns the result, once. On CUDA the current stream waits for it, not the host.
        done: whether ``wait`` would return at once, as far as can be told.
        tensors: what it reads and writes; kept alive here until the result is taken.
    """

    wait: Callable[[], T]
    done: Callable[[], bool] = lambda: True
    tensors: tuple[Tensor, ...] = ()

    def then(self, act: Callable[[T], S]) -> Work[S]:
        """What ``act`` makes of the result, when it is waited for."""
        return Work(lambda: act(self.wait()), self.done, self.tensors)


# ---- chains ----


class Chain(Protocol):
    """Starts what comes second after what came first."""

    def after(self, first: Work[S], start: Callable[[S], Work[T]]) -> Work[T]:
        """Start a collective with the first one's result; second ones start in the order of these calls."""

    def behind(self, first: Work[S], start: Callable[[S], Work[T]]) -> Work[T]:
        """The same on a group that isn't to be kept waiting for the first one: see ``go_on``."""

    def go_on(self) -> None:
        """What one waits for has been started on that group, or nothing comes there for now: start what is ``behind``.

        All ranks call it at the same points of their collectives.
        """


class OnStream:
    """A stream of its own waits for the first, and the second starts from there.

    Args:
        streams: of the buffers' device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._behind: Callable[[], None] | None = None

    def after(self, first: Work[S], start: Callable[[S], Work[T]]) -> Work[T]:
        """At once, as far as the host can tell."""
        with self._streams.beside():
            second = start(first.wait())
        return Work(second.wait, second.done, (*first.tensors, *second.tensors))

    def behind(self, first: Work[S], start: Callable[[S], Work[T]]) -> Work[T]:
        """At ``go_on``: what a group of ranks is given on a device it does in this order, and waits where one waits."""
        second: list[Work[T]] = []
        self._behind = lambda: second.append(self.after(first, start))
        return Work(lambda: second[0].wait(), lambda: bool(second) and second[0].done(), first.tensors)

    def go_on(self) -> None:
        """One is behind at most."""
        start, self._behind = self._behind, None
        if start is not None:
            start()


class OnThread:
    """A thread waits for the first and starts the second. It ends when this object is gone and all has started."""

    def __init__(self) -> None:
        self._tasks: _Tasks = SimpleQueue()
        self._thread: Thread | None = None

    def after(self, first: Work[S], start: Callable[[S], Work[T]]) -> Work[T]:
        """One task after the other; an error is raised by the result's ``wait``."""
        if self._thread is None:
            self._thread = Thread(target=_run, args=(self._tasks,), name="lowlevel_zero chaining", daemon=True)
            self._thread.start()
            join_at_exit(self._thread, self._tasks)
            finalize(self, self._tasks.put, None).atexit = False
        second: Future[Work[T]] = Future()
        self._tasks.put(partial(_carry_on, first, start, second))
        return Work(lambda: second.result().wait(), partial(_is_done, second), first.tensors)

    behind = after  # each kind of message has an order of its own

    def go_on(self) -> None:
        """Nothing is behind."""


_Tasks: TypeAlias = "SimpleQueue[Callable[[], None] | None]"
_to_join: WeakKeyDictionary[Thread, SimpleQueue[Any]] = WeakKeyDictionary()


def join_at_exit(thread: Thread, tasks: SimpleQueue[Any]) -> None:
    """Before the interpreter goes, tell ``thread`` so by None in ``tasks``, and let it finish."""
    _to_join[thread] = tasks


@atexit.register
def _join_threads() -> None:
    """One that came back from a wait, or out of a store, afterwards would abort the process."""
    deadline = monotonic() + _SECONDS_AT_EXIT
    for tasks in _to_join.values():
        tasks.put(None)
    for thread in list(_to_join):
        thread.join(max(0.0, deadline - monotonic()))


@torch.no_grad()
def _run(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # which may hold the object that this thread ends with


def _carry_on(first: Work[S], start: Callable[[S], Work[T]], second: Future[Work[T]]) -> None:
    try:
        second.set_result(start(first.wait()))
    except BaseException as error:  # whatever it is, who waits for the second one raises it
        second.set_exception(error)


def _is_done(second: Future[Work[T]]) -> bool:
    return second.done() and (second.exception() is not None or second.result().done())
