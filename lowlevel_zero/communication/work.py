"""Work: a collective that is under way, as every backend returns it; and chains: one starts when another is done.

The second collective of a chain starts whatever this rank is at then: others wait for its part. On a device a stream
sees to that, on the host a thread, in the order in which the first ones were started.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from ..streams import Streams
from .runtime import Threads, runtime

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
    """A thread waits for the first and starts the second. It ends when this object is gone and all has started.

    Args:
        threads: those of which it is one.
    """

    def __init__(self, threads: Threads) -> None:
        self._worker = runtime().worker("lowlevel_zero chaining", threads)

    def after(self, first: Work[S], start: Callable[[S], Work[T]]) -> Work[T]:
        """One task after the other; an error is raised by the result's ``wait``."""
        second = self._worker.submit(lambda: start(first.wait()))
        return Work(lambda: second.result().wait(), partial(_is_done, second), first.tensors)

    behind = after  # each kind of message has an order of its own

    def go_on(self) -> None:
        """Nothing is behind."""


def _is_done(second: Future[Work[T]]) -> bool:
    return second.done() and (second.exception() is not None or second.result().done())
