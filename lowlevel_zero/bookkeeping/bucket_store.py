"""The bucket store: fills wires with gradients by rank, and starts and finishes their reduction."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..alignment import Alignment
from ..communication.collectives import ShardGroup
from ..communication.progress import About
from ..communication.transport import Pending, then
from ..streams import Streams
from .bucket_plan import Bucket, BucketPlan, narrowed
from .parameter_store import ShardedParameter
from .wire import pack

# Narrowed plans that are kept: few sets of parameters come again and again, or ever new ones.
_PLANS_KEPT = 64

# In place of the position of the bucket that waits for a gradient: none does, or not any more.
_UNAWAITED, _SEEN = -1, -2


class Measured(NamedTuple):
    """The largest absolute value that this rank put into a wire, 0-d; NaN if there was one."""

    members: tuple[int, ...]
    largest: Tensor


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
    """One backward's buckets: filled as gradients arrive, started in the plan's order, finished when asked.

    Args:
        records: the parameters, by index.
        group: the ranks that share them.
        keeps_row_only: reduce-scatter, not all-reduce.
        streams: what wires are packed, started and finished on.
        divisor: what gradients are divided by before they are summed.

    Attributes:
        plan: the buckets of all parameters.
        open: a round has begun and not all its buckets have started.
        arrivals: indices in the order in which gradients came in this round.
        unexpected: those of them that nobody expected.
        late: indices of parameters whose bucket had left when a gradient came in this round, or was left out.
        contributed: for how many parameters this rank had a gradient in the round.
        measured: of wires since it was last emptied; None: they are not to be measured.
    """

    def __init__(
        self,
        records: Sequence[ShardedParameter],
        group: ShardGroup,
        keeps_row_only: bool,
        streams: Streams,
        divisor: float = 1.0,
    ) -> None:
        self._divisor = divisor
        self._streams = streams
        self._records = records
        self._group = group
        self._keeps_row_only = keeps_row_only
        self._in_flight: deque[Pending[Reduced]] = deque()
        self._narrowed: dict[bytes, BucketPlan] = {}
        self._round: BucketPlan | None = None
        self.plan = BucketPlan((), ())
        self.open = False
        self.arrivals: list[int] = []
        self.unexpected: list[int] = []
        self.late: list[int] = []
        self.contributed = 0
        self.measured: list[Measured] | None = None

    def follow(self, plan: BucketPlan, alignments: Sequence[Alignment]) -> None:
        """Use ``plan``, of parameters with these ``alignments``, from the next round on."""
        assert not self.open and not self._in_flight
        self._alignments = alignments
        self.plan = plan
        self._narrowed.clear()

    # ---- a round: gradients arrive, buckets start ----

    def open_round(self, expected: Collection[int] | None = None) -> None:
        """Expect a gradient of these parameters; None: of every one. Nothing starts before ``choose``."""
        self.open = True
        self.arrivals = []
        self.unexpected = []
        self.late = []
        self.contributed = 0
        self._next = 0
        self._round = None
        self._expected = expected
        self._awaited = [_UNAWAITED] * len(self._records)

    def choose(self, used: bytes | None = None) -> None:
        """Let those parameters travel in this round whose byte isn't 0.

        None: let all of them travel, and expect them, in a round in which no gradient has come yet.
        """
        if used is None:
            self._round = self.plan
            self._missing = [len(bucket.members) for bucket in self.plan.buckets]
            self._awaited = list(self.plan.bucket_of)
        else:
            self._round = self._plan_of(used)
            self._await(self._expected or ())
            self.late = [index for index in self.arrivals if self._round.bucket_of[index] < 0]
        for record in self._records:
            if record.repeats and self._awaited[record.index] >= 0:
                self._awaited[record.index] = _UNAWAITED

    def _plan_of(self, used: bytes) -> BucketPlan:
        if used not in self._narrowed:
            if len(self._narrowed) == _PLANS_KEPT:
                self._narrowed.clear()
            plan = narrowed(self.plan, used, self._alignments)
            self._narrowed[used] = plan if plan.bucket_of != self.plan.bucket_of else self.plan
        return self._narrowed[used]

    def _await(self, indices: Iterable[int]) -> None:
        """Let buckets wait for these, of which some may have come; for all of backward where they may come again."""
        assert self._round is not None
        seen = set(self.arrivals)
        self._missing = [0] * len(self._round.buckets)
        for index in indices:
            position = self._round.bucket_of[index]
            if position >= 0 and (self._records[index].repeats or index not in seen):
                self._missing[position] += 1
                self._awaited[index] = position
        for index in seen:
            self._awaited[index] = _SEEN

    def arrive(self, record: ShardedParameter) -> bool:
        """Note that backward has a gradient for a parameter; whether that may let a bucket start.

        A second one in the same round (a weight that two nested backwards share) stays in ``p.grad``: with
        the first if the bucket hasn't started, else for a further round.
        """
        index = record.index
        position = self._awaited[index]
        if position < 0:
            return self._arrive_unawaited(record)
        self._awaited[index] = _SEEN
        self.arrivals.append(index)
        self._missing[position] -= 1
        return self._missing[position] == 0

    def _arrive_unawaited(self, record: ShardedParameter) -> bool:
        index = record.index
        if self.plan.bucket_of[index] < 0:
            return False
        if self._awaited[index] == _SEEN:
            record.repeats = True
        else:
            self._awaited[index] = _SEEN
            self.arrivals.append(index)
            if self._expected is not None and index not in self._expected:
                self.unexpected.append(index)
        if self._round is None:
            return True
        if self._round.bucket_of[index] < self._next:
            self.late.append(index)
        return False

    def start_ready(self) -> None:
        """Start what is complete, as far as the plan's order goes."""
        assert self._round is not None
        while self._next < len(self._round.buckets) and self._missing[self._next] == 0:
            self._start(self._round.buckets[self._next])

    def close_round(self) -> None:
        """Start all that is left, complete or not: backward has ended."""
        assert self._round is not None
        while self._next < len(self._round.buckets):
            self._start(self._round.buckets[self._next])
        self.open = False

    # ---- finishing, in the order of starting ----

    def finish(self, leave: int = 0, wait: bool = True) -> list[Reduced]:
        """Take the oldest reductions until at most ``leave`` are in flight; ``wait=False``: while they are done."""
        done = []
        while len(self._in_flight) > leave and (wait or self._in_flight[0].done()):
            with self._streams.home(join=False):
                done.append(self._in_flight.popleft().wait())
        return done

    def under_way(self) -> list[Pending[Reduced]]:
        """The reductions in flight."""
        return list(self._in_flight)

    def held(self) -> list[Tensor]:
        """The tensors of reductions in flight."""
        return [tensor for pending in self.under_way() for tensor in pending.tensors]

    # ---- starting one bucket ----

    @torch.no_grad()  # gradients may have come with a graph of their own
    def _start(self, bucket: Bucket) -> None:
        with self._streams.home(join=False):
            self._start_at_home(bucket)

    def _start_at_home(self, bucket: Bucket) -> None:
        self._next = bucket.position + 1
        gradients = [self._records[index].take_gradient() for index in bucket.members]
        self._streams.borrow(gradients)
        self.contributed += sum(gradient is not None for gradient in gradients)
        wire = self._wire_in_place(bucket, gradients)
        if wire is None:
            wire = self._packed_wire(bucket, gradients)
        if self.measured is not None:
            largest = torch.linalg.vector_norm(wire, math.inf, dtype=torch.promote_types(wire.dtype, torch.float32))
            self.measured.append(Measured(bucket.members, largest))
        self._in_flight.append(self._reduction(bucket, wire))

    def _reduction(self, bucket: Bucket, wire: Tensor) -> Pending[Reduced]:
        about = About(self._records, bucket.members, bucket.position)
        if self._keeps_row_only:
            return then(self._group.reduce_scatter(wire, bucket.fp8, about), partial(Reduced, bucket))
        return then(self._group.all_reduce(wire, bucket.fp8, about), partial(self._reduced, bucket))

    def _reduced(self, bucket: Bucket, rows: Tensor) -> Reduced:
        """What an all-reduce left, which is kept: whoever asks for a whole gradient gets it."""
        return Reduced(bucket, rows[self._group.rank], rows if self._group.size > 1 else None)

    def _wire_in_place(self, bucket: Bucket, gradients: list[Tensor | None]) -> Tensor | None:
        """The gradient itself as ``[world_size, row]``, where the plan and its dtype allow it.

        Only to be read: two gradients may share memory (``a.view(-1) + b.view(-1)``), which an all-reduce would
        write twice. (One rank alone gets the wire itself back as the sum, to be written to.)
        """
        may = bucket.in_place and self._keeps_row_only and self._group.size > 1 and self._divisor == 1.0
        gradient = gradients[0] if may else None
        if gradient is None or gradient.dtype != self._records[bucket.members[0]].wire_dtype:
            return None
        return gradient.detach().view(self._group.size, bucket.row)

    def _packed_wire(self, bucket: Bucket, gradients: list[Tensor | None]) -> Tensor:
        """A fresh wire with the gradients, and zeros for those that aren't there."""
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
