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

from ..communication.transport import lay_end_to_end
from ..streams import Mark, Streams

HOST = torch.device("cpu")

# Rows on their way down, whose memory on the device isn't used again before they have arrived.
LEAVING = 2


class Landing(NamedTuple):
    """A row that is on its way to the host, or has arrived.

    Attributes:
        row: on the host; to be read there once it has arrived.
        arrived: when that is.
        device: where it comes from.
    """

    row: Tensor
    arrived: Mark
    device: torch.device


class _Leaving(NamedTuple):
    row: Tensor
    arrived: Mark


class Offload:
    """Brings rows to the host and back.

    Args:
        streams: those of the device where parameters are.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._leaving: deque[_Leaving] = deque()

    def down(self, row: Tensor) -> Landing:
        """Start copying a row to the host, beside what the current stream does next."""
        with self._streams.copies():
            host = self._copy_down(row)
            arrived = self._streams.mark()
        self._leaving.append(_Leaving(row, arrived))
        while len(self._leaving) > LEAVING:
            self._leaving[0].arrived.wait()  # so whatever gets its memory next comes after the copy
            self._leaving.popleft()
        return Landing(host, arrived, row.device)

    def wait(self, landing: Landing) -> None:
        """Let the host wait for a row. Rows arrive in the order in which they left."""
        landing.arrived.synchronize()
        while self._leaving and self._leaving[0].arrived.query():
            self._leaving.popleft()

    def fetch(self, landing: Landing) -> Tensor:
        """A row that was brought down, on the device again; the host doesn't wait, and must leave the row alone."""
        landing.arrived.wait()
        return self._up(landing.row, landing.device)

    def fetch_part(self, landing: Landing, part: Tensor) -> Tensor:
        """A part of a row that was brought down, on the device again; the host waits, and may use the row."""
        self.wait(landing)
        return self._up(part, landing.device, asynchronous=False)

    def lift(self, masters: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """What ``masters`` hold, in ``like``'s dtype and on its device, by one copy; they are free again at once."""
        sizes = [master.numel() for master in masters]
        row = self._buffer(sum(sizes), like.dtype)
        lay_end_to_end(row, masters)
        return list(self._up(row, like.device).split_with_sizes(sizes))

    def _buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=self._streams.pins)

    def _copy_down(self, row: Tensor) -> Tensor:
        return self._buffer(row.numel(), row.dtype).copy_(row, non_blocking=True)

    @staticmethod
    def _up(row: Tensor, device: torch.device, asynchronous: bool = True) -> Tensor:
        return torch.empty(row.shape, dtype=row.dtype, device=device).copy_(row, non_blocking=asynchronous)
