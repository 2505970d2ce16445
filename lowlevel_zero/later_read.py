"""LaterRead: a device's number for the host, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


class LaterRead:
    """A number on a device, copied to the host without waiting for it, to be read when it has long been there.

    Args:
        value: one element.
    """

    __slots__ = ("_event", "_value")

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._value = value
        if value.is_cuda:
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> float:
        """The number; waits for the copy alone."""
        if self._event is not None:
            self._event.synchronize()
        return self._value.item()
