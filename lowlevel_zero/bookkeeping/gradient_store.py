"""The gradient store: reduced buckets, accumulated over micro-batches, until the step and beyond, to ``zero_grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .bucket_plan import PlannedBucket
from .bucket_store import Bucket, BucketState
from .offload import DeviceHome
from .parameter_store import ShardedParameter


class GradientStore:
    """Keeps what reductions leave, by bucket: summed over the ranks and times the loss scale.

    The first micro-batch's is kept as the reduction left it, in the buffer's dtype; further ones are added in fp32. A
    record's ``g`` is its part of its bucket's shard, so that averaging, unscaling, clipping and adding take one
    operation a bucket, however many parameters it has.

    Args:
        records: the parameters, by index.
        rank: this process's rank.
        gradient_scale: makes what a gradient as reductions leave it is to be multiplied with to be averaged and
            unscaled.
        home: where shards rest. All arithmetic but the step's own is done where the parameters are.

    Attributes:
        exposed: each ``g`` is complete, averaged and unscaled, and its caller's to edit, as ``p32.grad``.
    """

    def __init__(
        self,
        records: Sequence[ShardedParameter],
        rank: int,
        gradient_scale: Callable[[], float | Tensor],
        home: DeviceHome,
    ) -> None:
        self._records = records
        self._rank = rank
        self._gradient_scale = gradient_scale
        self._home = home
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self.exposed = False

    # ---- what reductions leave ----

    def accumulate(self, bucket: Bucket, total: Tensor) -> None:
        """Take a reduced bucket as one more micro-batch: its sum, this rank's row or all."""
        before = list(dict.fromkeys(map(self._bucket_of.get, bucket.planned.members)))
        kept = before[0]
        if len(before) > 1 or (kept is not None and kept.planned.members != bucket.planned.members):
            self._merge(bucket, total, before)
        elif kept is None:
            self._keep(bucket, total)
        else:
            sums = self._raw(kept)
            kept.hold(sums.add_(self._like(sums, total)), self._rank)

    def _keep(self, bucket: Bucket, total: Tensor) -> None:
        self._enter(bucket)
        bucket.hold(total, self._rank)

    def _enter(self, bucket: Bucket) -> None:
        bucket.shard = self._home.shard(bucket.records[0].padded.device)
        self._buckets.append(bucket)
        self._bucket_of.update(dict.fromkeys(bucket.planned.members, bucket))

    def _merge(self, bucket: Bucket, total: Tensor, before: Sequence[Bucket | None]) -> None:
        """Add, member by member, a bucket of other members than those that the sums ``before`` are of."""
        parts = dict(zip(bucket.planned.members, bucket.split(total), strict=True))
        for kept in before:
            if kept is not None:
                sums = self._raw(kept)
                for index, part in zip(kept.planned.members, kept.split(sums), strict=True):
                    if index in parts:
                        part.add_(self._like(sums, parts[index]))
                kept.hold(sums, self._rank)
        fresh = [record for record in bucket.records if record.index not in self._bucket_of]
        if fresh:
            self._keep(_bucket_apart(fresh), torch.cat([parts[record.index] for record in fresh], dim=-1))

    def _like(self, sums: Tensor, total: Tensor) -> Tensor:
        """``total``, or this rank's row of it where ``sums`` aren't all ranks'."""
        return total[self._rank] if total.dim() > sums.dim() else total

    def _raw(self, bucket: Bucket) -> Tensor:
        """A bucket's sums, fit to be added to: in fp32 at least, as reductions leave them; ``hold`` has to follow.

        A step leaves gradients averaged, and as in torch they are still there for who doesn't call ``zero_grad``.
        """
        sums = at_least_fp32(bucket.sums())
        if bucket.scale is not None:
            sums = sums * (bucket.scale / self._gradient_scale())
            bucket.scale = None
        bucket.state = BucketState.REDUCED
        return sums

    # ---- what the step takes ----

    def sums(self) -> list[Bucket]:
        """The buckets with gradients, their sums as reductions leave them, or as ``expose`` does.

        Of what has been scaled, others' rows are let go: to multiply them too would take ``world_size`` times as long.
        """
        for bucket in self._buckets:
            if bucket.scale is not None and not self.exposed:
                bucket.rows = None
                bucket.hold(self._raw(bucket), self._rank)
        return list(self._buckets)

    def bucket_of(self, record: ShardedParameter) -> Bucket | None:
        """The bucket that ``g`` is a part of, or None: there is no ``g``."""
        return self._bucket_of.get(record.index) if record.worked else None

    def scale(self, buckets: Sequence[Bucket], factor: Tensor) -> None:
        """Multiply gradients with ``factor``: when they are next used, or, where they are exposed, now."""
        for bucket in buckets:
            if self.exposed:
                bucket.shard.row.mul_(factor.to(bucket.shard.row.device))
            else:
                bucket.scale = self._scale(bucket) * factor

    def _scale(self, bucket: Bucket) -> float | Tensor:
        return self._gradient_scale() if bucket.scale is None else bucket.scale

    def overwrite(self, record: ShardedParameter, own: Tensor) -> None:
        """Let the averaged, unscaled ``g`` of a parameter that has one be ``own``, ``[s]``; others' rows are let go."""
        bucket = self._bucket_of[record.index]
        if self.exposed:
            bucket.part_of(record).copy_(own)
            return
        bucket.rows = None
        sums = self._raw(bucket)
        bucket.split(sums)[bucket.planned.members.index(record.index)].copy_(own.to(sums) / self._gradient_scale())
        bucket.hold(sums, self._rank)

    # ---- what callers may edit, between ``synchronize`` and ``step`` ----

    def expose(self, scale: float | Tensor) -> None:
        """Make gradients of sums, averaged and unscaled by ``scale``, and show each ``p32`` its own as ``p32.grad``."""
        for bucket in self.sums():
            row = at_least_fp32(bucket.shard.to_step()).mul_(scale)
            bucket.hold_for_step(row.to(bucket.records[0].p32.dtype))
            for record in bucket.working():
                record.p32.grad = bucket.part_of(record)
        self.exposed = True

    def absorb(self) -> None:
        """Let ``g`` be what callers have made of each ``p32.grad``: edited, replaced, taken away or added."""
        edited = self._edited()
        for record in self._records:
            bucket = self._bucket_of.get(record.index)
            if bucket is None:
                if record.index in edited:
                    self._adopt(record, edited[record.index])
                continue
            if record.index in edited:
                bucket.part_of(record).copy_(edited[record.index])
                record.p32.grad = bucket.part_of(record)
            elif record.p32.grad is None:
                bucket.part_of(record).zero_()
            record.worked = record.p32.grad is not None
        self._drop_empty()
        for bucket in self._buckets:
            self._clear_padding(bucket)
            bucket.shard.hold_for_step(bucket.shard.row)

    def _edited(self) -> dict[int, Tensor]:
        """By index, what callers have assigned in place of the gradients that they were shown."""
        ours = {bucket.shard.row.untyped_storage().data_ptr() for bucket in self._buckets}
        edited = {}
        for record in self._records:
            gradient, bucket = record.p32.grad, self.bucket_of(record)
            if gradient is not None and (bucket is None or gradient is not bucket.part_of(record)):
                shared = gradient.untyped_storage().data_ptr() in ours  # another slice's, say, that is replaced too
                edited[record.index] = gradient.detach().clone() if shared else gradient.detach()
        return edited

    def _adopt(self, record: ShardedParameter, gradient: Tensor) -> None:
        """Have a gradient that no reduction left."""
        bucket = _bucket_apart([record])
        bucket.state = BucketState.REDUCED
        self._enter(bucket)
        bucket.hold_for_step(gradient.clone())
        record.worked = True
        record.p32.grad = bucket.part_of(record)

    def _clear_padding(self, bucket: Bucket) -> None:
        """Make zeros of what an edit has left in a slice behind the parameter's end, and a norm would count."""
        for record in bucket.working():
            start, stop = record.split.span(self._rank)
            if stop - start < record.split.slice_size:
                bucket.part_of(record)[stop - start :].zero_()

    def conceal(self) -> None:
        """Show gradients no longer."""
        self.exposed = False
        for record in self._records:
            record.p32.grad = None

    # ---- who had one ----

    def resolve(self, present: Sequence[int]) -> None:
        """Tell parameters that a rank used from those that none did, whose sum is but zeros, and drop those.

        Args:
            present: the presence map: by index, not 0 where some rank had a gradient.
        """
        unknown = [record for record in self._records if not record.worked and record.index in self._bucket_of]
        for record in unknown:
            record.worked = present[record.index] != 0
        if unknown:
            self._drop_empty()

    def _drop_empty(self) -> None:
        """Let go of buckets that hold no ``g`` any more."""
        self._buckets = [bucket for bucket in self._buckets if bucket.working()]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.planned.members}

    # ---- what callers see ----

    def averaged(self, record: ShardedParameter) -> Tensor | None:
        """The slice of the averaged, unscaled gradient, ``[s]``, fp32 at least, or None; a new tensor."""
        bucket = self.bucket_of(record)
        if bucket is None:
            return None
        return at_least_fp32(bucket.shard.fetch_part(bucket.part_of(record))) * self._scale(bucket)

    def averaged_rows(self, record: ShardedParameter) -> Tensor | None:
        """The same of every rank, ``[world_size, s]``, where it is kept (stage 1, before the step), or None."""
        bucket = self.bucket_of(record)
        if bucket is None or bucket.rows is None:
            return None
        rows = bucket.split(bucket.rows)[bucket.planned.members.index(record.index)]
        return at_least_fp32(rows) * self._scale(bucket)

    def held(self) -> list[Tensor]:
        """The tensors of all sums."""
        return [held for bucket in self._buckets for held in (bucket.rows, bucket.shard.row) if held is not None]

    def clear(self) -> None:
        """Forget all gradients."""
        self._buckets.clear()
        self._bucket_of.clear()
        for record in self._records:
            record.worked = False

    def zero(self) -> None:
        """Make all gradients zeros; a parameter that has one goes on having one."""
        for bucket in self._buckets:
            bucket.rows = None
            bucket.scale = None
            bucket.hold(torch.zeros_like(bucket.sums()), self._rank)


def _bucket_apart(records: Sequence[ShardedParameter]) -> Bucket:
    """A bucket outside of the plan, of what came with others than it usually does."""
    sizes = tuple(record.split.slice_size for record in records)
    planned = PlannedBucket(-1, tuple(record.index for record in records), sizes, sum(sizes))
    return Bucket(planned, records)


def at_least_fp32(tensor: Tensor) -> Tensor:
    """In fp32, or fp64 where it is that."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
