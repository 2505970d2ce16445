"""The gradient store: reduced gradients, accumulated over micro-batches, and who had one at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .bucket_plan import Bucket
from .parameter_store import ShardedParameter


class GradientStore:
    """Keeps each record's ``g``, as reductions leave it: summed over the ranks and times the loss scale.

    The first micro-batch's is kept in the wire's dtype, as a view of what the reduction left; further ones
    are added in fp32.

    Args:
        records: the parameters, by index.
        rank: this process's rank.
        raw_unit: makes what a gradient as reductions leave it is to be multiplied with to be averaged and unscaled.
    """

    def __init__(self, records: Sequence[ShardedParameter], rank: int, raw_unit: Callable[[], float | Tensor]) -> None:
        self._records = records
        self._rank = rank
        self.raw_unit = raw_unit
        self._flags: list[tuple[tuple[int, ...], Tensor]] = []
        self._late: Tensor | None = None

    # ---- what reductions leave ----

    def add(self, bucket: Bucket, total: Tensor) -> None:
        """Take a reduced bucket, ``[world_size, row]`` or this rank's ``[1, row]``, as one more micro-batch."""
        own = self._rank if total.shape[0] > 1 else 0
        records = [self._records[index] for index in bucket.members]
        parts = total[:, : bucket.body].split_with_sizes(bucket.sizes, dim=1) if records else ()
        self._accumulate(records, parts, own)
        flags = total[own, bucket.body :]
        if bucket.flags:
            self._flags.append((bucket.flags, flags[: len(bucket.flags)]))
        if bucket.last:
            self._late = flags[-1]

    def _accumulate(self, records: Sequence[ShardedParameter], parts: Sequence[Tensor], own: int) -> None:
        pairs = []
        for record, part in zip(records, parts, strict=True):
            if record.g is None:
                record.keep_gradient(part[own], part if len(part) > 1 else None)
            else:
                pairs.append(self._sum_and_addend(record, part, own))
        if pairs:
            torch._foreach_add_([total for total, _ in pairs], [addend for _, addend in pairs])

    def _sum_and_addend(self, record: ShardedParameter, part: Tensor, own: int) -> tuple[Tensor, Tensor]:
        """The fp32 sum so far, to be added to in place, and what is to be added: all rows, or this rank's."""
        self.make_raw([record])
        if record.whole is None:
            assert record.g is not None
            g = _at_least_fp32(record.g)
            record.keep_gradient(g)
            return g, part[own]
        whole = _at_least_fp32(record.whole)
        record.keep_gradient(whole[self._rank], whole)
        return whole, part

    def make_raw(self, records: Iterable[ShardedParameter]) -> None:
        """Bring gradients that a step has left averaged back to how reductions leave them.

        Only a caller who steps again without ``zero_grad`` in between needs it: as in torch, the old gradients
        are then still there.
        """
        for record in records:
            if record.unit is not None and record.g is not None:
                factor = record.unit / self.raw_unit()
                whole = None if record.whole is None else _at_least_fp32(record.whole) * factor
                g = _at_least_fp32(record.g) * factor if whole is None else whole[self._rank]
                record.keep_gradient(g, whole)

    def scale(self, records: Iterable[ShardedParameter], factor: Tensor) -> None:
        """Multiply gradients with ``factor``, when they are next used."""
        for record in records:
            record.unit = self._unit(record) * factor

    def hand_over(self, records: Sequence[ShardedParameter], factor: float | Tensor) -> None:
        """Give each ``p32`` its raw ``g`` times ``factor`` as gradient: in place where dtypes allow it."""
        in_place: list[tuple[ShardedParameter, Tensor]] = []
        copied: list[tuple[ShardedParameter, Tensor]] = []
        for record in records:
            if record.g is not None:
                (in_place if record.g.dtype == record.p32.dtype else copied).append((record, record.g))
        if in_place:
            torch._foreach_mul_([g for _, g in in_place], factor)  # a number or a tensor
        for record, g in in_place:
            record.p32.grad = g
            record.keep_gradient(g, unit=1.0)
        for record, grad in zip((record for record, _ in copied), _converted(copied, factor), strict=True):
            record.p32.grad = grad
            record.unit = factor

    # ---- who had one ----

    def late(self) -> bool:
        """Whether a rank got a gradient after its bucket had left in the last round (reads one number)."""
        return self._late is not None and self._late.item() > 0

    def resolve(self) -> None:
        """Drop the gradients of parameters that no rank used, whose sum is but zeros.

        What this rank used it knows; only if there is anything else it reads the flags, all in one copy.
        """
        unknown = [record for record in self._records if record.g is not None and not record.worked]
        if unknown and self._flags:
            indices = [index for flagged, _ in self._flags for index in flagged]
            device = self._flags[0][1].device
            counts = torch.cat([flags.to(device, torch.float32) for _, flags in self._flags]).tolist()
            for index, count in zip(indices, counts, strict=True):
                self._records[index].worked |= count > 0
        for record in unknown:
            if not record.worked:
                record.drop_gradient()
        self._flags.clear()

    # ---- what callers see ----

    def averaged(self, record: ShardedParameter) -> Tensor | None:
        """The slice of the averaged, unscaled gradient, ``[s]``, fp32 at least, or None; a new tensor."""
        if record.g is None:
            return None
        return _at_least_fp32(record.g) * self._unit(record)

    def averaged_rows(self, record: ShardedParameter) -> Tensor | None:
        """The same of every rank, ``[world_size, s]``, where it is kept (stage 1, before the step), or None."""
        if record.whole is None:
            return None
        return _at_least_fp32(record.whole) * self._unit(record)

    def _unit(self, record: ShardedParameter) -> float | Tensor:
        return self.raw_unit() if record.unit is None else record.unit

    def clear(self) -> None:
        """Forget all gradients."""
        self._flags.clear()
        self._late = None
        for record in self._records:
            record.drop_gradient()

    def zero(self) -> None:
        """Make all gradients zeros; a parameter that has one goes on having one."""
        for record in self._records:
            if record.g is not None:
                record.keep_gradient(torch.zeros_like(record.g))


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _converted(pairs: Sequence[tuple[ShardedParameter, Tensor]], factor: float | Tensor) -> list[Tensor]:
    """Each ``g`` times ``factor`` in its ``p32``'s dtype, computed in fp32 at least, in one buffer."""
    if not pairs:
        return []
    lead = pairs[0][0].p32
    sizes = [g.numel() for _, g in pairs]
    buffer = torch.empty(sum(sizes), dtype=torch.promote_types(lead.dtype, torch.float32), device=lead.device)
    parts = buffer.split_with_sizes(sizes)
    torch._foreach_copy_(parts, [g for _, g in pairs])
    buffer.mul_(factor)
    return [part.to(record.p32.dtype) for part, (record, _) in zip(parts, pairs, strict=True)]
