"""Steps the wrapped optimizer: bucket by bucket, and letting it scale its gradients, where that is the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as _torch_optimizer

from .bookkeeping.gradient_sum import GradientSum, Scale
from .bookkeeping.parameter_store import ShardedParameter
from .construction import ShardedGroup
from .grad_norm import GlobalNorm
from .partition import ELEMENTWISE

# Their fused kernels take a gradient's scale and a flag to leave everything as it is. (SGD's leaves a first momentum
# unset when the flag is up.)
_FUSED = {torch.optim.Adam, torch.optim.AdamW}
# What their settings are where their user left the choice of a kernel open.
_LEFT_OPEN = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}

# Elements of slices that are stepped in one call: so many that the call itself doesn't count.
PART = 2**19


class Part(NamedTuple):
    """Buckets of a family that are stepped together, each with what worked of it, and all that worked."""

    family: ShardedGroup
    sums: list[tuple[GradientSum, list[ShardedParameter]]]
    records: list[ShardedParameter]

    @property
    def elements(self) -> int:
        """Of this rank's slices."""
        return sum(total.row.numel() for total, _ in self.sums)


def steps_in_parts(optim: Optimizer) -> bool:
    """Whether stepping some parameters after others is one step of ``optim``: nobody counts or watches its steps."""
    watched = (
        optim._optimizer_step_pre_hooks,
        optim._optimizer_step_post_hooks,
        _torch_optimizer._global_optimizer_pre_hooks,
        _torch_optimizer._global_optimizer_post_hooks,
    )
    return type(optim) in ELEMENTWISE and not any(watched)


def is_fused(optim: Optimizer) -> bool:
    """Whether the kernels of ``optim`` take a gradient's scale and a flag to leave everything as it is."""
    return type(optim) in _FUSED and all(group.get("fused") for group in optim.param_groups)


def scales_gradients(optim: Optimizer) -> bool:
    """Whether ``optim`` multiplies its gradients itself now, as ``torch.amp.GradScaler`` would have it do.

    Not where a hook looks at them. So ranks may differ in it, and no collective may depend on it.
    """
    return is_fused(optim) and steps_in_parts(optim)


class Stepper:
    """Gives slices their gradients, steps them and starts their gathers.

    Args:
        optim: the wrapped optimizer.
        groups: where gradients are, and what brings stepped slices back.
        step_whole: steps records that have gradients all at once.
        on_host: slices and their gradients have been brought there: Adam is fused if its user left that open.

    Attributes:
        skips_by_flag: a flag on the device may tell that a step is to be left out, which the host needn't read. All
            ranks were built with the same optimizer, so it is the same on all, whatever becomes of their settings.
    """

    def __init__(
        self,
        optim: Optimizer,
        groups: Sequence[ShardedGroup],
        step_whole: Callable[[Sequence[ShardedParameter]], Any],
        on_host: bool = False,
    ) -> None:
        self._on_host = on_host
        self._optim = optim
        self._groups = groups
        self._step_whole = step_whole
        self.skips_by_flag = is_fused(optim)

    def step(self, scale: Scale, norm: GlobalNorm | None) -> None:
        """Bucket after bucket gets its gradients, is stepped and starts its gather; all at once where it must be.

        Args:
            scale: how what has been summed becomes gradients.
            norm: to be measured on the way, when a bucket's gradients are at hand anyway; None: it was before.
        """
        parts = [part for family in self._groups for part in self._parts(family)]
        if self._is_left_out(scale):
            for part in parts:
                part.family.gathers.start(part.records)
        else:
            self._step_and_gather(parts, scale, norm)
        if norm is not None:
            norm.start()
        for family in self._groups:
            family.gathers.end_step()

    def _is_left_out(self, scale: Scale) -> bool:
        """Whether ``optim`` must not be called: it overflowed, which only kernels that scale gradients can see to."""
        return scale.overflow is not None and not scales_gradients(self._optim) and bool(scale.overflow.item())

    def _step_and_gather(self, parts: Sequence[Part], scale: Scale, norm: GlobalNorm | None) -> None:
        in_parts = steps_in_parts(self._optim)
        with _fused(self._optim, self._on_host), _scaling(self._optim, scale) as by_optimizer:
            for part in parts:
                for total, working in part.sums:
                    if norm is not None:
                        norm.add(total.measure)
                    part.family.gradients.hand_over(total, working, scale, by_optimizer)
                if in_parts:
                    self._step_part(part.records)
                    part.family.gathers.start(part.records)
            if parts and not in_parts:
                self._step_whole([record for part in parts for record in part.records])
        if not in_parts:
            for part in parts:
                _release_gradients(part.records)
                part.family.gathers.start(part.records)

    def _parts(self, family: ShardedGroup) -> list[Part]:
        """Buckets that are stepped and gathered together; first what came last, which the next forward wants first.

        But to the host gradients come one after the other: the first may be stepped while others are on their way.
        """
        parts: list[Part] = []
        sums = family.gradients.sums()
        for total in sums if self._on_host else reversed(sums):
            records = family.gradients.working(total)
            last = parts[-1] if parts else None
            if last is None or last.elements >= PART or last.records[0].kind != records[0].kind:
                parts.append(Part(family, [(total, records)], list(records)))
            else:
                last.sums.append((total, records))
                last.records.extend(records)
        return parts

    def _step_part(self, part: Sequence[ShardedParameter]) -> None:
        """Step ``part`` alone: for the time of the call each param group holds only its members of it."""
        groups: list[dict[str, Any]] = self._optim.param_groups
        members: list[list[Tensor]] = [[] for _ in groups]
        for record in part:
            members[record.group].append(record.p32)
        whole = [group["params"] for group in groups]
        try:
            for group, some in zip(groups, members, strict=True):
                group["params"] = some
            self._optim.step()
        finally:
            for group, all_of_it in zip(groups, whole, strict=True):
                group["params"] = all_of_it
        _release_gradients(part)


@contextmanager
def _scaling(optim: Any, scale: Scale) -> Iterator[bool]:
    """Tell ``optim`` what to multiply its gradients with, and when to do nothing, if it sees to that itself."""
    if not scales_gradients(optim):
        yield False
        return
    device = next(p.device for group in optim.param_groups for p in group["params"])
    optim.grad_scale = _on_device(1.0 / scale.unit, device)
    optim.found_inf = None if scale.overflow is None else scale.overflow.float()
    try:
        yield True
    finally:
        del optim.grad_scale, optim.found_inf


def _on_device(number: float | Tensor, device: torch.device) -> Tensor:
    """0-d fp32, without waiting for the device, which a copy of the host's number would."""
    if isinstance(number, Tensor):
        return number.to(device, torch.float32)
    return torch.full((), number, dtype=torch.float32, device=device)


@contextmanager
def _fused(optim: Optimizer, wanted: bool) -> Iterator[None]:
    """Step Adam by its fused kernel, but leave its settings as they are: they are saved, and may go elsewhere."""
    mine = optim.param_groups if wanted and type(optim) in _FUSED else []
    chosen = [group for group in mine if all(group.get(name) == default for name, default in _LEFT_OPEN.items())]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def _release_gradients(stepped: Iterable[ShardedParameter]) -> None:
    for record in stepped:
        record.p32.grad = None
