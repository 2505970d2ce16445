"""The layout: which rank owns which elements of every parameter, and their place in bucket buffers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from ..bookkeeping.bucket_plan import BucketPlan, PlannedBucket
from ..bookkeeping.storages import tensors_in
from ..communication.fp8 import encoded_size
from ..options import ZeroOptions
from ..partition import Owned, Split, owned_by_rank
from ..sharded_group import ShardedGroup
from .held import NOTHING, OF_PARAMETERS, Held, Sharded
from .text import aligned, counted, dtype_text, in_bytes, ranks_text, shape_text, shares_text


@dataclass(frozen=True)
class ParameterLayout:
    """The layout of one parameter: its split, its place in a bucket, and its bytes on a rank.

    Attributes:
        name: the model's name of the parameter.
        shape, dtype: the parameter's.
        group: the index of its param group.
        process_group: the global ranks that share it, in the order of their slices.
        split: its elements, the size of slices, and the padding behind the last one.
        options: the run's.
        states: bytes of its slice's optimizer states. Those of a parameter that another rank owns whole aren't known
            here, and count as nothing.
        bucket: the number of its bucket; None: an empty parameter has none, and a checkpoint's buckets are unknown.
        offset: the first column of its slice in the bucket's row.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int
    process_group: tuple[int, ...]
    split: Split
    options: ZeroOptions
    states: int
    bucket: int | None = None
    offset: int | None = None

    @property
    def communication_dtype(self) -> torch.dtype:
        """Return the dtype in which its gradient travels."""
        return self.options.communication.dtype or self.dtype

    @property
    def everywhere(self) -> Held:
        """Return the bytes that each of the ranks that share it holds of it, owner or not."""
        return _held_of(self.split, self.dtype, self.options)[0]

    @property
    def own(self) -> Held:
        """Return the bytes that a rank holds of it beside these, since it owns a slice."""
        return _held_of(self.split, self.dtype, self.options)[1] + Held(states=self.states)

    @property
    def owners(self) -> int:
        """Return the number of ranks that own an element of the parameter."""
        return sum(start < stop for start, stop in self.spans)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return every rank's first and one-past-last element, in the order of ``process_group``."""
        return [self.split.span(place) for place in range(len(self.process_group))]

    def bytes_on(self, rank: int) -> Held:
        """Return the bytes that a global rank holds of the parameter, by owner; nothing on other ranks."""
        if rank not in self.process_group:
            return NOTHING
        owner = self.split.owner
        return self.everywhere + self.own if owner in (None, self.process_group.index(rank)) else self.everywhere

    def as_dict(self) -> dict[str, object]:
        """Return all fields and what follows from them, as values for JSON."""
        sizes = {name: getattr(self.split, name) for name in ("numel", "padding", "slice_size")}
        dtypes = {"dtype": dtype_text(self.dtype), "communication_dtype": dtype_text(self.communication_dtype)}
        held = {
            "everywhere": asdict(self.everywhere),
            "own": asdict(self.own),
            "bytes": asdict(self.everywhere + self.own),
        }
        found = {**vars(self), **dtypes, **sizes, **held, "spans": self.spans, "owners": self.owners}
        return {name: value for name, value in found.items() if name not in ("split", "options", "states")}


