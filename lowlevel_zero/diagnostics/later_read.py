"""LaterRead: a device's number for the host, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..streams import streams_of


class LaterRead:
    """A number on a device, copied to the host without waiting for it, to be read when it has long been there.

    Args:
        value: one element.
    """

    __slots__ = ("_arrived", "_value")

    def __init__(self, value: Tensor) -> None:
        streams = streams_of([value.device])
        self._value = value
        if streams.pins:
            self._value = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
        self._arrived = streams.mark()  # on the stream of the value's device, whichever is the current one

    def read(self) -> float:
        """The number; waits for the copy alone."""
        self._arrived.synchronize()
        return self._value.item()
