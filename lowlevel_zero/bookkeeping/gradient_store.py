"""The gradient store: reduced buckets, summed over micro-batches, until ``zero_grad``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ..streams import Streams
from .bucket_plan import PlannedBucket
from .bucket_store import Bucket, StepOnDevice
from .sharded_parameter import Handle, ShardedParameter, follow_edits
from .shown_gradients import clear_gradients, hide_gradients, retire_handles, show, unreduced
from .step_state import StepState

# It writes to a gradient ``g``.
Edit: TypeAlias = Callable[[Tensor], object]


@dataclass(eq=False, repr=False)
class GradientStore:
    """Keeps reduced gradients by bucket: summed over ranks and micro-batches, and times the loss scale.

    The first micro-batch's is kept as the reduction left it, in the buffer's dtype; further ones are added in fp32. A
    record's ``g`` is its part of its bucket's shard, so that averaging, unscaling, clipping and adding take one
    operation a bucket, however many parameters it has.

    All arithmetic but the step's own is done where the parameters are; until the ranks agree on a step's sums, that is
    beside the home stream.
    """

    _records: Sequence[ShardedParameter]  # the parameters, by index
    _stepping: StepOnDevice  # makes buckets, which keep their shards where steps are taken
    _state: StepState  # of the optimizer's step
    _streams: Streams  # what is used beside home is kept by these
    buckets: list[Bucket] = field(default_factory=list)  # in the order in which their first reductions ended
    _bucket_of: dict[int, Bucket] = field(default_factory=dict)
    taken_out: list[ShardedParameter] = field(default_factory=list)  # a backward isn't to meet theirs in ``p.grad``
    version: int = 0  # goes up with each change of a gradient

    # ---- what reductions leave ----

    def accumulate(self, bucket: Bucket, total: Tensor) -> None:
        """Keep a reduced bucket, or add it in fp32 to the sum; by parameter if members differ. Doesn't communicate."""
        self.version += 1
        before = list(dict.fromkeys(map(self._bucket_of.get, bucket.planned.members)))
        kept = before[0]
        if len(before) > 1 or (kept is not None and kept.planned.members != bucket.planned.members):
            self._merge(bucket, total, before)
        elif kept is None:
            bucket.hold(total)
            self._enter(bucket)
        else:
            kept.reused |= kept.stepped
            sums = self._raw(kept)
            kept.hold(sums.add_(_like(sums, total, bucket)))
            kept.empty.clear()

    def _enter(self, bucket: Bucket) -> None:
        self.buckets.append(bucket)
        self._bucket_of.update(dict.fromkeys(bucket.planned.members, bucket))

    def _merge(self, bucket: Bucket, total: Tensor, before: Sequence[Bucket | None]) -> None:
        """Add a reduced bucket to the sums in ``before``, parameter by parameter; keep the rest as a new bucket."""
        parts = dict(zip(bucket.planned.members, bucket.split(total), strict=True))
        for kept in before:
            if kept is not None:
                kept.reused |= kept.stepped
                sums = self._raw(kept)
                for index, part in zip(kept.planned.members, kept.split(sums), strict=True):
                    if index in parts:
                        part.add_(_like(sums, parts[index], bucket))
                kept.hold(sums)
                kept.empty.difference_update(parts)
        fresh = [record for record in bucket.records if record.index not in self._bucket_of]
        if fresh:
            members = tuple(record.index for record in fresh)
            sizes = tuple(record.split.slice_size for record in fresh)
            apart = self._stepping.new_bucket(PlannedBucket(-1, members, sizes), fresh)  # outside of the plan
            apart.hold(torch.cat([parts[record.index] for record in fresh], dim=-1))
            self._enter(apart)

    def _raw(self, bucket: Bucket) -> Tensor:
        """Return a bucket's sums, fp32 at least, neither averaged nor unscaled; the caller must ``hold`` them again.

        A step leaves gradients averaged, and as in torch they are still there for who doesn't call ``zero_grad``.
        """
        before = bucket.sums()
        self._streams.keep(before, bucket.scale)
        sums = at_least_fp32(before)
        if bucket.scale is not None:
            sums = sums * (bucket.scale / self._state.gradient_scale())
            bucket.scale = None
        return sums

    # ---- for the step ----

    def sums(self) -> list[Bucket]:
        """Return the buckets in a new list; averaged ones become sums again, and lose other ranks' rows.

        To multiply these too would take ``world_size`` times as long.
        """
        for bucket in self.buckets:
            if bucket.scale is not None:
                bucket.rows = None
                bucket.hold(self._raw(bucket))
        return list(self.buckets)

    def bucket_of(self, record: ShardedParameter) -> Bucket | None:
        """Return the bucket that holds ``g``, or None if there is no ``g``."""
        return self._bucket_of.get(record.index) if record.worked else None

    def norms(self, norm_type: float, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the norm of this rank's slice of each averaged, unscaled gradient, 0-d; 0 without one."""
        none = torch.zeros((), dtype=dtype, device=self._records[0].padded.device)
        found: dict[int, Tensor] = {}
        for bucket in self.buckets:
            if bucket.row.numel() == 0:  # another rank's, whose norms count there
                continue
            parts = list(bucket.split(bucket.fetch(bucket.row)))
            norms = torch.stack(torch._foreach_norm(parts, norm_type, dtype=dtype)) * self._scale(bucket)
            found.update(zip(bucket.planned.members, norms.unbind(), strict=True))
        return (found.get(record.index, none) for record in self._records)

    def multiply(self, records: Sequence[ShardedParameter], factor: float | Tensor) -> None:
        """Multiply some parameters' gradients by ``factor``; a whole bucket only notes it. Doesn't communicate."""
        for bucket, some in self._by_bucket(records).items():
            if len(set(some)) == len(some) == sum(record.worked for record in bucket.records):
                bucket.scale = self._scale(bucket) * factor
            else:
                for _, own in self._edited(some):
                    own.mul_(factor.to(own.device) if isinstance(factor, Tensor) else factor)

    def zero(self, records: Sequence[ShardedParameter]) -> None:
        """Set the gradients of ``records`` to zeros; a parameter without a gradient stays without."""
        self._zero_sums(self._by_bucket(records))
        for record in records:
            if record.pending is not None:
                record.pending = torch.zeros_like(record.pending, requires_grad=False)

    def drop(self, records: Sequence[ShardedParameter]) -> None:
        """Drop some parameters' sums, and buckets that have no others left. Doesn't communicate.

        Every rank drops the same ones behind the same reductions, so all ranks keep the same buckets in the same order.
        """
        found = self._by_bucket(records)
        for bucket, some in found.items():
            bucket.empty.update(record.index for record in some)
        self._streams.keep(*found)
        self._forget_empty()
        self._zero_sums({bucket: found[bucket] for bucket in self.buckets if bucket in found})

    def _zero_sums(self, found: Mapping[Bucket, Collection[ShardedParameter]]) -> None:
        """Set the sums of some parameters of each bucket to zeros, after applying the bucket's scale.

        A factor of the whole bucket is applied to the others first: times one that isn't finite zeros would be NaN.
        """
        for bucket, some in found.items():
            sums = bucket.sums() if bucket.scale is None else self._raw(bucket)
            wanted = set(some)
            for record, part in zip(bucket.records, bucket.split(sums), strict=True):
                if record in wanted:
                    part.zero_()
            bucket.hold(sums)
            bucket.reused = False

    def _forget_empty(self) -> None:
        self.buckets = [bucket for bucket in self.buckets if len(bucket.empty) < len(bucket.records)]
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.planned.members}

    def _by_bucket(self, records: Iterable[ShardedParameter]) -> dict[Bucket, list[ShardedParameter]]:
        """Group the records that have a gradient by bucket, and count a change of gradients."""
        self.version += 1
        found: dict[Bucket, list[ShardedParameter]] = {}
        for record in records:
            bucket = self._bucket_of.get(record.index)
            if bucket is not None:
                found.setdefault(bucket, []).append(record)
        return found

    def edit(self, records: Iterable[ShardedParameter], edits: Mapping[ShardedParameter, Iterable[Edit]]) -> None:
        """Average and unscale this rank's gradients, and apply ``edits`` to each, ``[n]`` without padding.

        In fp16 an element that overflowed stays as it is, so that the step is skipped, as ``GradScaler`` skips one
        whatever has been made of its gradients.
        """
        for record, own in self._edited(dict.fromkeys(records)):  # a gradient may be given twice
            before = own.clone() if self._state.scaler is not None else None
            for edit in edits[record]:
                edit(own)
            if before is not None:
                own.copy_(torch.where(before.isfinite(), own, before))

    def _edited(self, records: Iterable[ShardedParameter]) -> Iterator[tuple[ShardedParameter, Tensor]]:
        """Yield each record that has a gradient, with its averaged, unscaled slice to write; drop other ranks' rows."""
        for bucket, some in self._by_bucket(records).items():
            row, scale = at_least_fp32(bucket.to_step()), self._scale(bucket)
            if isinstance(scale, Tensor):
                self._streams.keep([scale])
                row = row * scale.to(row.device)
            elif scale != 1.0:
                row = row * scale
            _clear_absent(bucket, row)  # zeros times a factor that isn't finite, as of a clip, are NaN
            bucket.rows, bucket.row, bucket.scale = None, row, 1.0
            bucket.stepped = bucket.reused = False
            for record in some:
                start, stop = record.split.span(record.rank)
                yield record, bucket.part_of(record, bucket.row)[: stop - start]

    def _scale(self, bucket: Bucket) -> float | Tensor:
        return self._state.gradient_scale() if bucket.scale is None else bucket.scale

    # ---- what stands for them in ``p.grad`` ----

    def touched(self) -> list[ShardedParameter]:
        """Return records with a pending gradient, or whose ``p.grad`` or ``p32.grad`` isn't the handle shown there."""
        return [
            record
            for record in self._records
            if record.p.grad is not record.shown
            or record.p32.grad is not record.slice_handle
            or record.pending is not None
        ]

    def leftovers(self, touched: Iterable[ShardedParameter] | None = None) -> list[int]:
        """Return the indices of parameters whose ``p.grad`` holds an unreduced gradient."""
        return [
            record.index
            for record in (self.touched() if touched is None else touched)
            if unreduced(record) is not None and not record.is_empty
        ]

    def hide_cleared(self, touched: Iterable[ShardedParameter], adds: bool = False) -> list[ShardedParameter]:
        """Mark gradients as absent that the caller has set to None, or, if ``adds``, replaced; return their records.

        A later backward may have left another gradient in ``p.grad``. If a backward is about to add to gradients, one
        that the caller has assigned takes their place, too. Returns their records.
        """
        cleared = [
            record
            for record in touched
            if record.shown is not None
            and (
                record.p32.grad is None
                or (record.p.grad is not record.shown and (adds or record.p.grad is None or record.arrived))
            )
        ]
        hide_gradients(cleared)
        retire_handles(cleared)
        return cleared

    def with_sums(self, records: Iterable[ShardedParameter], in_flight: Iterable[Bucket]) -> list[ShardedParameter]:
        """Return the records of which there is a sum, or one ``in_flight``, that hasn't been dropped already."""
        held = {index for bucket in self.buckets for index in bucket.planned.members if index not in bucket.empty}
        for bucket in in_flight:  # in the order in which sums are added, and dropped behind them
            held.update(bucket.planned.members)
            held.difference_update(record.index for record in bucket.dropped_next)
        return [record for record in records if record.index in held]

    def take_out(self) -> None:
        """Take sharded gradients out of ``p.grad`` until ``put_back``, so that a backward leaves plain ones."""
        for record in self._records:
            if record.shown is not None and record.p.grad is record.shown and record.pending is None:
                record.p.grad = record.shown = None
                self.taken_out.append(record)

    def put_back(self) -> None:
        """Put the sharded gradients back into ``p.grad`` that no newer one has replaced."""
        show(record for record in self.taken_out if record.shown is None)
        self.taken_out.clear()

    def assigned(self, touched: Iterable[ShardedParameter]) -> dict[ShardedParameter, Tensor]:
        """Return the gradients that callers have assigned to ``p32.grad``, in its shape; they stay there."""
        given = ((record, record.p32.grad) for record in touched)
        return {r: gradient for r, gradient in given if gradient is not None and gradient is not r.slice_handle}

    def assign(self, assigned: Mapping[ShardedParameter, Tensor]) -> None:
        """Overwrite this rank's averaged gradients with the ones that callers have assigned to slices."""
        edits: dict[ShardedParameter, list[Edit]] = {}
        for record, given in assigned.items():
            value = given.to_local() if isinstance(given, Handle) else record.flat_slice(given.detach().to_dense())
            edits[record] = [partial(_copy, value)]
        self.edit(edits, edits)

    # ---- who had one ----

    def resolve(self, present: Sequence[int]) -> None:
        """Mark parameters that some rank used, by the presence map, as worked, and drop the others' gradients."""
        told = [record for record in self._records if record.shown is not None or record.index in self._bucket_of]
        unknown = [record for record in told if not record.worked]
        for record in unknown:
            record.worked = present[record.index] != 0
        if unknown:
            hide_gradients(record for record in unknown if not record.worked)
            for bucket in self.buckets:
                bucket.empty = {record.index for record in bucket.records if not record.worked}
            self._forget_empty()
            # If it fails, gathers are the others' all the same.
            follow_edits(record for record in unknown if record.worked)

    # ---- what callers see ----

    def averaged(self, record: ShardedParameter) -> Tensor | None:
        """Return this rank's slice of an averaged, unscaled gradient, ``[s]``, as a new tensor, or None."""
        bucket = self.bucket_of(record)
        if bucket is None:
            return None
        return at_least_fp32(bucket.fetch(bucket.part_of(record, bucket.row))) * self._scale(bucket)

    def averaged_rows(self, record: ShardedParameter) -> Tensor | None:
        """Return all ranks' slices of an averaged gradient, ``[world_size, s]``; None if only this rank's is kept."""
        bucket = self.bucket_of(record)
        if bucket is None or bucket.rows is None:
            return None
        return at_least_fp32(bucket.part_of(record, bucket.rows)) * self._scale(bucket)

    def held(self) -> list[Tensor]:
        """Return the tensors of all sums."""
        return [held for bucket in self.buckets for held in (bucket.rows, bucket.row) if held is not None]

    def clear(self) -> None:
        """Drop all gradients, also those in ``p.grad``. Doesn't communicate."""
        self.version += 1
        self.buckets.clear()
        self._bucket_of.clear()
        clear_gradients(self._records)


def _clear_absent(bucket: Bucket, row: Tensor) -> None:
    """Set the padding and the slices of unused parameters in this rank's ``row`` to zeros."""
    for record, part in zip(bucket.records, bucket.split(row), strict=True):
        start, stop = record.split.span(record.rank)
        elements = stop - start if record.worked else 0
        if elements < len(part):
            part[elements:].zero_()


def _like(sums: Tensor, total: Tensor, bucket: Bucket) -> Tensor:
    """Return ``total``, or only this rank's row of it, 1-D, if ``sums`` is 1-D."""
    return bucket.own_row(total) if total.dim() > sums.dim() else total


def _copy(value: Tensor, own: Tensor) -> None:
    own.copy_(value[: len(own)])


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return ``tensor`` itself, or a copy in fp32 if it is bf16 or fp16."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
