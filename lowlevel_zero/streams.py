"""Streams: the device streams on which this package works, and how they wait for each other.

Gradients may come on any stream: autograd runs a parameter's hook on the stream of its forward. All buffers are
packed, and their collectives started, on the *home* stream: the current one when the optimizer was made, on which the
model usually computes. (NCCL has a further stream, in the order of the stream that starts and waits for its
collectives.) Home waits for each stream that a gradient came on, and for the caller's stream, which waits for home in
turn before it may read results.

Home never waits for the latest reductions before the step: reductions are finished and summed on a stream *beside* it,
which waits for home, and which home joins when the step's gradients are to be complete. Tensors that are used beside
are kept by reference, with an event, until home, where they were allocated, has waited for the event. Before a bucket
is packed, home waits for all but the last few, which bounds the memory of reductions under way. Memory that was
allocated beside is only used again beside, where work begins by waiting for home. Gradients may come from any stream,
and are recorded with the allocator.

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
    """A point in a stream's work; on the host every point has been reached."""

    def wait(self) -> None:
        """Make the current stream wait for the point; the host doesn't wait."""

    def synchronize(self) -> None:
        """Make the host wait for the point."""

    def query(self) -> bool:
        """Return whether the point has been reached: on the host always."""
        return True


class Streams:
    """The streams of the host, which has none: every call does nothing."""

    several = False  # the device may have more than one stream
    pins = False  # asynchronous copies between the host and this device need pinned memory

    def note_gradient_stream(self) -> None:
        """Note that a gradient has come on the current stream, for which home waits when it next works."""

    def keep(self, *used: object) -> None:
        """Keep references to tensors that the running body of ``beside`` uses, until home has waited for it."""

    def limit(self, most: int) -> None:
        """Make the home stream wait for work beside home until ``most`` parts are left, and release their tensors."""

    def keep_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the memory of gradients from being reused before home has used them."""

    def home(self, join: bool = True) -> AbstractContextManager[None]:
        """Return a context that runs its body on the home stream: on the host, a context that does nothing."""
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        """Return a context for the stream beside home, which waits for home: on the host it does nothing."""
        return nullcontext()

    def join(self) -> None:
        """Make home and the current stream wait for the work beside home."""

    def release_memory(self) -> None:
        """Give the device back what its allocator keeps for later use."""

    def captures(self) -> bool:
        """Return whether a graph captures the current stream: on the host never."""
        return False

    def mark(self) -> Mark:
        """Return the current point of the current stream."""
        return Mark()


class DeviceStreams(Streams):
    """Orders work on a device's streams: the home stream, one beside home, and the streams of gradients.

    ``api``: ``torch.cuda``, or another device's module. Methods without a docstring have that of ``Streams``.
    """

    several = True
    pins = True

    def __init__(self, device: torch.device, api: Any) -> None:
        self._device = device
        self._number = device if device.index is None else device.index  # which torch looks up in a third of the time
        self._api = api
        self._home: Any = self.current()
        handle = getattr(torch._C, "_cuda_getCurrentRawStream", None) if device.type == "cuda" else None
        self._handle_of = None if device.index is None else handle  # takes a fifth of the time of ``current``
        self._beside: Any = None
        self._keeping: list[object] | None = None  # used by the body of ``beside`` that runs now
        self._kept: deque[tuple[Any, list[object]]] = deque()  # used by earlier bodies, with events at their ends
        self._producers: dict[Any, None] = {}
        self._others_seen = False

    def note_gradient_stream(self) -> None:
        if self._handle_of is not None and self._handle_of(self._number) == self._home.cuda_stream:
            return
        stream = self.current()
        if stream != self._home:
            self._producers[stream] = None
            self._others_seen = True

    def keep(self, *used: object) -> None:
        if self._keeping is not None:
            self._keeping += used

    def limit(self, most: int) -> None:
        while len(self._kept) > most:
            end, _ = self._kept.popleft()
            self._home.wait_event(end)

    def keep_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Record gradients with the allocator if any came on another stream than home."""
        if self._others_seen:
            for gradient in gradients:
                if gradient is not None and gradient.device == self._device:
                    gradient.record_stream(self.current())

    def home(self, join: bool = True) -> AbstractContextManager[None]:
        """Return a context on home, after the current and gradients' streams; if ``join``, the current waits for it."""
        current = self.current()
        if current == self._home and not self._producers:
            return nullcontext()
        return self._on_home(current, join)

    @contextmanager
    def _on_home(self, caller: Any, join: bool) -> Iterator[None]:
        """Run the body on home, after ``caller`` and gradients' streams; if ``join``, ``caller`` waits for home."""
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
        """Run the body on the stream beside home, after home and the current stream; nested calls stay there."""
        if self._keeping is not None:  # called by code that runs beside already
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
        if self._beside is not None:
            for stream in {self._home, self.current()}:
                stream.wait_stream(self._beside)
            self._kept.clear()

    def release_memory(self) -> None:
        self._api.empty_cache()

    def captures(self) -> bool:
        return hasattr(self._api, "is_current_stream_capturing") and self._api.is_current_stream_capturing()

    def mark(self) -> Mark:
        """Record an event on the current stream, and return it as a mark."""
        return _DeviceMark(self, self._recorded(self.current()))

    def _recorded(self, stream: Any) -> Any:
        """Record an event on ``stream``, and return it."""
        event = self._api.Event()
        event.record(stream)
        return event

    def current(self) -> torch.Stream:
        """Return the device's current stream, whichever device is the current one."""
        stream: torch.Stream = self._api.current_stream(self._number)
        return stream


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
    """Return the streams of the first of ``devices`` that isn't the host; the host's if there is none."""
    device = next((device for device in devices if device.type != "cpu"), None)
    return of_host() if device is None else DeviceStreams(device, torch.get_device_module(device))
