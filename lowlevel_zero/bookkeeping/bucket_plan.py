"""The bucket plan: which parameters are reduced and gathered together, and in what order, alike on every rank.

The first half is pure arithmetic. The buffer of two parameters with slices of 2 and 3 elements, on two ranks::

            |  slice of a | slice of b  |
    rank 0  |   a0   a1   | b0  b1  b2  |
    rank 1  |   a2   pad  | b3  b4  pad |

Slices lie end to end; a row is padded at its end (see ``alignment``). ``LearntPlan`` is the plan in force: reverse
order of registration first, then the order of rank 0's first backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from ..communication.shard_group import ShardGroup
from ..partition import END_TO_END, Alignment, Split, alignment_of
from .sharded_parameter import ShardedParameter

# Narrowed plans that are kept: few sets of parameters come again and again, or ever new ones.
_PLANS_KEPT = 64


class Item(NamedTuple):
    """The facts about one parameter that the plan depends on."""

    split: Split
    kind: Hashable  # only parameters of one kind (device, dtypes, owner) can share a buffer
    whole: bool  # its gradient can be reduced, and its storage gathered, without packing
    fp8: bool = False  # it travels in fp8, which its kind tells too
    alignment: Alignment = END_TO_END  # one for each kind


@dataclass(frozen=True)
class PlannedBucket:
    """Parameters that are reduced and gathered together."""

    position: int  # in the plan; buckets start in this order on every rank
    members: tuple[int, ...]  # indices of the parameters, in the buffer's order
    sizes: tuple[int, ...]  # the members' slice sizes
    in_place: bool = False  # the one member is reduced straight from its gradient
    fp8: bool = False  # it travels in fp8
    alignment: Alignment = END_TO_END  # of its row

    @cached_property
    def body(self) -> int:
        """Return the number of columns that the slices take."""
        return sum(self.sizes)

    @cached_property
    def row(self) -> int:
        """Return the number of columns of the buffer."""
        return self.alignment.padded(self.body)

    @property
    def starts(self) -> list[int]:
        """Return each slice's first column."""
        return list(accumulate(self.sizes, initial=0))[:-1]


# Buckets in their order. Empty parameters have none.
BucketPlan: TypeAlias = tuple[PlannedBucket, ...]


def make_plan(items: Sequence[Item], order: Sequence[int], bucket_size: int) -> BucketPlan:
    """Group parameters into buckets of about ``bucket_size`` elements, filled in ``order``.

    A bucket is closed when the next parameter of its kind would overfill it, so a parameter larger than a
    bucket is alone in its own. Kinds fill side by side: alternating dtypes don't cut buckets short.
    """
    groups = _fill(items, order, bucket_size)
    return tuple(_bucket(at, group, items, bucket_size) for at, group in enumerate(groups))


def completed(came: Sequence[int], count: int) -> list[int]:
    """Return ``came`` with the missing numbers of ``range(count)``, each behind the next higher one."""
    absent = set(range(count)).difference(came)
    order = []
    for index in (count, *came):
        order += [index] if index < count else []
        while index - 1 in absent:
            index -= 1
            order.append(index)
    return order


def narrowed(plan: BucketPlan, used: Sequence[int]) -> BucketPlan:
    """Return ``plan`` without the parameters that no rank uses, which have 0 in ``used``, and without empty buckets."""
    buckets: list[PlannedBucket] = []
    for bucket in plan:
        kept = [(index, size) for index, size in zip(bucket.members, bucket.sizes, strict=True) if used[index]]
        if kept:
            members, sizes = zip(*kept, strict=True)
            buckets.append(replace(bucket, position=len(buckets), members=members, sizes=sizes))
    return tuple(buckets)


