"""Where a bucket's reduced shard rests until the step: on the device, or, with offload, on the host.

``DeviceHome`` and ``HostHome`` make shards with the same verbs, so that nobody else asks which of the two it is. With
offload the optimizer steps on the host: shards are copied down to it (D2H) during backward, and stepped masters up
again (H2D). What is copied lies in pinned memory, where the device is another; masters and optimizer state aren't
copied, and lie in plain memory. Where parameters are on the host too, these are copies within its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..communication.flat_buffers import lay_end_to_end
from ..streams import Mark, Passed, Streams

HOST = torch.device("cpu")

# Rows on their way down, whose memory on the device isn't used again before they have arrived.
LEAVING = 2


class DeviceShard:
    """This rank's row of a reduced bucket, ``[columns]``, where the parameters are.

    Attributes:
        row: where steps are taken; a host's may be read after ``to_step`` alone.
    """

    __slots__ = ("row",)

    row: Tensor

    def hold(self, row: Tensor) -> None:
        """Take another row, which is where the parameters are."""
        self.row = row

    def hold_for_step(self, row: Tensor) -> None:
        """Take another row, which is where steps are taken."""
        self.row = row

    def fetch(self) -> Tensor:
        """The row where the parameters are; the host doesn't wait."""
        return self.row

    def fetch_part(self, part: Tensor) -> Tensor:
        """A part of ``row``, where the parameters are; the host waits, and may use the row."""
        return part

    def to_step(self) -> Tensor:
        """The row where steps are taken, complete."""
        return self.row

    def measured(self) -> Tensor:
        """What has the row's L2 norm, where the parameters are: the row itself, or its norm."""
        return self.row


class HostShard(DeviceShard):
    """A row that rests on the host; its norm is measured before it leaves the device."""

    __slots__ = ("_arrived", "_copies", "_device", "_norm")

    def __init__(self, copies: HostHome, device: torch.device) -> None:
        self._copies = copies
        self._device = device

    def hold(self, row: Tensor) -> None:
        """Start its D2H copy."""
        self._norm = _l2_norm(row)
        self.row, self._arrived = self._copies.down(row)

    def hold_for_step(self, row: Tensor) -> None:
        """It is there."""
        self.row, self._arrived = row, Passed()
        self._norm = _l2_norm(row).to(self._device)

    def fetch(self) -> Tensor:
        """Start its H2D copy; the host must leave the row alone."""
        self._arrived.wait()
        return self._copies.up(self.row, self._device)

    def fetch_part(self, part: Tensor) -> Tensor:
        """One H2D copy."""
        self._copies.wait(self._arrived)
        return self._copies.up(part, self._device, asynchronous=False)

    def to_step(self) -> Tensor:
        """The host waits for the D2H copy."""
        self._copies.wait(self._arrived)
        return self.row

    def measured(self) -> Tensor:
        """The norm, 0-d."""
        return self._norm


class DeviceHome:
    """Masters and shards are where the parameters are."""

    def shard(self, device: torch.device) -> DeviceShard:
        """One that is to be filled, of parameters on ``device``."""
        return DeviceShard()

    def own_rows(self, masters: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """What ``masters`` hold, on ``like``'s device, to be gathered in its dtype."""
        return list(masters)


class _Leaving(NamedTuple):
    row: Tensor
    arrived: Mark


class HostHome(DeviceHome):
    """Masters and shards are on the host.

    Args:
        streams: those of the device where parameters are.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._leaving: deque[_Leaving] = deque()

    def shard(self, device: torch.device) -> HostShard:
        """Its row will rest on the host."""
        return HostShard(self, device)

    def own_rows(self, masters: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """One H2D copy, in ``like``'s dtype; the masters are free again at once."""
        sizes = [master.numel() for master in masters]
        row = self._buffer(sum(sizes), like.dtype)
        lay_end_to_end(row, masters)
        return list(self.up(row, like.device).split_with_sizes(sizes))

    def down(self, row: Tensor) -> tuple[Tensor, Mark]:
        """Start copying a row to the host, beside what the current stream does next; and when that has arrived."""
        with self._streams.copies():
            host = self._copy_down(row)
            arrived = self._streams.mark()
        self._leaving.append(_Leaving(row, arrived))
        while len(self._leaving) > LEAVING:
            self._leaving[0].arrived.wait()  # so whatever gets its memory next comes after the copy
            self._leaving.popleft()
        return host, arrived

    def wait(self, arrived: Mark) -> None:
        """Let the host wait for a row. Rows arrive in the order in which they left."""
        arrived.synchronize()
        while self._leaving and self._leaving[0].arrived.query():
            self._leaving.popleft()

    @staticmethod
    def up(row: Tensor, device: torch.device, asynchronous: bool = True) -> Tensor:
        """Copy a row to a device; ``asynchronous``: beside what the host does next."""
        return torch.empty(row.shape, dtype=row.dtype, device=device).copy_(row, non_blocking=asynchronous)

    def _buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=self._streams.pins)

    def _copy_down(self, row: Tensor) -> Tensor:
        return self._buffer(row.numel(), row.dtype).copy_(row, non_blocking=True)


def _l2_norm(row: Tensor) -> Tensor:
    """0-d, fp32 at least."""
    norm: Tensor = torch.linalg.vector_norm(row, dtype=torch.promote_types(row.dtype, torch.float32))
    return norm
