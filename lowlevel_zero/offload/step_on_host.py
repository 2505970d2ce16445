"""Stepping on the host, which holds masters, their state and the reduced rows of buckets.

Shards are copied down (D2H) during backward, and stepped masters up again (H2D). What is copied lies in
pinned memory, where the device is another; masters and optimizer state aren't copied, and lie in plain memory. Where
parameters are on the host too, these are copies within its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..bookkeeping.bucket_plan import PlannedBucket
from ..bookkeeping.bucket_store import Bucket, StepOnDevice
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..communication.flat_buffers import lay_end_to_end
from ..streams import Mark, Streams

HOST = torch.device("cpu")


class HostBucket(Bucket):
    """A bucket whose row is copied to the host whenever ``hold`` gets it; its norm is measured on the device before."""

    _arrived: Mark
    _norm: Tensor

    def __init__(self, copies: StepOnHost, planned: PlannedBucket, records: Sequence[ShardedParameter]) -> None:
        super().__init__(planned, records)
        self._copies = copies
        self._device = records[0].padded.device

    def hold(self, total: Tensor) -> None:
        """Keep a reduced sum, measure the norm of this rank's row, and start moving that row to the host."""
        super().hold(total)
        dtype = torch.promote_types(self.row.dtype, torch.float32)
        self._norm = torch.linalg.vector_norm(self.row, dtype=dtype)
        self.row, self._arrived = self._copies.down(self.row)

    @property
    def measured(self) -> Tensor:
        """Return the row's L2 norm, 0-d and fp32 at least, on the parameters' device."""
        return self._norm

    def sums(self) -> Tensor:
        """Return all rows if kept, else start copying the row to the parameters' device; don't write it meanwhile."""
        if self.rows is not None:
            return self.rows
        self._arrived.wait()
        return self._copies.up(self.row, self._device)

    def fetch(self, part: Tensor) -> Tensor:
        """Copy ``part`` of the row to the parameters' device, wait for the copy, and return it."""
        self._arrived.synchronize()
        return self._copies.up(part, self._device, asynchronous=False)

    def to_step(self) -> Tensor:
        """Wait for the D2H copy, release the rows on the device, and return the row on the host."""
        self.rows = None
        self._arrived.synchronize()
        return self.row


class StepOnHost(StepOnDevice):
    """Keeps masters and reduced rows on the host, and steps them there."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def new_bucket(self, planned: PlannedBucket, records: Sequence[ShardedParameter]) -> Bucket:
        """Return a bucket of ``records`` whose row is copied to the host."""
        return HostBucket(self, planned, records)

    def own_rows(self, masters: Sequence[Tensor], like: Tensor) -> Sequence[Tensor]:
        """Return the masters in ``like``'s dtype on its device, by one H2D copy; masters may be overwritten at once."""
        sizes = [master.numel() for master in masters]
        row = self._buffer(sum(sizes), like.dtype)
        lay_end_to_end(row, masters)
        return self.up(row, like.device).split_with_sizes(sizes)

    def down(self, row: Tensor) -> tuple[Tensor, Mark]:
        """Start copying a row to the host on a side stream, and return the copy and a mark of its end."""
        with self._streams.beside():
            host = self._copy_down(row)
            self._streams.keep(row)
            return host, self._streams.mark()

    @staticmethod
    def up(row: Tensor, device: torch.device, asynchronous: bool = True) -> Tensor:
        """Copy a row to a device and return it; with ``asynchronous`` the host doesn't wait."""
        return torch.empty(row.shape, dtype=row.dtype, device=device).copy_(row, non_blocking=asynchronous)

    def _buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=self._streams.pins)

    def _copy_down(self, row: Tensor) -> Tensor:
        return self._buffer(row.numel(), row.dtype).copy_(row, non_blocking=True)
