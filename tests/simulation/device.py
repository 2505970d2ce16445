"""A device's streams, simulated on the host's tensors: what is called beside home is done later.

On a device nobody waits for a collective but a stream. Here the home stream is the rank's own thread, which does what
is called at once and waits where it waits. What is called ``beside()`` it only takes shape at once: its operators are
put into a queue, as are its waits for collectives, and are carried out in order when home joins, when a collective
needs what they make, or when the seed says so. Who reads a result without a join, or overwrites what is still to be
read, gets wrong numbers, as on a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowlevel_zero.streams import Mark, Streams

from .network import Network
from .pending import Pending, apart

_EAGER = 0.5  # how likely a stream does what it can as soon as it has been told


class SimulatedStreams(Streams):
    """Home, and one stream beside it."""

    several = True

    def __init__(self, network: Network) -> None:
        self._network = network
        self._queue: deque[Callable[[], object] | Pending] = deque()
        self._done = 0

    @property
    def end(self) -> int:
        """How many things it has been told to do."""
        return self._done + len(self._queue)

    @property
    def reached(self) -> int:
        """How many of them it has done."""
        return self._done

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Put what is called into the queue."""
        actor = self._network.scheduler.running
        assert actor is not None
        before, actor.stream = actor.stream, self
        if before is not None and before is not self:
            self.add(_Joined(before, before.end))
        try:
            with _Recording(self):
                yield
        finally:
            actor.stream = before
        if before is None and self._network.scheduler.random() < _EAGER:
            while self._queue and self.is_ready(self._done + 1, {}):
                self.advance(self._done + 1)

    def join(self) -> None:
        """Return when all has been done; beside home a stream joins itself."""
        actor = self._network.scheduler.running
        if self._queue and (actor is None or actor.stream is not self):
            end = self.end
            self._network.scheduler.wait(lambda: self.is_ready(end, {}))
            self.advance(end)

    def mark(self) -> Mark:
        """Where the current stream is now."""
        actor = self._network.scheduler.running
        return _Reached(self._network, self, self.end) if actor is not None and actor.stream is self else Mark()

    def add(self, step: Callable[[], object] | Pending) -> None:
        """One more thing to do; of what is pending: to wait for it."""
        self._queue.append(step)

    def is_ready(self, position: int, asked: dict[int, bool]) -> bool:
        """Whether nothing of what comes before ``position`` waits for another rank."""
        steps = list(self._queue)[: max(0, position - self._done)]
        return all(step.is_ready(asked) for step in steps if isinstance(step, Pending))

    def advance(self, position: int) -> None:
        """Do what comes before ``position``."""
        while self._done < position:
            step = self._queue.popleft()
            self._done += 1
            if isinstance(step, Pending):
                step.finish()
            else:
                with apart():
                    step()


class _Joined(Pending):
    """Another stream, up to where it is now."""

    def __init__(self, stream: SimulatedStreams, position: int) -> None:
        self._stream, self._position = stream, position

    def is_ready(self, asked: dict[int, bool]) -> bool:
        return self._stream.is_ready(self._position, asked)

    def finish(self) -> None:
        self._stream.advance(self._position)


class _Reached(Mark):
    """A point in a stream beside home."""

    def __init__(self, network: Network, stream: SimulatedStreams, position: int) -> None:
        self._network, self._stream, self._position = network, stream, position

    def wait(self) -> None:
        """Home waits where the host does."""
        actor = self._network.scheduler.running
        if actor is None or actor.stream is None:
            self.synchronize()
        elif actor.stream is not self._stream:
            actor.stream.add(_Joined(self._stream, self._position))

    def synchronize(self) -> None:
        """Return when the stream has come so far."""
        if not self.query():
            self._network.scheduler.wait(lambda: self._stream.is_ready(self._position, {}))
            self._stream.advance(self._position)

    def query(self) -> bool:
        """Whether the stream has come so far."""
        return self._stream.reached >= self._position


class _Recording(TorchDispatchMode):
    """Puts operators into a stream's queue. Results have their memory and shapes at once, and their values later."""

    def __init__(self, stream: SimulatedStreams) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call what is but a view or fresh memory, and what tells the host something; put off all else."""
        kwargs = dict(kwargs or {})
        args = tuple(list(each) if isinstance(each, list) else each for each in args)
        if "empty" in func.name() or not any(map(_has_tensors, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._stream.add(partial(func, *args, **kwargs))
            return _returned(func, args, kwargs)
        results = func(*args, **kwargs)  # of garbage; whoever needs a number of it waits for the stream before
        if func.is_view and (not isinstance(results, Tensor) or _share_memory(results, args[0])):
            return results  # and not a copy, which ``to`` returns of another dtype
        if not _has_tensors(results):
            raise NotImplementedError(f"{func} on a stream beside home tells the host something, which would wait")
        self._stream.add(partial(_fill, results, func, args, kwargs))
        return results


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensors, value)))


def _fill(results: Any, func: Any, args: Any, kwargs: Any) -> None:
    values = func(*args, **kwargs)
    if isinstance(results, Tensor):
        results.copy_(values)
    else:
        for result, value in zip(results, values, strict=True):
            result.copy_(value)


def _returned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments that a call writes to and returns."""
    schema = func._schema
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
    written = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    results = [given[name] for name in written[: len(schema.returns)]]
    return None if not results else results[0] if len(results) == 1 else tuple(results)
