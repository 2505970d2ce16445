"""Buckets: each packs its gradients by rank, reduces them, and keeps the reduced row until the step.

``BucketStore`` fills the buckets of one gradient sync after the other, and starts and finishes them in the plan's
order, alike on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_not
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..communication.progress import About
from ..communication.shard_group import ShardGroup
from ..communication.work import Work
from ..streams import Streams
from .bucket_plan import BucketPlan, PlannedBucket
from .sharded_parameter import ShardedParameter
from .shown_gradients import drop_unreduced, note_waiting, take_gradients
from .step_state import StepState

# Called with the parameters of a bucket and its buffer, when the buffer is about to be reduced.
Packed: TypeAlias = Callable[[Sequence[ShardedParameter], Tensor], None]


class Reduction(NamedTuple):
    """The settings of a shard group's reductions."""

    group: ShardGroup  # the ranks that share the parameters
    keeps_row_only: bool  # by a reduce-scatter, not an all-reduce
    divisor: float  # divides gradients before they are summed
    streams: Streams  # what buckets are packed, started and finished on
    packed: Packed  # is called with each buffer
    under_way: int  # reductions that a device may have under way when a bucket is packed


class Bucket:
    """Parameters that are reduced together in one sync, and then this rank's row of their reduced gradients.

    Here the optimizer steps where the parameters are; a ``HostBucket`` (``offload/``) keeps its row on the host.
    """

    work: Work[Tensor]  # the reduction, while it is under way
    # This rank's row of the sum, ``[body]``, where steps are taken: in the buffer's dtype after one micro-batch,
    # in fp32 at least after more. A host's may be read after ``to_step`` alone.
    row: Tensor

    def __init__(self, planned: PlannedBucket, records: Sequence[ShardedParameter]) -> None:
        self.planned = planned
        self.records = records  # in the row's order; one that no rank used has zeros there
        self.started = False  # its buffer is being reduced, or has been
        self.stepped = False  # a step has used what it holds
        self.reused = False  # and a later backward has added to it
        self.missing = len(records)  # gradients that it still waits for
        self.rows: Tensor | None = None  # all ranks' rows, ``[world_size, body]``, in stage 1 before the step
        self.scale: float | Tensor | None = None  # makes the sum averaged and unscaled; None: a fresh reduction's
        self.empty: set[int] = set()  # parameters whose sum is zeros on all ranks: dropped, or no rank had one
        # Their gradients were dropped while this was the last reduction under way: their sums are dropped behind it.
        self.dropped_next: list[ShardedParameter] = []

    # ---- its reduction ----

    def start_reduce(self, reduction: Reduction, arrivals: Collection[int]) -> bool:
        """Take gradients out of ``p.grad``, pack them, and start the sum; return whether all came. Communicates."""
        gradients = take_gradients(self.records, arrivals)
        if reduction.streams.several:
            reduction.streams.keep_gradients(gradients)
        first, lead = gradients[0], self.records[0]
        # Only to be read: two gradients may share memory (``a.view(-1) + b.view(-1)``), which would be written twice.
        # (One rank alone gets the buffer itself back as the sum, to be written to.)
        may = self.planned.in_place and reduction.group.size > 1 and reduction.divisor == 1.0
        if not reduction.keeps_row_only or lead.split.owner is not None:
            may = may and reduction.group.backend(lead.padded.device, self.planned.fp8).all_reduce_only_reads
        if may and first is not None and first.dtype == lead.communication_dtype:
            buffer = first.detach().view(lead.split.rows, self.planned.row)
        else:
            buffer = self._packed(gradients, reduction)
        reduction.packed(self.records, buffer)
        about = About(self.records, self.planned.position)
        start = partial(lead.split.reduce, reduction.group) if reduction.keeps_row_only else reduction.group.all_reduce
        self.work = start(buffer, self.planned.fp8, about)
        self.started = True
        return all(map(partial(is_not, None), gradients))

    def _packed(self, gradients: list[Tensor | None], reduction: Reduction) -> Tensor:
        """Return a new buffer with the gradients divided by ``divisor``, and zeros in place of missing ones."""
        lead, planned = self.records[0], self.planned
        where = lead.communication_dtype, lead.padded.device
        buffer = reduction.group.new_buffer(planned.row, *where, planned.fp8, lead.split.rows)
        zero = torch.zeros((), dtype=lead.p.dtype, device=buffer.device)
        flats = []
        for record, gradient in zip(self.records, gradients, strict=True):
            flat = zero.expand(record.split.numel) if gradient is None else gradient
            # ``pack`` would cut rows that are narrower than the slices.
            flats.append(F.pad(flat, (0, record.short)) if record.short else flat)
        if planned.row > planned.body:
            flats.append(zero.new_zeros(len(buffer) * (planned.row - planned.body)))
        pack(buffer, flats, reduction.divisor)
        return buffer

    def finish_reduce(self, streams: Streams) -> Tensor:
        """Wait for the reduction, and return this rank's row, ``[body]``, or all rows, ``[world_size, body]``."""
        work = self.work
        del self.work  # and what it keeps alive
        total = work.wait()
        if streams.several:
            streams.keep(work, total)
        alone = total.dim() > 1 and self.records[0].split.world_size == 1
        return (total[0] if alone else total)[..., : self.planned.body]

    # ---- the reduced row ----

    def hold(self, total: Tensor) -> None:
        """Keep a reduced sum on the parameters' device: this rank's row, or all rows."""
        self.rows, self.row = (total, self.own_row(total)) if total.dim() > 1 else (None, total)
        self.stepped = False

    def own_row(self, rows: Tensor) -> Tensor:
        """Return a view of this rank's row of ``rows``, ``[body]``; ``[0]`` if another rank owns the bucket."""
        return self.records[0].split.own_row(rows, self.records[0].rank)

    @property
    def measured(self) -> Tensor:
        """Return a tensor on the parameters' device that has the row's L2 norm: the row itself, or its norm."""
        return self.row

    def sums(self) -> Tensor:
        """Return the sums that ``hold`` kept, on the parameters' device; the host doesn't wait."""
        return self.row if self.rows is None else self.rows

    def fetch(self, part: Tensor) -> Tensor:
        """Return ``part`` of ``row`` itself, which lies on the parameters' device; a ``HostBucket`` copies it there."""
        return part

    def to_step(self) -> Tensor:
        """Return the row, ``[body]``, once it is complete, and free other ranks' rows."""
        if self.rows is not None:
            self.rows, self.row = None, self.row.clone()
        return self.row

    def split(self, row: Tensor) -> Sequence[Tensor]:
        """Cut a row, or all ranks' rows, into the records' slices, and return them as views."""
        if row.shape[-1] == 0:  # another rank's
            return [row] * len(self.records)
        return row.split_with_sizes(self.planned.sizes, dim=-1)

    def part_of(self, record: ShardedParameter, row: Tensor) -> Tensor:
        """Return one record's slice of a row, or of all ranks' rows, as a view."""
        at = self.planned.members.index(record.index)
        if row.shape[-1] == 0:
            return row
        return row.narrow(-1, self.planned.starts[at], self.planned.sizes[at])


