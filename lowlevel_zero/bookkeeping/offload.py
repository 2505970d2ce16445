"""Offload: the optimizer on the host: rows of gradients go down to it during backward, stepped rows come up again.

What travels lies in pinned memory, where the device is another; masters and optimizer state don't travel, and lie in
plain memory. On the host everything happens just so, and "up" and "down" are copies within its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..streams import Mark, Streams

HOST = torch.device("cpu")

# Rows on their way down, whose memory on the device isn't used again before they have arrived.
LEAVING = 2


class Landing(NamedTuple):
    """A row that is on its way to the host, or has arrived.

    Attributes:
        row: on the host; to be read there once ``arrived`` is.
        arrived: when it is there.
    """

    row: Tensor
    arrived: Mark


class _Leaving(NamedTuple):
    row: Tensor
    arrived: Mark


class Offload:
    """Brings rows to the host and back.

    Args:
        device: where parameters are.
        streams: the device's.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._leaving: deque[_Leaving] = deque()

    def down(self, row: Tensor) -> Landing:
        """Start copying a row to the host, beside what the current stream does next."""
        host = self._buffer(row.numel(), row.dtype)
        with self._streams.copies():
            host.copy_(row, non_blocking=True)
            arrived = self._streams.mark()
        self._leaving.append(_Leaving(row, arrived))
        while len(self._leaving) > LEAVING:
            self._leaving[0].arrived.wait()  # so whatever gets its memory next comes after the copy
            self._leaving.popleft()
        return Landing(host, arrived)

    def wait(self, landing: Landing) -> None:
        """Let the host wait for a row. Rows arrive in the order in which they left."""
        landing.arrived.synchronize()
        while self._leaving and self._leaving[0].arrived.query():
            self._leaving.popleft()

    def fetch(self, landing: Landing) -> Tensor:
        """A row that was brought down, on the device again; the host doesn't wait, and must leave the row alone."""
        landing.arrived.wait()
        return self._up(landing.row)

    def fetch_part(self, landing: Landing, part: Tensor) -> Tensor:
        """A part of a row that was brought down, on the device again; the host waits, and may use the row."""
        self.wait(landing)
        return part.to(self._device, copy=True)

    def lift(self, masters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """What stepped ``masters`` hold, cast and brought to the device in one copy; they are free again at once."""
        sizes = [master.numel() for master in masters]
        row = self._buffer(sum(sizes), dtype)
        torch._foreach_copy_(row.split_with_sizes(sizes), list(masters))
        return list(self._up(row).split_with_sizes(sizes))

    def _buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=self._streams.pins)

    def _up(self, row: Tensor) -> Tensor:
        return torch.empty(row.shape, dtype=row.dtype, device=self._device).copy_(row, non_blocking=True)