def _fill(items: Sequence[Item], order: Sequence[int], bucket_size: int) -> list[list[int]]:
    """Group non-empty parameters, in ``order``, by kind, into buckets; each closes when the next would overfill it."""
    closed: list[list[int]] = []
    open_of: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    for index in order:
        item = items[index]
        if item.split.numel == 0:
            continue
        kind, numel = item.kind, item.split.padded_numel
        if kind in open_of and numel > room[kind]:
            closed.append(open_of.pop(kind))
        if kind not in open_of:
            room[kind] = item.split.room(bucket_size)
        room[kind] -= numel
        # Taken out and put back, so that the dict's order is that of the last members.
        open_of[kind] = members = open_of.pop(kind, [])
        members.append(index)
    return closed + list(open_of.values())


def _bucket(position: int, group: list[int], items: Sequence[Item], bucket_size: int) -> PlannedBucket:
    """Return the bucket of a ``group``; it is reduced in place if one large parameter without padding fills it."""
    first = items[group[0]]
    sizes = tuple(items[index].split.slice_size for index in group)
    alone = len(group) == 1 and first.split.numel >= first.split.room(bucket_size)
    planned = PlannedBucket(position, tuple(group), sizes, fp8=first.fp8, alignment=first.alignment)
    fits = first.whole and planned.row * first.split.rows == first.split.numel
    return replace(planned, in_place=alone and fits)


class PlanState(NamedTuple):
    """The order of gradients that the first steps have shown, by parameter index."""

    order: list[int]  # of rank 0's first backward: gradients that came, then parameters without one
    came: int  # how many came
    repeats: list[int]  # parameters whose gradient came more than once in one backward
    detecting: bool  # unused parameters are being detected


@dataclass(eq=False, repr=False)
class LearntPlan:
    """The bucket plan in force: reverse registration order first, then the order of rank 0's first backward."""

    _records: Sequence[ShardedParameter]  # the parameters, by index
    _group: ShardGroup  # the ranks that share them
    _bucket_size: int  # elements of a bucket
    _wide_rows: bool  # pad rows for NCCL's bandwidth
    whole: BucketPlan = ()  # the buckets of all parameters
    # The parameters whose gradients came in rank 0's first backward, then the others; empty: it isn't known yet.
    order: list[int] = field(default_factory=list)
    came: int = 0  # how many came
    first: Sequence[int] | None = None  # the order of the first backward, on this rank
    _narrowed: dict[bytes, BucketPlan] = field(default_factory=dict)

    def restore(self, detecting: bool, order: Sequence[int] = (), came: int = 0) -> None:
        """Follow an order from another run; without one, forget the order, and learn it again."""
        self.first = None
        self.order = list(order)
        self.came = came
        self.follow(detecting)

    def learn(self) -> None:
        """Take over the order of rank 0's first backward, even if one is known. Communicates: all ranks call it."""
        count = len(self._records)
        came = dict.fromkeys(self.first or reversed(range(count)))
        lacked = [index for index in range(count) if index not in came]
        self.came, *self.order = self._group.from_rank_zero([len(came), *came, *lacked])

    def follow(self, detecting: bool) -> None:
        """Plan all parameters' buckets anew, in the learnt order, or else in reverse order of registration.

        What didn't come takes its place among the others if it is known beforehand when it will, by ``detecting``; else
        it is last.
        """
        count = len(self._records)
        order: Sequence[int] = self.order or range(count)[::-1]
        if self.order and detecting:
            order = completed(self.order[: self.came], count)
        items = [
            Item(each.split, each.kind, dtype == each.p.dtype, each.fp8, alignment_of(dtype, self._wide_rows))
            for each, dtype in ((each, each.communication_dtype) for each in self._records)
        ]
        self._narrowed.clear()
        self.whole = make_plan(items, order, self._bucket_size)

    def of(self, used: bytes) -> BucketPlan:
        """Return the plan of the parameters whose byte in ``used`` isn't 0."""
        if used not in self._narrowed:
            if len(self._narrowed) == _PLANS_KEPT:
                self._narrowed.clear()
            self._narrowed[used] = narrowed(self.whole, used)
        return self._narrowed[used]
