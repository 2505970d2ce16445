"""The bucket plan: which parameters travel together, in what order, decided once and alike on every rank.

Pure arithmetic. The buffer of two parameters with slices of 2 and 3 elements, on two ranks::

            |  slice of a | slice of b  |
    rank 0  |   a0   a1   | b0  b1  b2  |
    rank 1  |   a2   pad  | b3  b4  pad |

Slices lie end to end; a row is padded at its end (see ``alignment``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..alignment import END_TO_END, Alignment
from ..partition import EvenSplit


class Item(NamedTuple):
    """What the plan needs to know of one parameter."""

    split: EvenSplit
    kind: Hashable  # only parameters of one kind (device, dtypes) can share a wire
    whole: bool  # its gradient can be reduced, and its storage gathered, without packing
    fp8: bool = False  # it travels in fp8, which its kind tells too
    alignment: Alignment = END_TO_END  # one for each kind


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced and gathered together.

    Attributes:
        position: place in the plan; buckets start in this order on every rank.
        members: indices of the parameters, in the buffer's order.
        sizes: the members' slice sizes.
        in_place: the one member is reduced straight from its gradient.
        fp8: it travels in fp8.
        row: columns of the buffer.
    """

    position: int
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    row: int
    in_place: bool = False
    fp8: bool = False

    @cached_property
    def body(self) -> int:
        """Columns that the slices take."""
        return sum(self.sizes)

    @property
    def starts(self) -> list[int]:
        """Each slice's first column."""
        return list(accumulate(self.sizes, initial=0))[:-1]


@dataclass(frozen=True)
class BucketPlan:
    """The buckets in their order, and the bucket of each parameter (-1: an empty or left out one has none)."""

    buckets: tuple[Bucket, ...]
    bucket_of: tuple[int, ...]


def make_plan(items: Sequence[Item], order: Sequence[int], bucket_size: int) -> BucketPlan:
    """Group parameters into buckets of about ``bucket_size`` elements, filled in ``order``.

    A bucket is closed when the next parameter of its kind would overfill it, so a parameter larger than a
    bucket is alone in its own. Kinds fill side by side: alternating dtypes don't cut buckets short.
    """
    groups = _fill(items, order, bucket_size)
    return _finished([_bucket(at, group, items, bucket_size) for at, group in enumerate(groups)], len(items))


def completed(came: Sequence[int], count: int) -> list[int]:
    """``came`` and, each behind the next higher one, those of ``range(count)`` that it lacks: backward goes down."""
    absent = set(range(count)).difference(came)
    order = []
    for index in (count, *came):
        order += [index] if index < count else []
        while index - 1 in absent:
            index -= 1
            order.append(index)
    return order


def narrowed(plan: BucketPlan, used: Sequence[int], alignments: Sequence[Alignment]) -> BucketPlan:
    """``plan``, of parameters with these ``alignments``, without those whose entry in ``used`` is 0.

    Buckets that hold no other go.
    """
    buckets: list[Bucket] = []
    for bucket in plan.buckets:
        kept = [(index, size) for index, size in zip(bucket.members, bucket.sizes, strict=True) if used[index]]
        if kept:
            members, sizes = zip(*kept, strict=True)
            row = alignments[members[0]].padded(sum(sizes))
            buckets.append(replace(bucket, position=len(buckets), members=members, sizes=sizes, row=row))
    return _finished(buckets, len(plan.bucket_of))


def _finished(buckets: list[Bucket], count: int) -> BucketPlan:
    """The plan of these buckets, for ``count`` parameters."""
    bucket_of = [-1] * count
    for bucket in buckets:
        for index in bucket.members:
            bucket_of[index] = bucket.position
    return BucketPlan(tuple(buckets), tuple(bucket_of))


def _fill(items: Sequence[Item], order: Sequence[int], bucket_size: int) -> list[list[int]]:
    """Indices by bucket; those that are still open at the end close in the order of their last member."""
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
            room[kind] = bucket_size
        room[kind] -= numel
        # Taken out and put back, so that the dict's order is that of the last members.
        open_of[kind] = [*open_of.pop(kind, []), index]
    return closed + list(open_of.values())


def _bucket(position: int, group: list[int], items: Sequence[Item], bucket_size: int) -> Bucket:
    first = items[group[0]]
    sizes = tuple(items[index].split.slice_size for index in group)
    row = first.alignment.padded(sum(sizes))
    alone = len(group) == 1 and first.split.numel >= bucket_size
    fits = first.whole and first.split.padding == 0 and row == sizes[0]
    return Bucket(position, tuple(group), sizes, row, alone and fits, first.fp8)
