"""Streams: on which of a device's streams this package works, and who waits for whom; the host never does.

Gradients may come on any stream: autograd runs a parameter's hook on the stream of its forward. All buffers are
packed, started, finished and summed on one, the *home* stream: the one that was current when the optimizer was made,
which is usually the only one there is. (NCCL works on a stream of its own beside it, in the order of the stream that
starts and waits for it.) Home waits for every stream that a gradient came on, and for whoever calls; who calls waits
for home before it goes on where it may look at results. So memory of ours is used in one order, and can be let go of at
any time; a gradient of another stream's memory is kept from being used again before home has read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

    def produced(self) -> None:
        """A gradient has come on the current stream."""

    def borrow(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the memory of ``gradients`` from being used again, once they are let go of, before home has read it."""

    def home(self, join: bool = True) -> AbstractContextManager[None]:
        """Work on the home stream; ``join``: what the caller's stream does afterwards, it does after that work."""
        return nullcontext()

    def copies(self) -> AbstractContextManager[None]:
        """Copy on a stream beside the current one, from where that is now."""
        return nullcontext()

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
        self._copies: Any = None
        self._producers: dict[Any, None] = {}
        self._others_seen = False

    def produced(self) -> None:
        """Have home wait for the current stream when it next works."""
        stream = self.current()
        if stream != self._home:
            self._producers[stream] = None
            self._others_seen = True

    def borrow(self, gradients: Sequence[Tensor | None]) -> None:
        """Tell the allocator that home uses them; where there is but home, it knows."""
        if self._others_seen:
            for gradient in gradients:
                if gradient is not None and gradient.device == self._device:
                    gradient.record_stream(self._home)

    def home(self, join: bool = True) -> AbstractContextManager[None]:
        """The home stream, after the current one and those of gradients."""
        current = self.current()
        if current == self._home and not self._producers:
            return nullcontext()
        return self._on_home(current, join)

    @contextmanager
    def _on_home(self, caller: Any, join: bool) -> Iterator[None]:
        for stream in (caller, *self._producers):
            if stream != self._home:
                self._home.wait_stream(stream)
        self._producers.clear()
        with self._api.stream(self._home):
            yield
        if join and caller != self._home:
            caller.wait_stream(self._home)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """A stream of its own."""
        if self._copies is None:
            self._copies = self._api.Stream(self._device)
        self._copies.wait_stream(self.current())
        with self._api.stream(self._copies):
            yield

    def mark(self) -> Mark:
        """An event."""
        event = self._api.Event()
        event.record(self.current())
        return _DeviceMark(self, event)

    def current(self) -> Any:
        """The device's current stream, whichever device is the current one."""
        return self._api.current_stream(self._device)


class _DeviceMark(Mark):
    def __init__(self, streams: DeviceStreams, event: Any) -> None:
        self._streams = streams
        self.event = event

    def wait(self) -> None:
        self._streams.current().wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()

    def query(self) -> bool:
        return bool(self.event.query())


def streams_of(devices: Iterable[torch.device]) -> Streams:
    """The streams of the first of ``devices`` that isn't the host."""
    device = next((device for device in devices if device.type != "cpu"), None)
    return Streams() if device is None else DeviceStreams(device, torch.get_device_module(device))
