"""Buckets: each packs its gradients by rank, has them reduced, and keeps what the reduction leaves until the step.

``BucketStore`` fills the buckets of one gradient sync after the other, and starts and finishes them in the plan's
order, alike on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from enum import Enum
from functools import partial
from operator import is_
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..communication.progress import About
from ..communication.shard_group import ShardGroup
from ..communication.work import Work
from ..streams import Streams
from .bucket_plan import BucketPlan, PlannedBucket
from .offload import DeviceShard
from .parameter_store import ShardedParameter
from .step_observer import StepObserver

_chunk_cat = getattr(torch, "_chunk_cat", None)


class BucketState(Enum):
    """How far a bucket has come on its way."""

    FILLING = "gradients are coming"
    REDUCING = "its buffer is being reduced"
    REDUCED = "its shard holds sums over the ranks"
    STEPPED = "its shard holds gradients that have been stepped"
    GATHERING = "so it does, and the stepped rows are being gathered"


class Reduction(NamedTuple):
    """How buckets are reduced.

    Attributes:
        group: the ranks that share the parameters.
        keeps_row_only: by a reduce-scatter, not an all-reduce.
        divisor: what gradients are divided by before they are summed.
    """

    group: ShardGroup
    keeps_row_only: bool
    divisor: float


class Bucket:
    """Parameters that are reduced together in one sync; afterwards the home of their reduced gradients.

    Attributes:
        planned: which parameters, and where in a row.
        records: of these parameters, in the row's order; one that no rank used has zeros there.
        state: how far it has come.
        missing: gradients that it still waits for.
        work: its reduction, while that is in flight.
        shard: this rank's row of the sum, ``[body]``: of the buffer's dtype after one micro-batch, fp32 at least after
            more.
        rows: all ranks' rows, ``[world_size, body]``, where they are kept (stage 1, before the step).
        scale: what the sum is to be multiplied with to be averaged and unscaled; None: as reductions leave it.
    """

    __slots__ = ("_parts", "missing", "planned", "records", "rows", "scale", "shard", "state", "work")

    shard: DeviceShard

    def __init__(self, planned: PlannedBucket, records: Sequence[ShardedParameter]) -> None:
        self.planned = planned
        self.records = records
        self.state = BucketState.FILLING
        self.missing = len(records)
        self.work: Work[Tensor] | None = None
        self.rows: Tensor | None = None
        self.scale: float | Tensor | None = None
        self._parts: dict[int, Tensor] | None = None

    # ---- its reduction ----

    def start_reduce(self, how: Reduction, streams: Streams, observer: StepObserver) -> bool:
        """Pack the gradients and start summing them over the ranks; whether all were there."""
        gradients = [record.take_gradient() for record in self.records]
        if streams.several:
            streams.borrow(gradients)
        buffer = self._in_place(gradients, how) if self.planned.in_place else None
        if buffer is None:
            buffer = self._packed(gradients, how)
        observer.packed(self.records, buffer)
        about = About(self.records, None, self.planned.position)
        start = how.group.reduce_scatter if how.keeps_row_only else how.group.all_reduce
        self.work = start(buffer, self.planned.fp8, about)
        self.state = BucketState.REDUCING
        return True not in map(partial(is_, None), gradients)

    def _in_place(self, gradients: list[Tensor | None], how: Reduction) -> Tensor | None:
        """The gradient itself as ``[world_size, row]``, where the plan and its dtype allow it.

        Only to be read: two gradients may share memory (``a.view(-1) + b.view(-1)``), which an all-reduce would
        write twice. (One rank alone gets the buffer itself back as the sum, to be written to.)
        """
        may = how.keeps_row_only and how.group.size > 1 and how.divisor == 1.0
        gradient = gradients[0] if may else None
        if gradient is None or gradient.dtype != self.records[0].communication_dtype:
            return None
        return gradient.detach().view(how.group.size, self.planned.row)

    def _packed(self, gradients: list[Tensor | None], how: Reduction) -> Tensor:
        """A fresh buffer with the gradients, and zeros for those that aren't there."""
        lead, planned = self.records[0], self.planned
        buffer = how.group.new_buffer(planned.row, lead.communication_dtype, lead.padded.device, planned.fp8)
        zero = torch.zeros((), dtype=lead.p.dtype, device=buffer.device)
        flats = [
            gradient if gradient is not None else zero.expand(record.split.numel)
            for record, gradient in zip(self.records, gradients, strict=True)
        ]
        if planned.row > planned.body:
            flats.append(zero.new_zeros(len(buffer) * (planned.row - planned.body)))
        pack(buffer, flats, how.divisor)
        return buffer

    def is_reduced(self) -> bool:
        """Whether ``finish_reduce`` would return at once."""
        assert self.work is not None, "not started"
        return self.work.done()

    def finish_reduce(self) -> Tensor:
        """The sum, when it is there: this rank's row, ``[body]``, or several ranks', ``[world_size, body]``."""
        assert self.work is not None, "not started"
        total = self.work.wait()
        self.work = None
        self.state = BucketState.REDUCED
        return (total[0] if len(total) == 1 and total.dim() > 1 else total)[..., : self.planned.body]

    # ---- what it leaves ----

    def hold(self, total: Tensor, rank: int) -> None:
        """Keep a sum: this rank's row, or all ranks', where the parameters are."""
        self.rows = total if total.dim() > 1 else None
        self._parts = None
        self.shard.hold(total if self.rows is None else total[rank])

    def hold_for_step(self, row: Tensor) -> None:
        """Keep this rank's row of gradients, averaged and unscaled, where steps are taken."""
        self.rows = self._parts = None
        self.scale = 1.0
        self.shard.hold_for_step(row)

    def sums(self) -> Tensor:
        """What ``hold`` was given, where the parameters are."""
        return self.shard.fetch() if self.rows is None else self.rows

    def split(self, row: Tensor) -> Sequence[Tensor]:
        """The records' slices in a row, or in all ranks' rows, like this one's: views."""
        return row.split_with_sizes(self.planned.sizes, dim=-1)

    def part_of(self, record: ShardedParameter) -> Tensor:
        """One record's ``g``, ``[s]``: a view of the row where steps are taken."""
        if self._parts is None:
            self._parts = dict(zip(self.planned.members, self.split(self.shard.row), strict=True))
        return self._parts[record.index]

    def working(self) -> list[ShardedParameter]:
        """The mapping p <-> p32 <-> g of this bucket: the records that a rank had a gradient for."""
        return [record for record in self.records if record.worked]


