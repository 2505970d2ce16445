"""The layout: who owns what of every parameter, and where it lies in the wires; as records, text and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..bookkeeping.bucket_plan import BucketPlan, PlannedBucket
from ..options import ZeroOptions
from ..partition import EvenSplit
from .text import aligned, counted, in_bytes, ranks_text, shape_text


class Owned(NamedTuple):
    """A parameter that is shared, before it has its place.

    Attributes:
        name: as messages call it.
        shape: of ``p``.
        dtype, communication_dtype: of ``p``, and of its gradient's way.
        split: its elements over the ranks.
        group: index of its param group.
        p32_bytes, state_bytes: of this rank's master slice where it isn't its parameter's own row, and of its state.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    communication_dtype: torch.dtype
    split: EvenSplit
    group: int
    p32_bytes: int
    state_bytes: int


class Shared(NamedTuple):
    """Parameters that the same ranks share: the global ``ranks``, and their bucket plan, which counts as ``owned``."""

    ranks: tuple[int, ...]
    owned: Sequence[Owned]
    plan: BucketPlan


class RankBytes(NamedTuple):
    """What one rank holds of one parameter, in bytes.

    Attributes:
        p: the whole parameter, padded.
        g: the gradient, once it is reduced: the slice in stage 2, all that travels of it in stage 1.
        p32: the master slice; 0: it is a row of ``p``.
        state: the optimizer's state of the slice; 0 before the first step.
    """

    p: int
    g: int
    p32: int
    state: int


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter.

    Attributes:
        name, shape, dtype: the parameter's.
        numel: its elements.
        padding: elements at the end of its storage that are nobody's.
        slice_size: elements that a rank owns, padding included.
        group: index of its param group.
        process_group: the global ranks that share it, in the order in which they own it (of replicas this rank's).
        bucket: number of its bucket; None: it is empty, and never travels.
        offset: where its slice starts in that bucket's row, in elements.
        bytes: what a rank holds of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    numel: int
    padding: int
    slice_size: int
    group: int
    process_group: tuple[int, ...]
    bucket: int | None
    offset: int | None
    bytes: RankBytes

    @property
    def split(self) -> EvenSplit:
        """How it is shared."""
        return EvenSplit(self.numel, len(self.process_group))

    def span(self, rank: int) -> tuple[int, int]:
        """First and one-past-last element, in memory order, that rank ``rank`` of its process group owns."""
        return self.split.span(rank)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Every rank's, in the order of ``process_group``."""
        return [self.span(rank) for rank in range(len(self.process_group))]

    @property
    def owners(self) -> int:
        """Ranks that own an element of it, and not only padding."""
        return -(-self.numel // self.slice_size) if self.numel else 0


@dataclass(frozen=True)
class BucketLayout:
    """One bucket.

    Attributes:
        number: its place in the plan; further process groups' plans count on.
        process_group: the global ranks that share it: the wire's rows.
        dtype: in which gradients travel.
        members: names of its parameters, in the order of the wire.
        body: columns of one rank's row that the slices take.
        row: all columns, those that only fill it included.
        rows: of the wire: one a rank.
        wire_bytes: of all of them.
        in_place: its one gradient is reduced where it is.
    """

    number: int
    process_group: tuple[int, ...]
    dtype: str
    members: tuple[str, ...]
    body: int
    row: int
    rows: int
    wire_bytes: int
    in_place: bool


@dataclass(frozen=True)
class Layout:
    """Who owns what.

    Attributes:
        rank: the global rank that tells; None: none of them (a checkpoint's).
        stage: 1 or 2.
        parameters: the trained ones, in order of registration, process group by process group.
        buckets: in the order of their numbers.
    """

    rank: int | None
    stage: int
    parameters: tuple[ParameterLayout, ...]
    buckets: tuple[BucketLayout, ...]

    @property
    def world_size(self) -> int:
        """Ranks that share anything."""
        return len({rank for p in self.parameters for rank in p.process_group})

    @property
    def bytes(self) -> RankBytes:
        """What a rank holds of all parameters: this one, or the first one."""
        first = min(rank for p in self.parameters for rank in p.process_group)
        own = [p.bytes for p in self.parameters if (first if self.rank is None else self.rank) in p.process_group]
        return RankBytes(*(sum(sizes) for sizes in zip(*own, strict=True)))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything, with each parameter's ``spans``."""
        return {
            "world_size": self.world_size,
            "rank": self.rank,
            "stage": self.stage,
            "parameters": [
                {**vars(p), "bytes": p.bytes._asdict(), "spans": p.spans, "owners": p.owners} for p in self.parameters
            ],
            "buckets": [vars(bucket) for bucket in self.buckets],
            "bytes": self.bytes._asdict(),
        }

    def json(self) -> str:
        """``as_dict`` as text."""
        return json.dumps(self.as_dict(), indent=1)

    def table(self) -> str:
        """A heading, a line a parameter, and a line a bucket."""
        return "\n\n".join((self._heading(), self._parameter_table(), self._bucket_table()))

    # ---- text ----

    def _heading(self) -> str:
        numel, padding = sum(p.numel for p in self.parameters), sum(p.padding for p in self.parameters)
        over = f"over {counted(self.world_size, 'rank')}, stage {self.stage}, {counted(len(self.buckets), 'bucket')}"
        padded = f"padding {padding / max(1, numel):.2%}"
        return f"{counted(numel, 'element')} in {counted(len(self.parameters), 'parameter')} {over}, {padded}"

    def _parameter_table(self) -> str:
        own = "span" if self.rank is None else f"span of rank {self.rank}"
        head = ("parameter", "shape", "dtype", "group", "elements", "padding", "slice", "owners", own)
        rows: list[tuple[str, ...]] = [(*head, "bucket", "offset", "p", "g", "p32", "state")]
        for p in self.parameters:
            place = ("-", "-") if p.bucket is None else (str(p.bucket), f"{p.offset:,}")
            sizes = (f"{p.numel:,}", f"{p.padding:,}", f"{p.slice_size:,}", f"{p.owners:,}", self._span_text(p))
            amounts = tuple(in_bytes(size) for size in p.bytes)
            rows.append((p.name, shape_text(p.shape), p.dtype, str(p.group), *sizes, *place, *amounts))
        together = tuple(in_bytes(size) for size in self.bytes)
        rows.append(("together", *[""] * 10, *together))
        return aligned(rows, right=range(4, 15))

    def _span_text(self, p: ParameterLayout) -> str:
        """This rank's, or how every rank's follows from the first one's."""
        start, stop = p.span(0 if self.rank is None else p.process_group.index(self.rank))
        if start == stop:
            return "nothing"
        more = ", …" if self.rank is None and p.owners > 1 else ""
        return f"{start:,}:{stop:,}{more}"

    def _bucket_table(self) -> str:
        rows = [("bucket", "ranks", "dtype", "parameters", "slices", "row", "wire", "")]
        for bucket in self.buckets:
            members = counted(len(bucket.members), "parameter")
            sizes = (f"{bucket.body:,}", f"{bucket.row:,}", in_bytes(bucket.wire_bytes))
            note = "reduced in place" if bucket.in_place else ""
            rows.append((str(bucket.number), ranks_text(bucket.process_group), bucket.dtype, members, *sizes, note))
        return aligned(rows, right=(0, 4, 5, 6))


def layout_of(shared: Sequence[Shared], options: ZeroOptions, rank: int | None = None) -> Layout:
    """The layout of these parameters in the wires of their plans; no communication."""
    parameters: list[ParameterLayout] = []
    buckets: list[BucketLayout] = []
    for each in shared:
        parameters += _parameters(each, len(buckets), options.keeps_row_only)
        first = len(buckets)
        buckets += [_bucket(bucket, each, first, options.keeps_row_only) for bucket in each.plan.buckets]
    return Layout(rank, 2 if options.partition_grad else 1, tuple(parameters), tuple(buckets))


def joined(layouts: Sequence[Layout]) -> Layout:
    """Layouts of optimizers that train a model together, whose buckets count on; the stage is the first's."""
    parameters: list[ParameterLayout] = []
    buckets: list[BucketLayout] = []
    for each in layouts:
        first = len(buckets)
        parameters += [replace(p, bucket=None if p.bucket is None else first + p.bucket) for p in each.parameters]
        buckets += [replace(bucket, number=first + bucket.number) for bucket in each.buckets]
    return replace(layouts[0], parameters=tuple(parameters), buckets=tuple(buckets))


def _parameters(shared: Shared, first_bucket: int, row_only: bool) -> Iterator[ParameterLayout]:
    offsets: dict[int, int] = {}
    for bucket in shared.plan.buckets:
        offsets.update(zip(bucket.members, bucket.starts, strict=True))
    for index, owned in enumerate(shared.owned):
        split, bucket_at = owned.split, shared.plan.bucket_of[index]
        reduced = split.slice_size * (1 if row_only else split.world_size)
        sizes = (split.padded_numel * owned.dtype.itemsize, reduced * owned.communication_dtype.itemsize)
        yield ParameterLayout(
            name=owned.name,
            shape=owned.shape,
            dtype=_name(owned.dtype),
            numel=split.numel,
            padding=split.padding,
            slice_size=split.slice_size,
            group=owned.group,
            process_group=shared.ranks,
            bucket=None if bucket_at < 0 else first_bucket + bucket_at,
            offset=offsets.get(index),
            bytes=RankBytes(*sizes, owned.p32_bytes, owned.state_bytes),
        )


def _bucket(bucket: PlannedBucket, shared: Shared, first: int, row_only: bool) -> BucketLayout:
    dtype = shared.owned[bucket.members[0]].communication_dtype
    rows = len(shared.ranks)
    return BucketLayout(
        number=first + bucket.position,
        process_group=shared.ranks,
        dtype=_name(dtype),
        members=tuple(shared.owned[index].name for index in bucket.members),
        body=bucket.body,
        row=bucket.row,
        rows=rows,
        wire_bytes=rows * bucket.row * dtype.itemsize,
        in_place=bucket.in_place,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
