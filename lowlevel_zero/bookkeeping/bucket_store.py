"""The bucket store: packs gradients into bucket buffers by rank, and starts and finishes their reduction."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..communication.collectives import ShardGroup
from ..communication.progress import About
from ..communication.transport import Pending, then
from ..streams import Streams
from .bucket_plan import Bucket
from .gradient_store import GradientStore
from .parameter_store import ShardedParameter
from .step_observer import StepObserver
from .wire import pack


class Reduced(NamedTuple):
    """A bucket whose reduction is done.

    Attributes:
        row: this rank's row of the sum, ``[row]``.
        rows: all ranks', ``[world_size, row]``, where they are kept.
    """

    bucket: Bucket
    row: Tensor
    rows: Tensor | None = None


class BucketStore:
    """Buckets on their way: packed, reduced in the order of starting, and handed on.

    Args:
        records: the parameters, by index.
        group: the ranks that share them.
        keeps_row_only: reduce-scatter, not all-reduce.
        streams: what buckets are packed, started and finished on.
        divisor: what gradients are divided by before they are summed.
        gradients: takes what a reduction leaves.
        observer: is told of each buffer.
    """

    def __init__(
        self,
        records: Sequence[ShardedParameter],
        group: ShardGroup,
        keeps_row_only: bool,
        streams: Streams,
        divisor: float,
        gradients: GradientStore,
        observer: StepObserver,
    ) -> None:
        self._records = records
        self._group = group
        self._keeps_row_only = keeps_row_only
        self._streams = streams
        self._divisor = divisor
        self._gradients = gradients
        self._in_flight: deque[Pending[Reduced]] = deque()
        self._observer = observer

    # ---- finishing, in the order of starting ----

    def finish(self, leave: int = 0) -> None:
        """Wait for the oldest reductions until at most ``leave`` are in flight."""
        while len(self._in_flight) > leave:
            self._finish_oldest()

    def finish_done(self) -> None:
        """Take in the oldest reductions as far as nobody waits for them."""
        while self._in_flight and self._in_flight[0].done():
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        with self._streams.home(join=False):
            self._gradients.add(*self._in_flight.popleft().wait())

    def under_way(self) -> list[Pending[Reduced]]:
        """The reductions in flight."""
        return list(self._in_flight)

    # ---- starting one bucket ----

    @torch.no_grad()  # gradients may have come with a graph of their own
    def start(self, bucket: Bucket) -> int:
        """Pack a bucket's gradients and start its reduction; how many there were."""
        with self._streams.home(join=False):
            return self._start_at_home(bucket)

    def _start_at_home(self, bucket: Bucket) -> int:
        gradients = [self._records[index].take_gradient() for index in bucket.members]
        self._streams.borrow(gradients)
        wire = self._in_place(bucket, gradients)
        if wire is None:
            wire = self._packed(bucket, gradients)
        self._observer.packed([self._records[index] for index in bucket.members], wire)
        self._in_flight.append(self._reduction(bucket, wire))
        return sum([gradient is not None for gradient in gradients])

    def _reduction(self, bucket: Bucket, wire: Tensor) -> Pending[Reduced]:
        about = About(self._records, bucket.members, bucket.position)
        if self._keeps_row_only:
            return then(self._group.reduce_scatter(wire, bucket.fp8, about), partial(Reduced, bucket))
        return then(self._group.all_reduce(wire, bucket.fp8, about), partial(self._whole, bucket))

    def _whole(self, bucket: Bucket, rows: Tensor) -> Reduced:
        """What an all-reduce left, which is kept: whoever asks for a whole gradient gets it."""
        return Reduced(bucket, rows[self._group.rank], rows if self._group.size > 1 else None)

    def _in_place(self, bucket: Bucket, gradients: list[Tensor | None]) -> Tensor | None:
        """The gradient itself as ``[world_size, row]``, where the plan and its dtype allow it.

        Only to be read: two gradients may share memory (``a.view(-1) + b.view(-1)``), which an all-reduce would
        write twice. (One rank alone gets the buffer itself back as the sum, to be written to.)
        """
        may = bucket.in_place and self._keeps_row_only and self._group.size > 1 and self._divisor == 1.0
        gradient = gradients[0] if may else None
        if gradient is None or gradient.dtype != self._records[bucket.members[0]].wire_dtype:
            return None
        return gradient.detach().view(self._group.size, bucket.row)

    def _packed(self, bucket: Bucket, gradients: list[Tensor | None]) -> Tensor:
        """A fresh buffer with the gradients, and zeros for those that aren't there."""
        lead = self._records[bucket.members[0]]
        wire = self._group.new_wire(bucket.row, lead.wire_dtype, lead.padded.device, bucket.fp8)
        zero = torch.zeros((), dtype=lead.p.dtype, device=wire.device)
        flats = [
            gradient if gradient is not None else zero.expand(self._records[index].split.numel)
            for index, gradient in zip(bucket.members, gradients, strict=True)
        ]
        if bucket.row > bucket.body:
            flats.append(zero.new_zeros(len(wire) * (bucket.row - bucket.body)))
        pack(wire, flats, self._divisor)
        return wire