class BucketStore:
    """The buckets of the open sync, and those whose reduction is in flight.

    A sync's buckets start in the plan's order, each when all that it waits for has come, so that every rank starts the
    same ones in the same order.

    Args:
        records: the parameters, by index.
        how: how buckets are reduced.
        streams: what buckets are packed, started and finished on.
        observer: is told of each buffer.

    Attributes:
        arrivals: indices in the order in which this sync's gradients came.
        unexpected: those of them that weren't expected.
        repeats: parameters whose gradient may come more than once in a backward: their bucket waits for its end.
        late: those that came after their bucket had left, or that were left out: they wait in ``p.grad``.
        lacked: a bucket of this sync left without one of its gradients.
        travels: it is known which parameters this sync carries.
        in_flight: buckets that are being reduced, the oldest first.
        is_open: a sync is.
    """

    def __init__(
        self, records: Sequence[ShardedParameter], how: Reduction, streams: Streams, observer: StepObserver
    ) -> None:
        self._records = records
        self._how = how
        self._streams = streams
        self._observer = observer
        self._buckets: list[Bucket] = []
        self._bucket_of: Sequence[int] = ()
        self._expected: Collection[int] | None = None
        self._next = 0
        self.in_flight: deque[Bucket] = deque()
        self.repeats: set[int] = set()
        self.open_sync()
        self.is_open = False

    # ---- filling ----

    def open_sync(self, expected: Collection[int] | None = None) -> None:
        """A sync begins, in which these are expected; None: all, or nobody knows. Its buckets come by ``travel``."""
        self._expected = expected
        self.travels = False
        self.arrivals: dict[int, None] = {}
        self.unexpected: list[int] = []
        self.late: list[int] = []
        self.lacked = False
        self.is_open = True

    def travel(self, plan: BucketPlan) -> None:
        """Let these buckets travel, and wait for what is expected and hasn't come yet."""
        records = self._records
        self._buckets = [Bucket(each, [records[index] for index in each.members]) for each in plan.buckets]
        self._bucket_of = plan.bucket_of
        self.travels = True
        self._next = 0
        if self._expected is None and not self.arrivals:
            return
        for bucket in self._buckets:
            bucket.missing = 0
        for index in range(len(records)) if self._expected is None else self._expected:
            if plan.bucket_of[index] >= 0 and (index not in self.arrivals or index in self.repeats):
                self._buckets[plan.bucket_of[index]].missing += 1
        self.late = [index for index in self.arrivals if plan.bucket_of[index] < 0]

    def fill(self, record: ShardedParameter) -> bool:
        """Note a gradient; whether a bucket may start now.

        A second one of the same parameter (a weight that two nested backwards share) stays in ``p.grad``: with the
        first if the bucket hasn't started, else it is late.
        """
        index = record.index
        waited_for = index not in self.repeats
        if index in self.arrivals:
            self.repeats.add(index)
            waited_for = False
        elif self._expected is not None and index not in self._expected:
            self.unexpected.append(index)
            waited_for = False
        self.arrivals[index] = None
        if not self.travels:
            return True
        position = self._bucket_of[index]
        if position < self._next:
            self.late.append(index)
            return False
        bucket = self._buckets[position]
        bucket.missing -= waited_for
        return bucket.missing == 0

    # ---- starting, in the plan's order ----

    def start_complete(self) -> None:
        """Start the buckets that are complete, as far as the plan's order goes."""
        with self._streams.home(join=False):
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._start_next()

    def close_sync(self) -> None:
        """Backward has ended: start all that are left, complete or not."""
        if self._next < len(self._buckets):
            with self._streams.home(join=False):
                while self._next < len(self._buckets):
                    self._start_next()
        self._buckets = []
        self.is_open = False

    @torch.no_grad()  # gradients may have come with a graph of their own
    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        complete = bucket.start_reduce(self._how, self._streams, self._observer)
        self.lacked |= not complete
        self.in_flight.append(bucket)


