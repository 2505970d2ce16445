"""What callers do with gradients between backward and step: finish their reductions, edit them, clip them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .agreement import Alike, Call, agree
from .bookkeeping.gradient_sum import GradientSum
from .bookkeeping.parameter_store import ParameterStore
from .communication.collectives import ShardGroup
from .diagnostics.guards import Guard
from .families import Families
from .grad_norm import GlobalNorm, clip_factor
from .loss_scaler import LossScaler
from .options import ZeroOptions, check_max_norm
from .reducer import DOUBLE_REDUCTION


class GradientMethods:
    """``synchronize``, ``skip_synchronize`` and ``clip_grad_norm_``."""

    _group: ShardGroup
    _options: ZeroOptions
    _device: torch.device
    _scaler: LossScaler | None
    _parameters: ParameterStore
    _families: Families
    _guard: Guard
    _raw_unit: Callable[[], float | Tensor]
    _finish_last_step: Callable[[], None]

    _skipping = False
    _overflow: Tensor | None = None

    @torch.no_grad()
    def synchronize(self) -> None:
        """Finish the reductions now: each slice gets its gradient, which may be edited before it is stepped.

        Afterwards ``.grad`` of every slice ``p32`` in ``optimizer.optim.param_groups`` is its slice of the averaged,
        unscaled gradient: ``[s]``, of ``p32``'s dtype and device (fp32, on the host with ``cpu_offload``), or None
        where no rank had one. Edit it in place, assign another, or None to leave its parameter out; then
        ``with optimizer.skip_synchronize(): optimizer.step()`` steps with what is there. Every rank calls it, after
        the last backward, and leaves the same parameters with gradients. What a slice is edited by must not depend
        on the rest of the parameter, of which other ranks hold slices: for a norm there is ``clip_grad_norm_``. Until
        ``step`` or ``zero_grad`` full gradient slices are held in ``p32``'s dtype. From Horovod.

        fp16: what overflowed is skipped by the step, whatever has been made of it.

        Raises:
            RuntimeError: called again before ``step`` or ``zero_grad``, or under ``no_sync``.
        """
        if self._families.exposed:
            self._refuse(
                "expected step or zero_grad after synchronize(), got another synchronize(), which has nothing to "
                f"finish: {_REMEDY}",
                "synchronize",
            )
        if not self._families.sync:
            raise RuntimeError(
                "expected synchronize() outside of no_sync, where gradients are reduced, got it within: "
                "run the last backward, and synchronize(), after the with block"
            )
        self._guard.enter("synchronize")
        self._finish_last_step()
        self._families.finish(Call("synchronize", self._guard.trouble()))
        unit = self._unit()
        if self._scaler is not None:
            norm = measured(self._families.sums(), self._new_norm())
            self._overflow = ~norm.isfinite()
        self._families.expose(float(unit) if self._options.cpu_offload else unit)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` takes the gradients that ``synchronize`` has left, as they have been edited since."""
        before, self._skipping = self._skipping, True
        try:
            yield
        finally:
            self._skipping = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients, after backward, to a global L2 norm; returns the norm before, 0-d fp32.

        What ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` does for a plain optimizer; that
        function itself would see no gradients here. After ``synchronize`` the slices' ``.grad`` are clipped. Every
        rank calls it.
        """
        check_max_norm("max_norm", max_norm)
        self._guard.enter("clip_grad_norm_")
        self._finish_last_step()
        self._families.finish(Call("clip_grad_norm_", self._guard.trouble()))
        norm = measured(self._families.sums(), self._new_norm())
        self._families.scale(clip_factor(norm, max_norm))
        return norm

    def _unit(self) -> float | Tensor:
        """What sums are to be multiplied with to be averaged, unscaled gradients."""
        return 1.0 if self._families.exposed else self._raw_unit()

    def _new_norm(self) -> GlobalNorm:
        return GlobalNorm(self._group, self._device, self._unit(), self._families.widest)

    # ---- what a step takes ----

    def _complete_gradients(self) -> Tensor | None:
        """Complete what a step takes: the reductions, or what callers have made of them.

        Returns, 0-d, whether something had overflowed before callers could edit it; None: nobody looked.
        """
        if self._families.exposed or self._skipping:
            self._check_edits()
        self._families.finish(Call("step", self._guard.trouble()))
        return self._overflow if self._families.exposed else None

    def _check_edits(self) -> None:
        """Raise, on all ranks, unless all step, in the way that is due, gradients of the same parameters."""
        if not self._families.exposed:
            raise RuntimeError(
                "expected synchronize() before a step under skip_synchronize, which steps what that leaves, got none: "
                "call optimizer.synchronize() after the last backward, or step without skip_synchronize"
            )
        if not self._skipping:
            self._refuse(
                "expected a step under skip_synchronize after synchronize(), which has finished the reductions, got "
                f"one outside of it: {_REMEDY}",
                "step",
            )
        error: Exception | None = None
        for record in self._parameters:
            if record.p32.grad is not None and record.p32.grad.layout != torch.strided:
                error = TypeError(
                    f"{record.name}: expected its slice's .grad dense, got a {record.p32.grad.layout} one: "
                    "assign gradient.to_dense()"
                )
        for family in self._families:
            lines = []
            for record in family.records:
                name = record.name if family.number == 0 else f"expert parameter {record.index}"  # names may differ
                lines.append(f"{name}: {'no gradient' if record.p32.grad is None else 'a gradient'} to step with")
            agree(family.group, lines, error, "step", _GRADIENTS)

    def _refuse_double_reduction(self) -> None:
        if self._families.exposed and self._families.sync:
            self._refuse(f"backward: {DOUBLE_REDUCTION}", "run a backward")

    def _refuse(self, message: str, doing: str) -> None:
        """Raise, and have ranks raise that have come to another call after ``synchronize``."""
        agree(self._group, [], RuntimeError(message), doing)


_GRADIENTS = Alike("the same gradients", "edit .grad of the same slices on all ranks between synchronize and step")
_REMEDY = (
    "step what is there by «with optimizer.skip_synchronize(): optimizer.step()», or drop it by optimizer.zero_grad()"
)


def measured(sums: Iterable[GradientSum], norm: GlobalNorm) -> Tensor:
    """The value of ``norm``, of all of ``sums``."""
    for total in sums:
        norm.add(total.measure)
    norm.start()
    return norm.value
