"""Streams: the streams of a device on which this package works, and how they wait for each other; the host never waits.

Gradients may come on any stream: autograd runs a parameter's hook on the stream of its forward. All buffers are
packed, and their collectives started, on the *home* stream: the current one when the optimizer was made, on which the
model usually computes. (NCCL has a further stream, in the order of the stream that starts and waits for its
collectives.) Home waits for each stream that a gradient came on, and for the caller's stream, which waits for home in
turn before it may read results.

Home never waits for the latest reductions before the step: reductions are finished and summed on a stream *beside* it,
which waits for home, and which home joins when the step's gradients are to be complete. Tensors that are used beside
are kept by reference, with an event, until home has waited for the event: then home, where they were allocated, may use
their memory again, however far the host is ahead of the device. So the memory of reductions under way is bounded by
their number: before a bucket is packed, home waits for all but the last few. (FSDP2 keeps its last buffer and event
so.) Memory that was allocated beside is only used again beside, where work begins by waiting for home. Gradients may
come from any stream, and are recorded with the allocator.

A CUDA graph's capture holds its own work alone: a stream that is being captured waits for no other stream here, and no
stream waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Mark:
    """A point in a stream's work; on the host it has always been reached."""

    def wait(self) -> None:
        """Let the current stream, not the host, wait for it."""

    def synchronize(self) -> None:
        """Let the host wait for it."""

    def query(self) -> bool:
        """Whether it has been reached."""
        return True


class Streams:
    """The streams of the host: there are none, and calls run in order.

    Attributes:
        several: the device may have more than one stream.
        pins: asynchronous copies between the host and this device need pinned memory.
    """

    several = False
    pins = False

    def note_gradient_stream(self) -> None:
        """A gradient has come on the current stream."""

    def keep(self, *used: object) -> None:
        """Keep tensors that are used beside home until home has waited for that."""

    def limit(self, most: int) -> None:
        """Have home wait for all but the last ``most`` parts of the work beside it, and free what these used."""

    def keep_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the memory of gradients, of whatever stream, from being used again before home has used them."""

    def home(self, join: bool = True) -> AbstractContextManager[None]:
        """Run the body on the home stream; ``join``: the caller's stream then waits for it."""
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        """Run the body on the stream beside home, which first waits for home and the current stream."""
        return nullcontext()

    def join(self) -> None:
        """Have home and the current stream wait for the work beside home."""

    def captures(self) -> bool:
        """Return whether the current stream's work is being captured in a graph."""
        return False

    def mark(self) -> Mark:
        """Return the current stream's present point."""
        return Mark()


class DeviceStreams(Streams):
    """The streams of a device.

    Args:
        device: the device.
        api: ``torch.cuda``, or another device's module.
    """

    several = True
    pins = True

    def __init__(self, device: torch.device, api: Any) -> None:
        self._device = device
        self._api = api
        self._home = api.current_stream(device)
        self._beside: Any = None
        self._keeping: list[object] | None = None  # used by the body of ``beside`` that runs now
        self._kept: deque[tuple[Any, list[object]]] = deque()  # used by earlier bodies, with events at their ends
        self._producers: dict[Any, None] = {}
        self._others_seen = False

    def note_gradient_stream(self) -> None:
        """Have home wait for the current stream when it next works."""
        stream = self.current()
        if stream != self._home:
            self._producers[stream] = None
            self._others_seen = True

    def keep(self, *used: object) -> None:
        """Keep references: the allocator would wait for events that a host which is far ahead hasn't seen yet."""
        if self._keeping is not None:
            self._keeping += used

    def limit(self, most: int) -> None:
        """Have home wait, in the order in which tensors were kept."""
        while len(self._kept) > most:
            end, _ = self._kept.popleft()
            self._home.wait_event(end)

    def keep_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Record the gradients with the allocator if any came on another stream than home."""
        if self._others_seen:
            for gradient in gradients:
                if gradient is not None and gradient.device == self._device:
                    gradient.record_stream(self.current())

    def home(self, join: bool = True) -> AbstractContextManager[None]:
        """Run the body on home, which first waits for the current stream and those of gradients."""
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
        """Run the body on a stream that is used for nothing else."""
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
        """Have both wait, if there was any work beside home."""
        if self._beside is not None:
            for stream in {self._home, self.current()}:
                stream.wait_stream(self._beside)
            self._kept.clear()

    def captures(self) -> bool:
        """Ask the device's module; one that has no such function has no graphs."""
        return hasattr(self._api, "is_current_stream_capturing") and self._api.is_current_stream_capturing()

    def mark(self) -> Mark:
        """Record an event."""
        return _DeviceMark(self, self._recorded(self.current()))

    def _recorded(self, stream: Any) -> Any:
        """Return an event at the end of the stream's present work."""
        event = self._api.Event()
        event.record(stream)
        return event

    def current(self) -> Any:
        """Return the device's current stream, whichever device is the current one."""
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
    """Return the streams of the first of ``devices`` that isn't the host."""
    device = next((device for device in devices if device.type != "cpu"), None)
    return of_host() if device is None else DeviceStreams(device, torch.get_device_module(device))
