"""Gradient access between backward and step: norms, clipping, edits, full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from ..bookkeeping.gradient_store import GradientStore
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..bookkeeping.shown_gradients import is_slice_edited
from ..bookkeeping.step_state import Damage
from ..communication.agreement import NORMS
from ..communication.progress import GATHER
from ..communication.shard_group import ShardGroup
from ..sharded_group import ShardedGroup
from ..state.values import Slice, whole_gradients, whole_slices
from .calls import Calls

# It changes the gradients of some records.
Change: TypeAlias = Callable[[GradientStore, list[ShardedParameter]], object]


class OptimizerGradients:
    """Reads and edits the gradients of one optimizer's parameters, for ``ShardedGradient`` and clipping.

    Args:
        groups: the parameters by the ranks that share them; the list may grow.
        calls: begins the calls that all ranks make together.
    """

    def __init__(self, groups: Sequence[ShardedGroup], calls: Calls) -> None:
        self._groups = groups
        self._calls = calls
        self._known: dict[float, list[Tensor]] = {}
        self._known_at: tuple[int, ...] = ()

    # ---- for torch's own functions, on one parameter's p.grad after the other ----

    def norms(self, records: Sequence[ShardedParameter], norm_type: float) -> list[Tensor]:
        """Return the norm of each whole gradient, averaged and unscaled, 0-d. Communicates unless it is known.

        One collective brings all norms, which are kept until gradients change; the caller gets copies, and may write to
        them. With experts it raises ``RuntimeError``.
        """
        self._check(norm_type)
        if self._calls.has_experts:
            raise RuntimeError(
                f"{records[0].name}: expected norms of p.grad of parameters that all ranks share, but each rank has "
                "experts of its own, whose norms others don't see: call optimizer.clip_grad_norm_ or "
                "lowlevel_zero.clip_grad_norm_, which count all of them"
            )
        if not self._is_finished(records) or self._known_at != self.versions or norm_type not in self._known:
            (group,) = self._groups
            with self._gathering(self._calls.ranks, lambda: self._together(self._zeros(len(group.records)), norm_type)):
                without = [record for record in group.records if record.p.grad is None]
                self._calls.finish_gradients(self._calls.enter(NORMS))
                self._refuse_late(without)
                if self._known_at != self.versions:
                    self._known.clear()
                    self._known_at = self.versions
                own = torch.stack(list(group.gradients.norms(norm_type, self._dtype)))
                self._known[norm_type] = list(self._together(own, norm_type).unbind())
        known = self._known[norm_type]
        return list(torch._foreach_mul([known[record.index] for record in records], 1.0))

    def _refuse_late(self, without: Iterable[ShardedParameter]) -> None:
        """Raise ``RuntimeError`` if a parameter ``without`` a gradient has got one by finishing the reductions."""
        late = [record.name for record in without if record.p.grad is not None]
        if late:
            raise RuntimeError(
                f"{late[0]}: expected norms of p.grad after the same backwards on every rank, but other ranks have run "
                "more, or layers that are run again in the backward and that this one has left out. It had no gradient "
                "of it when it took norms: clip by lowlevel_zero.clip_grad_norm_, and begin the step anew with "
                "optimizer.zero_grad() on all"
            )

    def change(self, records: Iterable[ShardedParameter], what: str, change: Change) -> None:
        """Finish reductions, and apply ``change`` to the gradients of ``records`` on this rank. Communicates.

        Where the change fails on this rank, its gradients are lost.

        Args:
            what: names the change. The ranks compare changes in their next call, since one that some ranks alone make
                would leave a gradient of several makings.
            change: a method of ``GradientStore`` that takes records.
        """
        for each, some in self._complete(records):
            more = f" and {len(some) - 1} more" if len(some) > 1 else ""
            each.reducer.edited[f"{some[0].common_name}{more} by {what}"] += 1
            try:
                change(each.gradients, some)
            except BaseException as error:
                self._calls.state.failure.note(error, Damage.GRADIENTS)
                raise

    def _complete(self, records: Iterable[ShardedParameter]) -> Iterator[tuple[ShardedGroup, list[ShardedParameter]]]:
        """Finish reductions, and yield each shard group with the records that have a gradient. Communicates."""
        if not self._is_finished(records):
            self._calls.finish_gradients(self._calls.enter("edit p.grad"))
        for each in self._groups:
            some = [record for record in records if record.shard_group == each.number and record.worked]
            if some:
                yield each, some

    @torch.no_grad()
    def whole(self, record: ShardedParameter, doing: str = "read p.grad") -> Tensor | None:
        """Gather a whole gradient, averaged and unscaled, in ``p``'s dtype; None if no rank has one. Communicates.

        Every rank calls it, for the same parameter; ranks that read different ones raise. ``doing`` names the call.
        """
        of_record = self.group_of(record)
        with self._gathering(of_record.group, lambda: list(whole_gradients([record], of_record))):
            self._calls.finish_gradients_to_read(record, doing)
            (whole,) = whole_gradients([record], of_record)
            return None if whole is None else whole.to(record.p.dtype)

    def own(self, record: ShardedParameter) -> Tensor:
        """Finish reductions, and return a copy of this rank's slice, ``[s]``, averaged, or zeros. Communicates."""
        for each, _ in self._complete([record]):
            own = each.gradients.averaged(record)
            if own is not None:
                return own
        dtype = torch.promote_types(record.communication_dtype, torch.float32)
        return torch.zeros(record.row.numel(), dtype=dtype, device=record.padded.device)

    @torch.no_grad()
    def gathered(self, record: ShardedParameter, own: Tensor) -> Tensor:
        """Gather ``own``, each rank's slice of a detached gradient, and return the whole one. Every rank calls it."""
        doing = f"read a detached p.grad of {record.common_name}"
        self._calls.finish_syncs(doing, updates=True)
        (whole,) = whole_slices([Slice.of_row(record, own)], self.group_of(record).group)
        return whole.to(record.p.dtype)

    def group_of(self, record: ShardedParameter) -> ShardedGroup:
        """Return the sharded group that a record belongs to."""
        return next(each for each in self._groups if each.number == record.shard_group)

    # ---- for this package's own clipping, on all parameters of a call together ----

    def finish(self, doing: str) -> None:
        """Finish reductions in the call ``doing``, also where no gradient has come on this rank. Communicates."""
        self._calls.finish_gradients(self._calls.enter(doing))

    def norm(self, records: Iterable[ShardedParameter], norm_type: float) -> Tensor:
        """Return the norm of some parameters' gradients together, experts included, 0-d. Communicates."""
        self._check(norm_type)
        with self._gathering(self._calls.ranks, lambda: self._together(self._zeros(1), norm_type)):
            self.finish("lowlevel_zero.clip_grad_norm_")
            wanted = set(records)
            pieces = list(self._zeros(1))
            for each in self._groups:
                measured = zip(each.records, each.gradients.norms(norm_type, self._dtype), strict=True)
                pieces += [norm for record, norm in measured if record in wanted]
            own: Tensor = torch.linalg.vector_norm(torch.stack(pieces), norm_type)
            return self._together(own.view(1), norm_type)[0]

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self._dtype, device=self._groups[0].records[0].padded.device)

    @contextmanager
    def _gathering(self, group: ShardGroup, gather: Callable[[], object]) -> Iterator[None]:
        """Run a body that gathers once; if this rank fails between the agreement and the gather, call ``gather``."""
        begun = group.progress.begun[GATHER]

        def catch_up() -> None:
            if group.progress.begun[GATHER] == begun:
                gather()

        with self._calls.taking_part(catch_up):
            yield

    @staticmethod
    def _check(norm_type: float) -> None:
        if not norm_type > 0:
            raise ValueError(f"norm_type: expected a number above 0, or inf, got {norm_type}")

    def _together(self, own: Tensor, norm_type: float) -> Tensor:
        """Combine the norms of slices, ``[n]``, to norms of whole gradients, the same on all ranks. Communicates."""
        group = self._calls.ranks
        rows = own.new_empty(group.size, len(own))
        rows[group.rank] = own
        norms: Tensor = torch.linalg.vector_norm(group.all_gather(rows).wait(), norm_type, dim=0)
        return norms

    @property
    def _dtype(self) -> torch.dtype:
        """Return the dtype of norms: fp64 if a parameter of any rank is fp64, else fp32."""
        records = [record for each in self._groups for record in each.records]
        double = any(torch.float64 in (record.p.dtype, record.communication_dtype) for record in records)
        return torch.float64 if double else torch.float32

    def _is_finished(self, records: Iterable[ShardedParameter]) -> bool:
        """Return whether no gradient has come, or been assigned to a slice, since the ranks finished reductions."""
        return self._calls.state.complete and not any(map(is_slice_edited, records))

    def is_unchanged(self, record: ShardedParameter, since: tuple[int, ...]) -> bool:
        """Return whether no gradient has come or changed since ``versions`` was ``since``.

        Versions alone wouldn't do: they go up when a reduction ends, which it does sooner on one rank than on another.
        """
        return self._is_finished([record]) and self.versions == since

    @property
    def versions(self) -> tuple[int, ...]:
        """Return a tuple that changes whenever a gradient changes."""
        return tuple(each.gradients.version for each in self._groups)
