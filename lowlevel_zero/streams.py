"""Streams: on which of a device's streams this package works, and who waits for whom; the host never does.

Gradients may come on any stream: autograd runs a parameter's hook on the stream of its forward. All buffers are packed
and started on one, the *home* stream: the one that was current when the optimizer was made, on which the model computes
as a rule. (NCCL works on a stream of its own beside it, in the order of the stream that starts and waits for it.) Home
waits for every stream that a gradient came on, and for whoever calls; who calls waits for home before it goes on where
it may look at results.

Home never waits for the latest reductions before the step: reductions are finished and summed on a stream *beside* it,
which waits for home, and which home joins when the step's gradients are to be complete. What that stream uses is kept
by reference, with an event at its end, until home has waited for it: then home, where it was allocated, may use its
memory again, however far the host is ahead of the device. So memory of reductions under way is bounded by their
number: before a bucket is packed, home waits for all but the last few. (FSDP2 keeps its last buffer and event so.)
What was allocated beside home is only used again beside it, which begins by waiting for home. Gradients alone may come
from any stream, and are told to the allocator.

A CUDA graph that somebody captures is to hold its own work: a stream that is being captured waits for nobody here, and
nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Mark:
    """A point in a stream's work; the host's own, which has been reached by the time there is one."""

    def wait(self) -> None:
        """Let the current stream, not the host, wait for it."""

    def synchronize(self) -> None:
        """Let the host wait for it."""

    def query(self) -> bool:
        """Whether it has been reached."""
        return True


class Streams:
    """The host's: what is called is done, in the order of calls.

    Attributes:
        several: there may be more than one.
        pins: what travels to and from this device asynchronously lies in pinned memory.
    """

    several = False
    pins = False

    def note_gradient_stream(self) -> None:
        """A gradient has come on the current stream."""

    def keep(self, *used: object) -> None:
        """Keep what the stream beside home uses, until home has waited for it."""

    def limit(self, most: int) -> None:
        """Have home wait for what is done beside it, but for the last ``most`` parts, and let go of what they used."""

    def keep_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the memory of gradients, which have come on any stream, from being used again before home is done."""

    def home(self, join: bool = True) -> AbstractContextManager[None]:
        """Work on the home stream; ``join``: what the caller's stream does afterwards, it does after that work."""
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        """Work on a stream beside home, from where that and the current one are now."""
        return nullcontext()

    def join(self) -> None:
        """Have the current stream wait for what has been done beside it."""

    def captures(self) -> bool:
        """Whether a graph of the current stream's work is being captured."""
        return False

    def mark(self) -> Mark:
        """Where the current stream is now."""
        return Mark()


class DeviceStreams(Streams):
    """A device's.

    Args:
        device: the device.
        api: ``torch.cuda``, or what is like it.
    """

    several = True
    pins = True

    def __init__(self, device: torch.device, api: Any) -> None:
        self._device = device
        self._api = api
        self._home = api.current_stream(device)
        self._beside: Any = None
        self._keeping: list[object] | None = None  # what is used beside home by what is being told; None: it is over
        self._kept: deque[tuple[Any, list[object]]] = deque()  # the same of what has been told, and its end
        self._producers: dict[Any, None] = {}
        self._others_seen = False

    def note_gradient_stream(self) -> None:
        """Have home wait for the current stream when it next works."""
        stream = self.current()
        if stream != self._home:
            self._producers[stream] = None
            self._others_seen = True

    def keep(self, *used: object) -> None:
        """By reference: the allocator would wait for events that a host which is far ahead hasn't seen yet."""
        if self._keeping is not None:
            self._keeping += used

    def limit(self, most: int) -> None:
        """In the order in which they were kept."""
        while len(self._kept) > most:
            end, _ = self._kept.popleft()
            self._home.wait_event(end)

    def keep_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Tell the allocator; where there is but home, it knows."""
        if self._others_seen:
            for gradient in gradients:
                if gradient is not None and gradient.device == self._device:
                    gradient.record_stream(self.current())

    def home(self, join: bool = True) -> AbstractContextManager[None]:
        """The home stream, after the current one and those of gradients."""
        current = self.current()
        if current == self._home and not self._producers:
            return nullcontext()
        return self._on_home(current, join)

    @contextmanager
    def _on_home(self, caller: Any, join: bool) -> Iterator[None]:
        apart = caller == self._home or self.captures()
        for stream in (*([] if apart else [caller]), *self._producers):
            if stream != self._home:
                self._home.wait_stream(stream)
        self._producers.clear()
        with self._api.stream(self._home):
            yield
        if join and not apart:
            caller.wait_stream(self._home)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A stream of its own."""
        if self._keeping is not None:  # within what is done there
            yield
            return
        if self._beside is None:
            self._beside = self._api.Stream(self._device)
        for stream in {self._home, self.current()}:
            self._beside.wait_stream(stream)
        kept: list[object] = []
        self._keeping = kept
        try:
            with self._api.stream(self._beside):
                yield
        finally:
            self._keeping = None
            if kept:
                self._kept.append((self._recorded(self._beside), kept))

    def join(self) -> None:
        """The current stream waits, if there was anything, and home does."""
        if self._beside is not None:
            for stream in {self._home, self.current()}:
                stream.wait_stream(self._beside)
            self._kept.clear()

    def captures(self) -> bool:
        """As ``torch.cuda`` tells; a device that doesn't has no graphs."""
        return hasattr(self._api, "is_current_stream_capturing") and self._api.is_current_stream_capturing()

    def mark(self) -> Mark:
        """An event."""
        return _DeviceMark(self, self._recorded(self.current()))

    def _recorded(self, stream: Any) -> Any:
        """Return an event that is over when what the stream has been given by now is."""
        event = self._api.Event()
        event.record(stream)
        return event

    def current(self) -> Any:
        """The device's current stream, whichever device is the current one."""
        return self._api.current_stream(self._device)


class _DeviceMark(Mark):
    def __init__(self, streams: DeviceStreams, event: Any) -> None:
        self._streams = streams
        self.event = event

    def wait(self) -> None:
        if not self._streams.captures():
            self._streams.current().wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()

    def query(self) -> bool:
        return not self._streams.captures() and bool(self.event.query())


# The host's; a simulation of a device on the host's tensors has others.
of_host: Callable[[], Streams] = Streams


def streams_of(devices: Iterable[torch.device]) -> Streams:
    """The streams of the first of ``devices`` that isn't the host."""
    device = next((device for device in devices if device.type != "cpu"), None)
    return of_host() if device is None else DeviceStreams(device, torch.get_device_module(device))
