"""The bucket plan: which parameters travel together, in what order, decided once and alike on every rank.

Pure arithmetic. A wire of two parameters with slices of 2 and 3 elements, on two ranks, that carries the
presence flags of both::

            |  slice of a | slice of b  | a? b? |
    rank 0  |   a0   a1   | b0  b1  b2  |  1  1 |
    rank 1  |   a2   pad  | b3  b4  pad |  1  1 |

A flag says "this rank has a gradient for it". Every row carries all flags, so whichever row a rank is left
with after the reduction tells it what all the others had. Flags are kept below 1% of a row: where a wire has
no room (or travels in fp8, or is no wire, because its one parameter is reduced in place) they ride in a later
one, and the plan ends with a small wire for those that found none. One more flag in the last wire of a round,
"late", says that a gradient came after its bucket had left.

A parameter that most ranks own nothing of, but padding, would fill its wire with that: at 4,096 ranks 8 elements would
travel as 4,096. Such parameters have *compact* buckets, whose wires have the first rows alone, as many as a member has
elements, rounded up to a power of 2. What has fewer rows than there are ranks is all-reduced; so are flags alone, since
every row of theirs would say the same.

Slices start at round addresses (see ``alignment``): the short ones of a bucket lie behind the others, and a row is
padded at its end, where flags find room that costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..alignment import END_TO_END, Alignment, RowLayout, laid_out
from ..partition import EvenSplit

FLAG_SHARE = 0.01


class Item(NamedTuple):
    """What the plan needs to know of one parameter."""

    split: EvenSplit
    kind: Hashable  # only parameters of one kind (device, dtypes) can share a wire
    whole: bool  # its gradient can be reduced, and its storage gathered, without packing
    fp8: bool = False  # it travels in fp8, which its kind tells too
    alignment: Alignment = END_TO_END  # one for each kind

    @property
    def compact(self) -> int:
        """Rows that travel of a tiny parameter; 0: all."""
        return 0 if self.fp8 else self.split.compact

    @property
    def travelling(self) -> int:
        """Elements that travel, with their padding."""
        return self.split.slice_size * self.compact or self.split.padded_numel


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced and gathered together.

    Attributes:
        position: place in the plan; buckets start in this order on every rank.
        members: indices of the parameters, in the wire's order; empty for a wire of flags alone.
        sizes: the members' slice sizes.
        flags: indices of the parameters whose presence flags the wire carries, after the slices.
        in_place: the one member is reduced straight from its gradient.
        last: carries the round's "late" flag behind the others, and starts when backward has ended.
        fp8: the wire travels in fp8, so that it can carry no flags.
        alignment: what slices and the row are aligned to.
        compact: rows of the wire, the first ones; 0: one for each rank.
    """

    position: int
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    flags: tuple[int, ...] = ()
    in_place: bool = False
    last: bool = False
    fp8: bool = False
    alignment: Alignment = END_TO_END
    compact: int = 0

    @cached_property
    def layout(self) -> RowLayout:
        """Where the slices lie in the row."""
        return laid_out(self.sizes, self.alignment)

    @property
    def body(self) -> int:
        """Columns that the slices take, with the fillers between them."""
        return self.layout.columns

    @property
    def late(self) -> int:
        """Column of the "late" flag."""
        return self.body + len(self.flags)

    @cached_property
    def row(self) -> int:
        """Columns of the wire."""
        return self.alignment.padded(self.late + self.last)

    @property
    def tail(self) -> int:
        """Columns behind the flags, which hold nothing."""
        return self.row - self.late - self.last

    def lengthened(self, flags: int) -> int:
        """Columns by which so many more flags would lengthen the row."""
        return self.alignment.padded(self.late + self.last + flags) - self.row


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


def narrowed(plan: BucketPlan, used: Sequence[int]) -> BucketPlan:
    """``plan`` without the parameters whose entry in ``used`` is 0, their flags, and buckets that hold no other."""
    buckets: list[Bucket] = []
    for bucket in plan.buckets:
        kept = [(index, size) for index, size in zip(bucket.members, bucket.sizes, strict=True) if used[index]]
        if kept:
            members, sizes = zip(*kept, strict=True)
            buckets.append(replace(bucket, position=len(buckets), members=members, sizes=sizes, flags=(), last=False))
    return _finished(buckets, len(plan.bucket_of))


def _finished(buckets: list[Bucket], count: int) -> BucketPlan:
    """The plan of these buckets, with their flags, for ``count`` parameters."""
    flagged = _add_flags(buckets)
    bucket_of = [-1] * count
    for bucket in flagged:
        for index in bucket.members:
            bucket_of[index] = bucket.position
    return BucketPlan(tuple(flagged), tuple(bucket_of))


def _fill(items: Sequence[Item], order: Sequence[int], bucket_size: int) -> list[list[int]]:
    """Indices by bucket; those that are still open at the end close in the order of their last member."""
    closed: list[list[int]] = []
    open_of: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    for index in order:
        item = items[index]
        if item.split.numel == 0:
            continue
        kind, travelling = (item.kind, item.compact), item.travelling
        if kind in open_of and travelling > room[kind]:
            closed.append(open_of.pop(kind))
        if kind not in open_of:
            room[kind] = bucket_size
        room[kind] -= travelling
        # Taken out and put back, so that the dict's order is that of the last members.
        open_of[kind] = [*open_of.pop(kind, []), index]
    return closed + list(open_of.values())


def _bucket(position: int, group: list[int], items: Sequence[Item], bucket_size: int) -> Bucket:
    """A bucket without flags: slices that are too short to be aligned come behind the others."""
    first = items[group[0]]
    alignment = first.alignment
    members = tuple(sorted(group, key=lambda index: items[index].split.slice_size < alignment.slices))
    sizes = tuple(items[index].split.slice_size for index in members)
    alone = len(group) == 1 and first.split.numel >= bucket_size
    fits = first.whole and first.split.padding == 0 and alignment.padded(sizes[0]) == sizes[0]
    return Bucket(position, members, sizes, (), alone and fits, False, first.fp8, alignment, first.compact)


def _add_flags(buckets: list[Bucket]) -> list[Bucket]:
    """Give each parameter's flag a wire: its own bucket's, a later one's, or one more at the end."""
    flagged: list[Bucket] = []
    waiting: tuple[int, ...] = ()
    for bucket in buckets:
        waiting += bucket.members
        if not (bucket.in_place or bucket.fp8) and bucket.lengthened(len(waiting)) <= FLAG_SHARE * bucket.body:
            flagged.append(replace(bucket, flags=waiting))
            waiting = ()
        else:
            flagged.append(bucket)
    if flagged and not waiting and flagged[-1].lengthened(1) <= flagged[-1].alignment.slices:
        flagged[-1] = replace(flagged[-1], last=True)
    else:
        flagged.append(Bucket(len(flagged), (), (), waiting, last=True, compact=1))
    return flagged
