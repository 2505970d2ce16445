"""Work: a collective under way; and chains, which start a second collective with the result of a first one.

The second collective starts without this rank's main thread, since other ranks wait for its part: on a device a stream
sees to that, for messages a thread, in the order in which the first ones were started. Through shared memory the ranks
start second collectives whenever they ask for a result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from threading import get_ident
from typing import Any, Generic, TypeAlias, TypeVar

from torch import Tensor

from ..streams import streams_of
from .runtime import Threads, carry_out, runtime

S = TypeVar("S")
T = TypeVar("T")


@dataclass(slots=True)
class Work(Generic[T]):
    """A collective that is under way; its result is taken once.

    Attributes:
        wait: returns the result, once. On a device the current stream waits for it, not the host.
        ready: returns whether ``wait`` would return without blocking the host; on a device always true.
        tensors: the tensors that it reads and writes; kept alive here until the result is taken.
    """

    wait: Callable[[], T]
    ready: Callable[[], bool] = lambda: True
    tensors: tuple[Tensor, ...] = ()

    def then(self, act: Callable[[T], S]) -> Work[S]:
        """Return a work whose ``wait`` applies ``act`` to this one's result."""
        return Work(lambda: act(self.wait()), self.ready, self.tensors)


class TransportError(RuntimeError):
    """Raised when another rank's part of a collective doesn't come."""


class PeerError(TransportError):
    """Raised when a message to another rank, or from it, fails.

    Attributes:
        rank: the other rank's global one.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class OnStream:
    """A chain that starts second collectives at once, on a side stream of the device, which waits for the first."""

    def __init__(self) -> None:
        self._streams = cache(lambda device: streams_of([device]))

    def after(self, first: Work[S], start: Callable[[S], Work[T]], instead: Callable[[], S]) -> Work[T]:
        """Start the second collective now, on the side stream, which waits for the first; the host doesn't wait."""
        with self._streams(first.tensors[0].device).beside():
            second = _started(first, start, instead)
        return Work(second.wait, second.ready, (*first.tensors, *second.tensors))


class OnDemand:
    """A chain that starts due second collectives whenever a result is asked for; no thread takes a core from ranks."""

    def __init__(self) -> None:
        self._lock = runtime().lock()
        self._starting = 0  # the thread that starts collectives
        self._waiting: deque[tuple[Work[Any], Callable[[], None]]] = deque()

    def after(self, first: Work[S], start: Callable[[S], Work[T]], instead: Callable[[], S]) -> Work[T]:
        """Return a work that starts the second collective in its ``ready`` or ``wait``, in the order of calls."""
        second: Future[Work[T]] = Future()
        self._waiting.append((first, partial(carry_out, partial(_started, first, start, instead), second)))

        def wait() -> T:
            if self._starting == get_ident():
                raise RuntimeError(
                    "expected no collective in a __del__ or weakref.finalize callback, got one while this thread "
                    "started a reduction: free what runs that callback before the backward"
                )
            with self._lock:
                self._start_due(second)
            return second.result().wait()

        def ready() -> bool:
            if not second.done() and self._lock.acquire(blocking=False):
                try:
                    self._start_due()
                finally:
                    self._lock.release()
            return _is_ready(second)

        return Work(wait, ready, first.tensors)

    def _start_due(self, last: Future[Any] | None = None) -> None:
        """Start, in order, second collectives whose first is over; and all up to ``last``, waiting for them."""
        self._starting = get_ident()
        try:
            while self._waiting and (self._waiting[0][0].ready() or not (last is None or last.done())):
                self._waiting.popleft()[1]()
        finally:
            self._starting = 0


class OnThread:
    """A chain whose thread, one of ``threads``, waits for first collectives and starts second ones, in order."""

    def __init__(self, threads: Threads) -> None:
        self._worker = runtime().worker("lowlevel_zero chaining", threads)

    def after(self, first: Work[S], start: Callable[[S], Work[T]], instead: Callable[[], S]) -> Work[T]:
        """Let the thread wait for the first collective and start the second; ``wait`` raises an error of either."""
        second = self._worker.submit(partial(_started, first, start, instead))
        return Work(lambda: second.result().wait(), partial(_is_ready, second), first.tensors)


Chain: TypeAlias = OnStream | OnDemand | OnThread


def _started(first: Work[S], start: Callable[[S], Work[T]], instead: Callable[[], S]) -> Work[T]:
    """Wait for ``first``, and start a second collective with its result, or with ``instead()`` if it fails here.

    If starting fails, it is tried once more. Other ranks wait for the second collective, unless the first one failed
    for want of their part. ``wait`` of the returned work raises the first error.
    """
    failed: list[RuntimeError] = []
    try:
        result = first.wait()
    except TransportError:
        raise
    except RuntimeError as error:
        failed.append(error)
        result = instead()
    try:
        second = start(result)
    except RuntimeError as error:
        failed.append(error)
        second = start(result)

    def checked(end: T) -> T:
        for error in failed:
            raise error
        return end

    return second.then(checked) if failed else second


def _is_ready(second: Future[Work[T]]) -> bool:
    return second.done() and (second.exception() is not None or second.result().ready())