def pack(buffer: Tensor, flats: Sequence[Tensor], divisor: float = 1.0) -> None:
    """Lay 1-D tensors side by side in ``buffer`` (``[world_size, row]``), each padded and cut into its rows.

    One multi-tensor call, whatever their number. The tensors share one dtype, which may differ from the buffer's, and
    none is empty. They are divided by ``divisor``, and left as they are: before they are cast to a dtype that couldn't
    hold them, else in the buffer.
    """
    if divisor != 1.0 and torch.promote_types(flats[0].dtype, buffer.dtype) != buffer.dtype:
        flats, divisor = torch._foreach_div(list(flats), divisor), 1.0
    if _chunk_cat is not None:
        _chunk_cat(list(flats), 0, buffer.shape[0], out=buffer)
    else:
        pack_plainly(buffer, flats)
    if divisor != 1.0:
        buffer.div_(divisor)


def pack_plainly(buffer: Tensor, flats: Sequence[Tensor]) -> None:
    """What ``pack`` does, without dividing, in public operations: for a torch without ``_chunk_cat``, and its test."""
    torch.cat([_rows(flat, buffer.shape[0]) for flat in flats], dim=1, out=buffer)


def _rows(flat: Tensor, world_size: int) -> Tensor:
    padding = -flat.numel() % world_size
    return (F.pad(flat, (0, padding)) if padding else flat).view(world_size, -1)