@dataclass(frozen=True)
class BucketLayout:
    """The layout of one bucket: its parameters, and the sizes of its buffer.

    Attributes:
        number: its place in the plan; the plans of further process groups count on.
        process_group: the global ranks that share it.
        members: the names of its parameters, in the order of the buffer.
        planned: its place in the plan of its process group, and its widths.
        rows: the rows of its buffer, one a rank, or one alone.
        dtype: the dtype in which gradients travel.
        parameter_dtype: the dtype of the parameters.
        owner: the place in ``process_group`` of the rank that owns all its parameters; None: each rank owns a slice.
    """

    number: int
    process_group: tuple[int, ...]
    members: tuple[str, ...]
    planned: PlannedBucket
    rows: int
    dtype: torch.dtype
    parameter_dtype: torch.dtype
    owner: int | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Return the dtypes, fp8 and owner; buckets with equal ones may be stepped and gathered together."""
        return self.dtype, self.parameter_dtype, self.planned.fp8, self.owner

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of the bucket's buffer."""
        return self.rows * self.planned.row * self.dtype.itemsize

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that a row of the buffer takes while it is sent, in fp8 or in ``dtype``."""
        return encoded_size(self.planned.row) if self.planned.fp8 else self.planned.row * dtype.itemsize

    def as_dict(self) -> dict[str, object]:
        """Return all fields and the bytes of the buffer, as values for JSON."""
        planned = {name: getattr(self.planned, name) for name in ("body", "row", "in_place", "fp8")}
        dtypes = {"dtype": dtype_text(self.dtype), "parameter_dtype": dtype_text(self.parameter_dtype)}
        return {**vars(self), **dtypes, "planned": planned, "buffer_bytes": self.buffer_bytes}


@dataclass(frozen=True)
class Layout:
    """The parameters and buckets of an optimizer, of a checkpoint, or of a run that is planned.

    Attributes:
        rank: the global rank that holds ``bytes``.
        stage: 1 or 2.
        parameters: the trained ones, as registered, process group by process group.
        buckets: in the order of their numbers.
    """

    rank: int
    stage: int
    parameters: tuple[ParameterLayout, ...]
    buckets: tuple[BucketLayout, ...]

    @property
    def ranks(self) -> list[int]:
        """Return the global ranks that share at least one of the parameters, sorted."""
        groups = dict.fromkeys(p.process_group for p in self.parameters)
        return sorted({rank for group in groups for rank in group})

    @property
    def world_size(self) -> int:
        """Return the number of ranks that share at least one of the parameters."""
        return len(self.ranks)

    @property
    def bytes(self) -> Held:
        """Return the bytes that ``rank`` holds of all parameters, by owner."""
        return sum((p.bytes_on(self.rank) for p in self.parameters), NOTHING)

    @property
    def totals(self) -> dict[int, int]:
        """Return the bytes that each global rank holds, without states that only another rank knows (see ``own``)."""
        found = dict.fromkeys(self.ranks, 0)
        for p in self.parameters:
            everywhere, own = p.everywhere.total, p.own.total
            for at, rank in enumerate(p.process_group):
                found[rank] += everywhere + (own if p.split.owner in (None, at) else 0)
        return found

    def as_dict(self) -> dict[str, object]:
        """Return parameters, buckets and bytes, as values for JSON."""
        return {
            "world_size": self.world_size,
            "rank": self.rank,
            "stage": self.stage,
            "parameters": [p.as_dict() for p in self.parameters],
            "buckets": [bucket.as_dict() for bucket in self.buckets],
            "bytes": asdict(self.bytes),
        }

    def json(self) -> str:
        """Return ``as_dict`` as JSON text."""
        return json.dumps(self.as_dict(), indent=1)

    def table(self) -> str:
        """Return the layout as text: a heading, a line for each parameter, and a line for each bucket."""
        numel, padding = sum(p.split.numel for p in self.parameters), sum(p.split.padding for p in self.parameters)
        over = f"over {counted(self.world_size, 'rank')}, stage {self.stage}, {counted(len(self.buckets), 'bucket')}"
        heading = f"{counted(numel, 'element')} in {counted(len(self.parameters), 'parameter')} {over}"
        heading += f", padding {padding / max(1, numel):.2%}"
        shares = [*self.owned.values()]
        whole = [f"of parameters that a rank owns whole {shares_text(shares)}"] if shares else []
        return "\n\n".join([heading, self._parameters(), self._buckets(), *whole])

    @property
    def owned(self) -> dict[int, Owned]:
        """Return each global rank's elements and work of parameters that one rank steps whole; empty without any."""
        found = dict.fromkeys(self.ranks, Owned())
        for group in dict.fromkeys(p.process_group for p in self.parameters):
            splits = (p.split for p in self.parameters if p.process_group == group)
            for rank, (elements, work) in zip(group, owned_by_rank(splits, len(group)), strict=True):
                found[rank] = Owned(found[rank].elements + elements, found[rank].work + work)
        return found if any(share.elements for share in found.values()) else {}

    def _parameters(self) -> str:
        """Return the table of parameters: each one's split, span, bucket and bytes."""
        head = ("parameter", "shape", "dtype", "group", "elements", "padding", "slice", "owners")
        rows: list[tuple[str, ...]] = [(*head, f"span of rank {self.rank}", "bucket", "offset", *OF_PARAMETERS)]
        for p in self.parameters:
            place = ("-", "-") if p.bucket is None else (str(p.bucket), f"{p.offset:,}")
            kind = (p.name, shape_text(p.shape), dtype_text(p.dtype), str(p.group))
            sizes = (f"{size:,}" for size in (p.split.numel, p.split.padding, p.split.slice_size, p.owners))
            span = span_text(p.split.span(p.process_group.index(self.rank)))
            rows.append((*kind, *sizes, span, *place, *bytes_texts(p.bytes_on(self.rank))))
        rows.append(("together", *[""] * 10, *bytes_texts(self.bytes)))
        return aligned(rows, right=range(4, 15))

    def _buckets(self) -> str:
        """Return the table of buckets: each one's ranks, dtype, members and sizes."""
        rows = [("bucket", "ranks", "dtype", "parameters", "slices", "row", "buffer", "")]
        for bucket in self.buckets:
            kind = (str(bucket.number), ranks_text(bucket.process_group), dtype_text(bucket.dtype))
            sizes = (f"{bucket.planned.body:,}", f"{bucket.planned.row:,}", in_bytes(bucket.buffer_bytes))
            note = "reduced in place" if bucket.planned.in_place else ""
            rows.append((*kind, counted(len(bucket.members), "parameter"), *sizes, note))
        return aligned(rows, right=(0, 4, 5, 6))


