"""The layout: who owns what of every parameter, and where it lies in bucket buffers; as records, text and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..bookkeeping.bucket_plan import BucketPlan, PlannedBucket
from ..options import ZeroOptions
from ..partition import EvenSplit
from .memory import RankBytes, rank_bytes
from .text import aligned, counted, in_bytes, ranks_text, shape_text


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    communication_dtype: str  # in which its gradient travels
    numel: int
    padding: int  # elements at the end of its storage that are nobody's
    slice_size: int  # elements that a rank owns, padding included
    group: int  # index of its param group
    process_group: tuple[int, ...]  # global ranks that share it, as they own it (of replicas this rank's)
    bytes: RankBytes  # what a rank holds of it
    bucket: int | None = None  # number of its bucket; None: it is empty, and never travels, or it is a checkpoint's
    offset: int | None = None  # where its slice starts in that bucket's row, in elements

    def span(self, rank: int) -> tuple[int, int]:
        """First and one-past-last element, in memory order, that rank ``rank`` of its process group owns."""
        return EvenSplit(self.numel, len(self.process_group), max(self.slice_size, 1)).span(rank)

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
    """One bucket."""

    number: int  # its place in the plan; further process groups' plans count on
    process_group: tuple[int, ...]  # global ranks that share it: the buffer's rows
    dtype: str  # in which gradients travel
    members: tuple[str, ...]  # names of its parameters, in the order of the buffer
    body: int  # columns of one rank's row that the slices take
    row: int  # all columns, those that only fill it included
    rows: int  # of the buffer: one a rank
    buffer_bytes: int  # of all of them
    in_place: bool  # its one gradient is reduced where it is


@dataclass(frozen=True)
class Layout:
    """Who owns what."""

    rank: int | None  # the global rank that tells; None: none of them (a checkpoint's)
    stage: int
    parameters: tuple[ParameterLayout, ...]  # the trained ones, as registered, process group by process group
    buckets: tuple[BucketLayout, ...]  # in the order of their numbers; a checkpoint has none

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
        """A heading, a line a parameter, and, of an optimizer, a line a bucket."""
        numel, padding = sum(p.numel for p in self.parameters), sum(p.padding for p in self.parameters)
        over = f"over {counted(self.world_size, 'rank')}, stage {self.stage}"
        buckets = f", {counted(len(self.buckets), 'bucket')}" if self.buckets else ""
        heading = f"{counted(numel, 'element')} in {counted(len(self.parameters), 'parameter')} {over}{buckets}"
        tables = [self._parameter_table(), *([self._bucket_table()] if self.buckets else [])]
        return "\n\n".join([f"{heading}, padding {padding / max(1, numel):.2%}", *tables])

    def _parameter_table(self) -> str:
        own = "span" if self.rank is None else f"span of rank {self.rank}"
        head = ("parameter", "shape", "dtype", "group", "elements", "padding", "slice", "owners", own)
        rows: list[tuple[str, ...]] = [(*head, "bucket", "offset", "p", "g", "p32", "state")]
        for p in self.parameters:
            start, stop = p.span(0 if self.rank is None else p.process_group.index(self.rank))
            more = ", …" if self.rank is None and p.owners > 1 else ""  # every rank's follows from the first one's
            span = f"{start:,}:{stop:,}{more}" if start < stop else "nothing"
            place = ("-", "-") if p.bucket is None else (str(p.bucket), f"{p.offset:,}")
            sizes = (f"{p.numel:,}", f"{p.padding:,}", f"{p.slice_size:,}", f"{p.owners:,}", span)
            rows.append((p.name, shape_text(p.shape), p.dtype, str(p.group), *sizes, *place, *map(in_bytes, p.bytes)))
        rows.append(("together", *[""] * 10, *map(in_bytes, self.bytes)))
        return aligned(rows, right=range(4, 15))

    def _bucket_table(self) -> str:
        rows = [("bucket", "ranks", "dtype", "parameters", "slices", "row", "buffer", "")]
        for bucket in self.buckets:
            members = counted(len(bucket.members), "parameter")
            sizes = (f"{bucket.body:,}", f"{bucket.row:,}", in_bytes(bucket.buffer_bytes))
            note = "reduced in place" if bucket.in_place else ""
            rows.append((str(bucket.number), ranks_text(bucket.process_group), bucket.dtype, members, *sizes, note))
        return aligned(rows, right=(0, 4, 5, 6))


def parameter_layout(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    group: int,
    ranks: Sequence[int],
    split: EvenSplit,
    options: ZeroOptions,
    state: int,
) -> ParameterLayout:
    """That of a parameter which has no place in a bucket yet; ``state``: bytes of its slice's."""
    return ParameterLayout(
        name=name,
        shape=tuple(shape),
        dtype=_name(dtype),
        communication_dtype=_name(options.communication_dtype or dtype),
        numel=split.numel,
        padding=split.padding,
        slice_size=split.slice_size,
        group=group,
        process_group=tuple(ranks),
        bytes=rank_bytes(split, dtype, options, state),
    )


def layout_of(
    groups: Iterable[tuple[Sequence[ParameterLayout], BucketPlan]], stage: int, rank: int | None = None
) -> Layout:
    """The layout of parameters, group by group of those that share a plan, whose buckets count on."""
    parameters: list[ParameterLayout] = []
    buckets: list[BucketLayout] = []
    for members, plan in groups:
        placed = list(members)
        for bucket in plan.buckets:
            for index, start in zip(bucket.members, bucket.starts, strict=True):
                placed[index] = replace(placed[index], bucket=len(buckets), offset=start)
            buckets.append(_bucket(len(buckets), bucket, members))
        parameters += placed
    return Layout(rank, stage, tuple(parameters), tuple(buckets))


def _bucket(number: int, bucket: PlannedBucket, parameters: Sequence[ParameterLayout]) -> BucketLayout:
    first = parameters[bucket.members[0]]
    rows = len(first.process_group)
    return BucketLayout(
        number=number,
        process_group=first.process_group,
        dtype=first.communication_dtype,
        members=tuple(parameters[index].name for index in bucket.members),
        body=bucket.body,
        row=bucket.row,
        rows=rows,
        buffer_bytes=rows * bucket.row * getattr(torch, first.communication_dtype).itemsize,
        in_place=bucket.in_place,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
