"""The layout: which rank owns which elements of every parameter, and their place in bucket buffers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..bookkeeping.bucket_plan import BucketPlan, PlannedBucket
from ..options import ZeroOptions
from ..partition import EvenSplit
from ..sharded_group import ShardedGroup
from .held import NOTHING, Held, held_of, state_tensors
from .text import aligned, counted, dtype_text, in_bytes, ranks_text, shape_text


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    communication_dtype: torch.dtype  # in which its gradient travels
    split: EvenSplit  # its elements, the size of slices, and the padding behind the last one
    group: int  # index of its param group
    process_group: tuple[int, ...]  # global ranks that share it, as they own it (of replicas this rank's)
    bytes: Held  # the bytes that a rank holds of it
    bucket: int | None = None  # number of its bucket; None: it is empty, and never travels, or it is a checkpoint's
    offset: int | None = None  # where its slice starts in that bucket's row, in elements

    @property
    def owners(self) -> int:
        """The number of ranks that own an element of it, and not only padding."""
        return -(-self.split.numel // self.split.slice_size) if self.split.numel else 0

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON, with every rank's span in the order of ``process_group``."""
        split = self.split
        sizes = {"numel": split.numel, "padding": split.padding, "slice_size": split.slice_size}
        spans = [split.span(rank) for rank in range(split.world_size)]
        dtypes = {"dtype": dtype_text(self.dtype), "communication_dtype": dtype_text(self.communication_dtype)}
        found = {**vars(self), **dtypes, **sizes, "bytes": asdict(self.bytes), "spans": spans, "owners": self.owners}
        del found["split"]
        return found


@dataclass(frozen=True)
class BucketLayout:
    """One bucket."""

    number: int  # its place in the plan; further process groups' plans count on
    process_group: tuple[int, ...]  # global ranks that share it: the buffer's rows
    dtype: torch.dtype  # in which gradients travel
    members: tuple[str, ...]  # names of its parameters, in the order of the buffer
    body: int  # columns of one rank's row that the slices take
    row: int  # all columns, with those that only fill it
    rows: int  # of the buffer: one a rank
    buffer_bytes: int  # of all of them
    in_place: bool  # its one gradient is reduced where it is


