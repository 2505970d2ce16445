"""One gradient sync: which gradients of a backward are expected, which have come, and which bucket may start next.

Pure bookkeeping, no tensors: the buckets of a plan start in its order, each when all that it waits for has come, so
that every rank starts the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .bucket_plan import Bucket, BucketPlan


class GradientSync:
    """The reductions of one backward.

    Args:
        expected: indices of the parameters that this rank's backward will reach; None: all, or nobody knows.
        repeats: those whose gradient may come more than once: their bucket waits for the end of backward.

    Attributes:
        plan: the buckets that travel; None: the ranks' choice isn't known yet.
        arrivals: indices in the order in which gradients came.
        unexpected: those of them that weren't expected.
        repeated: those whose gradient came more than once.
        late: those that came after their bucket had left, or that were left out: they wait in ``p.grad``.
    """

    __slots__ = ("_expected", "_missing", "_next", "_repeats", "arrivals", "late", "plan", "repeated", "unexpected")

    def __init__(self, expected: Collection[int] | None = None, repeats: Collection[int] = ()) -> None:
        self._expected = expected
        self._repeats = repeats
        self._next = 0
        self.plan: BucketPlan | None = None
        self.arrivals: dict[int, None] = {}
        self.unexpected: list[int] = []
        self.repeated: list[int] = []
        self.late: list[int] = []

    def travel(self, plan: BucketPlan) -> None:
        """Let these buckets travel, and wait for what is expected and hasn't come yet."""
        self.plan = plan
        if self._expected is None and not self.arrivals:
            self._missing = [len(bucket.members) for bucket in plan.buckets]
            return
        self._missing = [0] * len(plan.buckets)
        for index in range(len(plan.bucket_of)) if self._expected is None else self._expected:
            if plan.bucket_of[index] >= 0 and (index not in self.arrivals or index in self._repeats):
                self._missing[plan.bucket_of[index]] += 1
        self.late = [index for index in self.arrivals if plan.bucket_of[index] < 0]

    def arrive(self, index: int) -> bool:
        """Note a gradient; whether a bucket may start now.

        A second one of the same parameter (a weight that two nested backwards share) stays in ``p.grad``: with the
        first if the bucket hasn't started, else it is late.
        """
        first = index not in self.arrivals
        expected = self._expected is None or index in self._expected
        self.arrivals[index] = None
        if not first:
            self.repeated.append(index)
        elif not expected:
            self.unexpected.append(index)
        if self.plan is None:
            return True
        position = self.plan.bucket_of[index]
        if position < self._next:
            self.late.append(index)
            return False
        if first and expected and index not in self._repeats:
            self._missing[position] -= 1
        return self._missing[position] == 0

    def ready(self) -> Iterator[Bucket]:
        """The buckets that are complete, as far as the plan's order goes, each once."""
        assert self.plan is not None
        while self._next < len(self.plan.buckets) and self._missing[self._next] == 0:
            self._next += 1
            yield self.plan.buckets[self._next - 1]

    def rest(self) -> Iterator[Bucket]:
        """All that are left, complete or not: backward has ended."""
        assert self.plan is not None
        while self._next < len(self.plan.buckets):
            self._next += 1
            yield self.plan.buckets[self._next - 1]