def span_text(span: tuple[int, int]) -> str:
    """Return a span of elements as text, as in ``7:14``, or ``nothing`` if it is empty."""
    start, stop = span
    return f"{start:,}:{stop:,}" if start < stop else "nothing"


def bytes_texts(held: Held) -> Iterable[str]:
    """Return a parameter's bytes as text, one for each of parameters, gradients, masters and states."""
    return (in_bytes(getattr(held, owner)) for owner in OF_PARAMETERS)


# ---- layouts are made of parameters and bucket plans ----


def layout_of(optimizer: Sharded) -> Layout:
    """Return the layout of an optimizer's parameters and buckets on this rank. Doesn't communicate."""
    members = [(_members(optimizer, group), group.reducer.plan.whole) for group in optimizer.sharded_groups]
    return with_buckets(members, optimizer.options.stage, dist.get_rank())


def bytes_of(optimizer: Sharded) -> int:
    """Return the bytes of parameters, masters and gradients on this rank after a backward. Doesn't communicate."""
    alike = Counter((record.split, record.p.dtype, record.owns_some) for record in optimizer.sharded_parameters)
    total = 0
    for (split, dtype, owns_some), count in alike.items():
        everywhere, own = _held_of(split, dtype, optimizer.options)
        total += count * (everywhere.total + (own.total if owns_some else 0))
    return total


def _members(optimizer: Sharded, group: ShardedGroup) -> list[ParameterLayout]:
    """Return the layouts of one shard group's parameters, with the present bytes of their states."""
    ranks, found = tuple(group.group.slice_ranks), []
    for record in group.records:
        states = sum(value.nbytes for value in tensors_in(optimizer.optim.state.get(record.p32, {})))
        of = (record.name, tuple(record.p.shape), record.p.dtype, record.group, ranks, record.split)
        found.append(ParameterLayout(*of, optimizer.options, states))
    return found


def _held_of(split: Split, dtype: torch.dtype, options: ZeroOptions) -> tuple[Held, Held]:
    """Return a parameter's bytes on every rank, and the additional bytes on the ranks that own its elements."""
    travels = options.communication.dtype or dtype
    master = options.master_dtype(dtype)
    gradients = Held(gradients=(split.slice_size if options.stage == 2 else split.padded_numel) * travels.itemsize)
    everywhere = Held(parameters=split.padded_numel * dtype.itemsize)
    copied = options.cpu_offload or master != dtype or options.communication.in_fp8(split)
    elements = split.padded_numel // split.rows
    own = Held(masters=elements * master.itemsize if copied else 0)
    return (everywhere, own + gradients) if options.stage == 2 else (everywhere + gradients, own)


def with_buckets(groups: Iterable[tuple[Sequence[ParameterLayout], BucketPlan]], stage: int, rank: int = 0) -> Layout:
    """Place parameters in buckets by the plan of each shard group, and return the layout of all of them."""
    parameters: list[ParameterLayout] = []
    buckets: list[BucketLayout] = []
    for members, plan in groups:
        placed = list(members)
        for bucket in plan:
            for index, start in zip(bucket.members, bucket.starts, strict=True):
                placed[index] = replace(placed[index], bucket=len(buckets), offset=start)
            buckets.append(_bucket(len(buckets), bucket, members))
        parameters += placed
    return Layout(rank, stage, tuple(parameters), tuple(buckets))


def _bucket(number: int, planned: PlannedBucket, parameters: Sequence[ParameterLayout]) -> BucketLayout:
    first, names = parameters[planned.members[0]], tuple(parameters[index].name for index in planned.members)
    dtypes = first.communication_dtype, first.dtype
    return BucketLayout(number, first.process_group, names, planned, first.split.rows, *dtypes, first.split.owner)