@dataclass(frozen=True)
class Layout:
    """The parameters and buckets of an optimizer, or of a checkpoint."""

    rank: int | None  # the global rank whose layout it is; None: no rank's, but a checkpoint's
    stage: int
    parameters: tuple[ParameterLayout, ...]  # the trained ones, as registered, process group by process group
    buckets: tuple[BucketLayout, ...]  # in the order of their numbers; a checkpoint has none

    @property
    def world_size(self) -> int:
        """The number of ranks that share a parameter."""
        return len({rank for p in self.parameters for rank in p.process_group})

    @property
    def bytes(self) -> Held:
        """The bytes that a rank holds of all parameters: this rank, or the first one."""
        first = min(rank for p in self.parameters for rank in p.process_group)
        rank = first if self.rank is None else self.rank
        return sum((p.bytes for p in self.parameters if rank in p.process_group), NOTHING)

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "world_size": self.world_size,
            "rank": self.rank,
            "stage": self.stage,
            "parameters": [p.as_dict() for p in self.parameters],
            "buckets": [{**vars(bucket), "dtype": dtype_text(bucket.dtype)} for bucket in self.buckets],
            "bytes": asdict(self.bytes),
        }

    def json(self) -> str:
        """Return ``as_dict`` as text."""
        return json.dumps(self.as_dict(), indent=1)

    def table(self) -> str:
        """Return a heading, a line a parameter, and, of an optimizer, a line a bucket."""
        numel, padding = sum(p.split.numel for p in self.parameters), sum(p.split.padding for p in self.parameters)
        over = f"over {counted(self.world_size, 'rank')}, stage {self.stage}"
        buckets = f", {counted(len(self.buckets), 'bucket')}" if self.buckets else ""
        heading = f"{counted(numel, 'element')} in {counted(len(self.parameters), 'parameter')} {over}{buckets}"
        tables = [self._parameter_table(), *([self._bucket_table()] if self.buckets else [])]
        return "\n\n".join([f"{heading}, padding {padding / max(1, numel):.2%}", *tables])

    def _parameter_table(self) -> str:
        own = "span" if self.rank is None else f"span of rank {self.rank}"
        head = ("parameter", "shape", "dtype", "group", "elements", "padding", "slice", "owners", own)
        rows: list[tuple[str, ...]] = [(*head, "bucket", "offset", *vars(NOTHING))]
        for p in self.parameters:
            start, stop = p.split.span(0 if self.rank is None else p.process_group.index(self.rank))
            more = ", …" if self.rank is None and p.owners > 1 else ""  # every rank's follows from the first one's
            span = f"{start:,}:{stop:,}{more}" if start < stop else "nothing"
            place = ("-", "-") if p.bucket is None else (str(p.bucket), f"{p.offset:,}")
            kind = (p.name, shape_text(p.shape), dtype_text(p.dtype), str(p.group))
            sizes = (f"{size:,}" for size in (p.split.numel, p.split.padding, p.split.slice_size, p.owners))
            rows.append((*kind, *sizes, span, *place, *_in_bytes(p.bytes)))
        rows.append(("together", *[""] * 10, *_in_bytes(self.bytes)))
        return aligned(rows, right=range(4, 15))

    def _bucket_table(self) -> str:
        rows = [("bucket", "ranks", "dtype", "parameters", "slices", "row", "buffer", "")]
        for bucket in self.buckets:
            kind = (str(bucket.number), ranks_text(bucket.process_group), dtype_text(bucket.dtype))
            sizes = (f"{bucket.body:,}", f"{bucket.row:,}", in_bytes(bucket.buffer_bytes))
            note = "reduced in place" if bucket.in_place else ""
            rows.append((*kind, counted(len(bucket.members), "parameter"), *sizes, note))
        return aligned(rows, right=(0, 4, 5, 6))


def _in_bytes(held: Held) -> Iterable[str]:
    return map(in_bytes, vars(held).values())


def layout_of(optim: Optimizer, groups: Sequence[ShardedGroup], options: ZeroOptions) -> Layout:
    """Return the layout of the parameters of ``groups``, whose slices ``optim`` steps, as this rank has them now."""
    members = [(_members(optim, group, options), group.reducer.plan.whole) for group in groups]
    return with_buckets(members, 2 if options.partition_grad else 1, dist.get_rank())


def _members(optim: Optimizer, group: ShardedGroup, options: ZeroOptions) -> list[ParameterLayout]:
    ranks = tuple(group.group.slice_ranks)
    found = []
    for record in group.records:
        states = sum(value.nbytes for value in state_tensors(optim.state.get(record.p32, {})))
        shape, dtype = tuple(record.p.shape), record.p.dtype
        found.append(parameter_layout(record.name, shape, dtype, record.group, ranks, record.split, options, states))
    return found


def parameter_layout(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: int,
    ranks: tuple[int, ...],
    split: EvenSplit,
    options: ZeroOptions,
    states: int,
) -> ParameterLayout:
    """Return the layout of a parameter whose place in a bucket isn't known yet; ``states``: bytes of its slice's."""
    travels = options.communication_dtype or dtype
    return ParameterLayout(name, shape, dtype, travels, split, group, ranks, held_of(split, dtype, options, states))


def with_buckets(
    groups: Iterable[tuple[Sequence[ParameterLayout], BucketPlan]], stage: int, rank: int | None = None
) -> Layout:
    """Return the layout of parameters with their places in buckets, by the plan of each shard group."""
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
        buffer_bytes=rows * bucket.row * first.communication_dtype.itemsize,
        in_place=bucket.in_place,
    )