class StepOnDevice:
    """Makes buckets, and gives masters to gathers, if both lie on the parameters' device."""

    def new_bucket(self, planned: PlannedBucket, records: Sequence[ShardedParameter]) -> Bucket:
        """Return a bucket of ``records``."""
        return Bucket(planned, records)

    def own_rows(self, masters: Sequence[Tensor], like: Tensor) -> Sequence[Tensor]:
        """Return ``masters`` themselves, to be gathered in ``like``'s dtype."""
        return masters


@dataclass(eq=False, repr=False)
class BucketStore:
    """The buckets of the open gradient sync, and those whose reduction is under way.

    A sync's buckets start in the plan's order, the same on every rank, each when all that it waits for has come.
    """

    _records: Sequence[ShardedParameter]  # the parameters, by index
    _reduction: Reduction  # how buckets are reduced
    _stepping: StepOnDevice  # makes buckets, which keep their shards where steps are taken
    _state: StepState  # of the optimizer's step, which learns of lost gradients
    in_flight: deque[Bucket] = field(default_factory=deque)  # buckets that are being reduced, the oldest first
    # Parameters whose gradient may come more than once in a backward: their bucket waits for its end.
    repeats: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.streams = self._reduction.streams
        self.open_sync(None)
        self.close()

    # ---- filling ----

    def open_sync(self, plan: BucketPlan | None, expected: Collection[int] | None = None) -> None:
        """Open a sync of the ``expected`` gradients; ``plan`` gives its buckets, or else ``follow`` does later."""
        self._bucket_of: dict[int, Bucket] | None = None  # of each parameter that has one; None: not known yet
        self.waiting: deque[Bucket] = deque()  # buckets that haven't started, in the plan's order
        self.expected = expected  # the parameters whose gradients are expected; None: all, or it isn't known
        self.arrivals: dict[int, None] = {}  # indices in the order in which this sync's gradients came
        self.lacked = False  # a bucket left without one of its gradients
        self.is_open = True
        if plan is not None:
            self.follow(plan)

    def follow(self, plan: BucketPlan) -> None:
        """Make the buckets of ``plan``; each waits for its expected gradients that haven't come yet."""
        records = self._records
        buckets = [self._stepping.new_bucket(each, [*map(records.__getitem__, each.members)]) for each in plan]
        self.waiting = deque(buckets)
        self._bucket_of = {index: bucket for bucket in buckets for index in bucket.planned.members}
        if self.expected is None and not self.arrivals:
            return
        for bucket in buckets:
            bucket.missing = 0
        for index in range(len(records)) if self.expected is None else self.expected:
            found = self._bucket_of.get(index)
            if found is not None and (index not in self.arrivals or index in self.repeats):
                found.missing += 1

    def fill(self, record: ShardedParameter) -> bool:
        """Note that a gradient has come; return whether its bucket waits for no other, or isn't known yet.

        A second one of the same parameter (a weight that two nested backwards share) stays in ``p.grad``: with the
        first if the bucket hasn't started, else for one more sync; that of a frozen slice goes.
        """
        index = record.index
        if index in self.arrivals:
            self.repeats.add(index)
        waited_for = index not in self.repeats and (self.expected is None or index in self.expected)
        self.arrivals[index] = None
        if self._bucket_of is None:
            return True
        bucket = self._bucket_of.get(index)
        if bucket is None or bucket.started:
            if record.p32.requires_grad:
                note_waiting(record)
            else:  # the caller has frozen it through param_groups, and no later sync would know when it came
                drop_unreduced(record)
            return False
        bucket.missing -= waited_for
        return bucket.missing == 0

    # ---- starting, in the plan's order ----

    def start_next(self) -> None:
        """Start the next bucket in the plan's order; if that fails, with zeros, and defer the error. Communicates."""
        bucket = self.waiting[0]
        try:
            self._start(bucket)
        except BaseException as error:
            self._start(bucket)  # with zeros for what was taken of its gradients: other ranks wait for it
            self._state.failure.defer(error)
        finally:
            if bucket.started:
                self.waiting.popleft()
                self.in_flight.append(bucket)

    def lost_sum(self, bucket: Bucket) -> Tensor:
        """Return zeros in place of the sum of a bucket whose reduction failed on this rank alone."""
        lead = bucket.records[0]
        rows = lead.padded.new_zeros(lead.split.rows, bucket.planned.body, dtype=lead.communication_dtype)
        return bucket.own_row(rows) if self._reduction.keeps_row_only or self._reduction.group.size == 1 else rows

    @torch.no_grad()  # gradients may have come with a graph of their own
    def _start(self, bucket: Bucket) -> None:
        with self.streams.home(join=False):
            if self.streams.several:
                self.streams.limit(self._reduction.under_way)
            self.lacked |= not bucket.start_reduce(self._reduction, self.arrivals)

    def close(self) -> None:
        """Close the sync, and forget its buckets that haven't started. Doesn't communicate."""
        self._bucket_of = None
        self.waiting.clear()
        self.is_open = False


def pack(buffer: Tensor, flats: Sequence[Tensor], divisor: float = 1.0) -> None:
    """Lay 1-D tensors side by side in ``buffer``, ``[world_size, row]``, each padded and cut into the ranks' rows.

    One multi-tensor call, whatever their number. The tensors share one dtype, which may differ from the buffer's, and
    none is empty. They are divided by ``divisor``, and left as they are: before they are cast to a dtype that couldn't
    hold them, else in the buffer.
    """
    if divisor != 1.0 and torch.promote_types(flats[0].dtype, buffer.dtype) != buffer.dtype:
        flats, divisor = torch._foreach_div(list(flats), divisor), 1.0
    torch._chunk_cat(list(flats), 0, buffer.shape[0], out=buffer)
    if divisor != 1.0:
        buffer.div_(divisor)
