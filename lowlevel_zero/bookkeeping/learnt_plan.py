"""The plan that is in force: reverse order of registration first, then the order that rank 0's first backward had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..alignment import alignment_of
from ..communication.collectives import ShardGroup
from .bucket_plan import BucketPlan, Item, completed, make_plan, narrowed
from .parameter_store import ShardedParameter

# Narrowed plans that are kept: few sets of parameters come again and again, or ever new ones.
_PLANS_KEPT = 64


class PlanState(NamedTuple):
    """What the first steps have taught about the order of gradients, by parameter index.

    Attributes:
        order: as rank 0's first backward had it: what came, then what didn't.
        came: how many came.
        reentrant: gradients may come again after their bucket has left.
        repeats: parameters whose gradient came more than once in one backward.
        forecast: one number, 1 where unused parameters are being detected; None: as at first. (Older states have more.)
    """

    order: list[int]
    came: int
    reentrant: bool
    repeats: list[int]
    forecast: list[int] | None


class LearntPlan:
    """Which parameters travel together, in what order, alike on all ranks.

    Args:
        records: the parameters, by index.
        group: the ranks that share them.
        bucket_size: elements of a bucket.
        wide_rows: pad rows for NCCL's bandwidth.

    Attributes:
        whole: the buckets of all parameters.
        known: the order is that of rank 0's first backward.
        order: what came in it, then what didn't.
        came: how many came.
    """

    def __init__(
        self, records: Sequence[ShardedParameter], group: ShardGroup, bucket_size: int, wide_rows: bool
    ) -> None:
        self._records = records
        self._group = group
        self._bucket_size = bucket_size
        self._wide_rows = wide_rows
        self._narrowed: dict[bytes, BucketPlan] = {}
        self.whole = BucketPlan((), ())
        self.forget()

    def forget(self) -> None:
        """Learn the order anew."""
        self._first: Sequence[int] | None = None
        self.known = False
        self.order: list[int] = []
        self.came = 0

    def saw(self, arrivals: Sequence[int]) -> None:
        """In one more sync gradients came in this order; the first since it was forgotten counts."""
        if self._first is None:
            self._first = arrivals

    def learn(self) -> None:
        """Take over rank 0's order. All ranks call it; it communicates."""
        count = len(self._records)
        came = dict.fromkeys(self._first or reversed(range(count)))
        lacked = [index for index in range(count) if index not in came]
        self.came, *self.order = self._group.from_rank_zero([len(came), *came, *lacked])
        self.known = True

    def restore(self, state: PlanState) -> None:
        """Have the order from another run."""
        self._first = None
        self.known = True
        self.order, self.came = state.order, state.came

    def follow(self, detecting: bool) -> None:
        """Fill buckets in the order in which gradients are expected now.

        What didn't come takes its place among the others if it is known beforehand when it will; else it is last.
        """
        count = len(self._records)
        if not self.known:
            self.fill(list(reversed(range(count))))
        else:
            self.fill(completed(self.order[: self.came], count) if detecting else self.order)

    def fill(self, order: Sequence[int]) -> None:
        """Fill buckets with these parameters in this order."""
        items = [
            Item(r.split, r.kind, r.wire_dtype == r.p.dtype, r.fp8, alignment_of(r.wire_dtype, self._wide_rows))
            for r in self._records
        ]
        self._alignments = [item.alignment for item in items]
        self._narrowed.clear()
        self.whole = make_plan(items, order, self._bucket_size)

    def of(self, used: bytes) -> BucketPlan:
        """The buckets of the parameters whose byte isn't 0."""
        if used not in self._narrowed:
            if len(self._narrowed) == _PLANS_KEPT:
                self._narrowed.clear()
            plan = narrowed(self.whole, used, self._alignments)
            self._narrowed[used] = plan if plan.bucket_of != self.whole.bucket_of else self.whole
        return self._narrowed[used]
