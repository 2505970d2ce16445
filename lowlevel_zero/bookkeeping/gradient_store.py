"""The gradient store: reduced gradients, accumulated over micro-batches, and who had one at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..streams import Passed
from .bucket_plan import Bucket
from .gradient_sum import GradientSum, Scale
from .offload import Landing, Offload
from .parameter_store import ShardedParameter


class GradientStore:
    """Keeps what reductions leave, by bucket: summed over the ranks and times the loss scale.

    The first micro-batch's is kept as the reduction left it, in the wire's dtype; further ones are added in
    fp32. A record's ``g`` is its part of its bucket's sum, so that averaging, unscaling, clipping and adding
    take one operation a bucket, however many parameters it has.

    Args:
        records: the parameters, by index.
        rank: this process's rank.
        raw_unit: makes what a gradient as reductions leave it is to be multiplied with to be averaged and unscaled.
        offload: brings rows to the host and back; None: they stay where they are. All arithmetic but the step's own
            is done on the device, so the host waits for rows at the step alone.

    Attributes:
        exposed: each ``g`` is complete, averaged and unscaled, and its caller's to edit, as ``p32.grad``.
    """

    def __init__(
        self,
        records: Sequence[ShardedParameter],
        rank: int,
        raw_unit: Callable[[], float | Tensor],
        offload: Offload | None = None,
    ) -> None:
        self._offload = offload
        self._records = records
        self._rank = rank
        self.raw_unit = raw_unit
        self._sums: list[GradientSum] = []
        self.exposed = False

    # ---- what reductions leave ----

    def add(self, bucket: Bucket, row: Tensor, rows: Tensor | None) -> None:
        """Take a reduced bucket as one more micro-batch: its ``row``, and ``rows`` if all are kept."""
        for each in self._sums_of(bucket.members):
            self._fetch(each)
        body = None if rows is None else rows[:, : bucket.body]
        self._accumulate(GradientSum(bucket.members, bucket.sizes, row[: bucket.body], body))
        for each in self._sums_of(bucket.members):
            self._bring_down(each)

    def _accumulate(self, new: GradientSum) -> None:
        before = {record.sum: None for index in new.members if (record := self._records[index]).sum is not None}
        if not before:
            self._keep(new)
            return
        (kept, *others) = before
        if not others and kept is not None and kept.members == new.members:
            self._promote(kept)
            _add(kept, new)
            self._show(kept)
        else:
            self._merge(new)

    def _sums_of(self, members: Iterable[int]) -> list[GradientSum]:
        """What is summed for these, if rows rest on the host."""
        if self._offload is None:
            return []
        return [total for total in dict.fromkeys(self._records[index].sum for index in members) if total is not None]

    def _fetch(self, total: GradientSum) -> None:
        """Have the row on the device."""
        if self._offload is not None and total.landing is not None:
            rows = total.rows
            own = self._offload.fetch(total.landing) if rows is None else rows[self._rank]
            total.hold(own, rows)

    def _bring_down(self, total: GradientSum) -> None:
        """Let the row go down to the host, having measured it."""
        if self._offload is not None and total.landing is None:
            norm = _norm_of(total.row)
            total.rest_on_host(self._offload.down(total.row), norm)

    def _keep(self, new: GradientSum) -> None:
        self._sums.append(new)
        self._show(new)

    def _show(self, total: GradientSum) -> None:
        """Let the members see where their gradients are."""
        for index in total.members:
            self._records[index].sum = total

    def _merge(self, new: GradientSum) -> None:
        """Add, member by member, a bucket of other members than those that the sums so far are of."""
        for index, size in zip(new.members, new.sizes, strict=True):
            record = self._records[index]
            rows = new.rows_of(index)
            addend = GradientSum((index,), (size,), new.part_of(index), rows)
            if record.sum is None:
                self._keep(addend)
                continue
            self._promote(record.sum)
            before = record.sum.rows_of(index)
            if before is None or rows is None:
                record.sum.part_of(index).add_(addend.row)
            else:
                before += rows

    def _promote(self, total: GradientSum) -> None:
        """Make a sum fit to be added to: in fp32 at least, and as reductions leave it.

        A step leaves gradients averaged, and as in torch they are still there for who doesn't call ``zero_grad``.
        """
        factor = None if total.unit is None else total.unit / self.raw_unit()
        held = total.row if total.rows is None else total.rows
        wide = _at_least_fp32(held) if factor is None else _at_least_fp32(held) * factor
        if wide is held:
            return
        total.unit = None
        if total.rows is None:
            total.hold(wide)
        else:
            total.hold(wide[self._rank], wide)

    # ---- what the step takes ----

    def sums(self) -> list[GradientSum]:
        """What has been summed for parameters that worked, as reductions leave it, or as ``expose`` does.

        Of what has been scaled, others' rows are let go: to multiply them too would take ``world_size`` times as long.
        """
        for total in self._sums:
            if total.unit is not None and not self.exposed:
                self._fetch(total)
                total.forget_others()
                self._promote(total)
                self._bring_down(total)
        return list(self._sums)

    def working(self, total: GradientSum) -> list[ShardedParameter]:
        """The mapping p <-> p32 <-> g of one sum: the members that a rank used, and no dropped layer's."""
        return [record for index in total.members if (record := self._records[index]).sum is total]

    def scale(self, sums: Iterable[GradientSum], factor: Tensor) -> None:
        """Multiply gradients with ``factor``: when they are next used, or, where they are exposed, now."""
        for total in sums:
            if self.exposed:
                total.row.mul_(factor.to(total.row.device))
            else:
                total.unit = self._unit(total) * factor

    def hand_over(
        self,
        total: GradientSum,
        working: Sequence[ShardedParameter],
        scale: Scale,
        by_optimizer: bool,
    ) -> None:
        """Give each ``p32`` its raw ``g``, scaled, as gradient: in place where dtypes allow it.

        Args:
            total: what has been summed.
            working: those of its members that worked.
            scale: how sums become gradients.
            by_optimizer: the optimizer multiplies in its own kernel, and writes gradients back so unless it skips. What
                is kept doesn't depend on it, since ranks may differ in it.
        """
        dtype = working[0].p32.dtype
        if self._offload is not None and total.landing is not None:
            self._offload.wait(total.landing)
        row = total.row
        if row.dtype == dtype and scale.overflow is None:
            total.forget_others()
            total.unit = 1.0
        else:
            total.unit = scale.unit
            row = row.to(torch.promote_types(row.dtype, torch.float32), copy=True)
        if not (by_optimizer or scale.exact):
            row.mul_(scale.unit)
        gradients = total.cut(row.to(dtype))
        if len(working) == len(gradients):
            for record, gradient in zip(working, gradients, strict=True):
                record.p32.grad = gradient
            return
        gradient_of = dict(zip(total.members, gradients, strict=True))
        for record in working:
            record.p32.grad = gradient_of[record.index]

    def overwrite(self, record: ShardedParameter, own: Tensor) -> None:
        """Let the averaged, unscaled ``g`` of a parameter that has one be ``own``, ``[s]``; others' rows are let go."""
        total = record.sum
        assert total is not None
        if self.exposed:
            total.part_of(record.index).copy_(own)
            return
        self._fetch(total)
        self._promote(total)
        total.forget_others()
        total.part_of(record.index).copy_(own.to(total.row) / self.raw_unit())
        self._bring_down(total)

    # ---- what callers may edit, between ``synchronize`` and ``step`` ----

    def expose(self, unit: float | Tensor) -> None:
        """Make gradients of sums, averaged and unscaled by ``unit``, and show each ``p32`` its own as ``p32.grad``."""
        for total in self.sums():
            working = self.working(total)
            if self._offload is not None and total.landing is not None:
                self._offload.wait(total.landing)
            row = _at_least_fp32(total.row).mul_(unit).to(working[0].p32.dtype)
            self._make_final(total, row, working[0].padded.device)
            for record in working:
                record.p32.grad = total.part_of(record.index)
        self.exposed = True

    def absorb(self) -> None:
        """Let ``g`` be what callers have made of each ``p32.grad``: edited, replaced, taken away or added."""
        ours = {total.row.untyped_storage().data_ptr() for total in self._sums}
        replaced = []
        for record in self._records:
            gradient, total = record.p32.grad, record.sum
            if gradient is None and total is not None:
                total.part_of(record.index).zero_()
                record.drop_gradient()
            elif gradient is not None and (total is None or gradient is not total.part_of(record.index)):
                shared = gradient.untyped_storage().data_ptr() in ours  # another slice's, say, that is replaced too
                replaced.append((record, gradient.detach().clone() if shared else gradient.detach()))
        for record, gradient in replaced:
            if record.sum is None:
                self._adopt(record, gradient.clone())
            else:
                record.sum.part_of(record.index).copy_(gradient)
                record.p32.grad = record.sum.part_of(record.index)
        self._sums = [total for total in self._sums if self.working(total)]
        for total in self._sums:
            self._clear_padding(total)
            if total.landing is not None:
                total.norm = _norm_of(total.row).to(total.landing.device)

    def conceal(self) -> None:
        """Show gradients no longer, if they were."""
        if self.exposed:
            self.exposed = False
            for record in self._records:
                record.p32.grad = None

    def _clear_padding(self, total: GradientSum) -> None:
        """Make zeros of what an edit has left in a slice behind the parameter's end, and a norm would count."""
        for record in self.working(total):
            start, stop = record.split.span(self._rank)
            if stop - start < record.split.slice_size:
                total.part_of(record.index)[stop - start :].zero_()

    def _adopt(self, record: ShardedParameter, gradient: Tensor) -> None:
        """Have a gradient that no reduction left."""
        total = GradientSum((record.index,), (gradient.numel(),), gradient)
        self._make_final(total, gradient, record.padded.device)
        self._keep(total)
        record.worked = True
        record.p32.grad = gradient

    def _make_final(self, total: GradientSum, row: Tensor, device: torch.device) -> None:
        total.hold(row)
        total.unit = 1.0
        if self._offload is not None:
            total.rest_on_host(Landing(row, Passed(), device), _norm_of(row).to(device))

    # ---- who had one ----

    def resolve(self, present: Sequence[int]) -> None:
        """Drop the gradients of parameters that no rank used, whose sum is but zeros.

        Args:
            present: the presence map: by index, not 0 where some rank had a gradient.
        """
        unknown = [record for record in self._records if record.sum is not None and not record.worked]
        for record in unknown:
            if present[record.index]:
                record.worked = True
            else:
                record.drop_gradient()
        if unknown:
            self._sums = [total for total in self._sums if self.working(total)]

    # ---- what callers see ----

    def averaged(self, record: ShardedParameter) -> Tensor | None:
        """The slice of the averaged, unscaled gradient, ``[s]``, fp32 at least, or None; a new tensor."""
        if record.sum is None:
            return None
        own = record.sum.part_of(record.index)
        if self._offload is not None and record.sum.landing is not None:
            own = self._offload.fetch_part(record.sum.landing, own)
        return _at_least_fp32(own) * self._unit(record.sum)

    def averaged_rows(self, record: ShardedParameter) -> Tensor | None:
        """The same of every rank, ``[world_size, s]``, where it is kept (stage 1, before the step), or None."""
        rows = None if record.sum is None else record.sum.rows_of(record.index)
        if rows is None or record.sum is None:
            return None
        return _at_least_fp32(rows) * self._unit(record.sum)

    def _unit(self, total: GradientSum) -> float | Tensor:
        return self.raw_unit() if total.unit is None else total.unit

    def held(self) -> list[Tensor]:
        """The tensors of all sums."""
        return [held for total in self._sums for held in (total.rows, total.row) if held is not None]

    def clear(self) -> None:
        """Forget all gradients."""
        self._sums.clear()
        for record in self._records:
            record.sum = None
            record.worked = False

    def zero(self) -> None:
        """Make all gradients zeros; a parameter that has one goes on having one."""
        for total in self._sums:
            self._fetch(total)
            total.hold(torch.zeros_like(total.row))
            total.unit = None
            self._bring_down(total)


def _add(total: GradientSum, addend: GradientSum) -> None:
    if total.rows is None or addend.rows is None:
        total.row.add_(addend.row)
    else:
        total.rows.add_(addend.rows)


def _norm_of(row: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(row, dtype=torch.promote_types(row.dtype, torch.float32))
    return norm


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
