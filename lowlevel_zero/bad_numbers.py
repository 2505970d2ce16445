"""Bad numbers: where an inf or NaN among the gradients came from, and when to stop skipping steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .bookkeeping.parameter_store import ShardedParameter
from .families import Families
from .grad_norm import GlobalNorm
from .later_read import LaterRead
from .loss_scaler import LossScaler

_log = logging.getLogger("lowlevel_zero")


class _Suspect(NamedTuple):
    """A parameter in whose gradient, or else value, there is an inf or NaN."""

    place: int  # among all parameters
    name: str
    bucket: int


class _Seen(NamedTuple):
    """What one rank has seen of bad numbers.

    Attributes:
        first: the first parameter in its own slice of which there is one; None: none.
        sent: places of the parameters in whose wires there was one before they were summed.
    """

    first: _Suspect | None
    sent: set[int]


class _Later(NamedTuple):
    """A device's norm, to be judged when the next step begins."""

    norm: LaterRead
    step: int


class BadNumbers:
    """Looks at norms when they are there, without waiting for a device, and names what made one inf or NaN.

    All ranks see the same norms at the same points, so they look for the parameter together.

    Args:
        families: the parameters, the ranks that share the first of them being all ranks.
        scaler: of the loss, where there is one.

    Attributes:
        expected: the host is to look whether the next step overflows, even where that means to wait for the device.
    """

    def __init__(self, families: Families, scaler: LossScaler | None) -> None:
        self._families = families
        self._parameters = families.parameters
        self._group = self._parameters.shard_groups[0]
        self._scaler = scaler
        self._options = options = families.options
        self._on_host = self._parameters.on_host
        self._looked_at: GlobalNorm | None = None
        self._later: _Later | None = None
        self._in_a_row = 0
        self._always = self._on_host or options.verbose or options.cpu_offload
        self.expected = self._always

    # ---- after each norm ----

    def look(self, norm: GlobalNorm) -> None:
        """Judge a step's norm, whose value is there: the host's at once, a device's when the next step begins.

        Raises:
            RuntimeError: it isn't finite, and ``error_if_nonfinite`` was chosen. Then even a device is waited for.
        """
        if norm is not self._looked_at:
            self._looked_at = norm
            self._judge_in_time(norm, self._group.progress.step, at_hand=True)

    def look_back(self, norm: GlobalNorm | None) -> None:
        """A step begins: judge the norm of the one before, if that had to wait."""
        later, self._later = self._later, None
        if later is not None:
            self._judge(later.norm.read(), later.step, at_hand=False)
        if norm is not None and norm is not self._looked_at:
            self._looked_at = norm
            self._judge_in_time(norm, self._group.progress.step - 1, at_hand=False)

    def _judge_in_time(self, norm: GlobalNorm, step: int, at_hand: bool) -> None:
        if self._on_host or self._options.error_if_nonfinite:
            self._judge(norm.value.item(), step, at_hand)
        else:
            self._later = _Later(LaterRead(norm.value), step)

    def _judge(self, norm: float, step: int, at_hand: bool) -> None:
        good = math.isfinite(norm)
        self._in_a_row = 0 if good else self._in_a_row + 1
        if self._scaler is not None:
            self.expected = self._always or not good
        elif not good and self._options.error_if_nonfinite:
            found = f"expected a finite gradient norm, got {norm}: {self._found(at_hand)}"
            raise RuntimeError(f"step {step + 1}: {found}. Nothing was stepped")
        elif self._in_a_row.bit_count() == 1:  # the 1st, 2nd, 4th, ...: parameters seldom recover
            found = self._found(at_hand)
            self._tell(f"step {step + 1}: the gradient norm is {norm}, {self._in_a_row} in a row: {found}")

    # ---- fp16 ----

    def skipped(self, scaler: LossScaler) -> None:
        """A step is being skipped, and the host knows it.

        Raises:
            RuntimeError: ``max_skipped_steps`` in a row, and the loss scale can't become smaller.
        """
        count, scale = int(scaler.skipped_in_a_row.item()), scaler.loss_scale
        text = (
            f"step {self._group.progress.step + 1}: skipped, since gradients overflowed: {self._found(at_hand=True)}. "
            f"Loss scale now {scale:g}, {count} steps skipped in a row"
        )
        limit = self._options.max_skipped_steps
        if 0 < limit <= count and scale <= scaler.min_scale:
            self._families.clear()
            raise RuntimeError(
                f"{text}. The loss scale is at its minimum: look for what is inf or NaN in the model or its inputs, "
                "use a smaller learning rate or bf16, or pass a smaller min_scale"
            )
        self._tell(text)

    # ---- where from ----

    def _found(self, at_hand: bool) -> str:
        """The parameter, bucket and ranks, in words; all ranks call it. ``at_hand``: the step's gradients are there."""
        mine = _Seen(self._first_bad(at_hand), self._sent() if at_hand else set())
        told: Sequence[_Seen] = [mine] if self._group.ranks == 1 else self._group.exchange(mine)
        suspects = [seen.first for seen in told if seen.first is not None]
        if not suspects:
            return "no parameter has kept a sign of where it came from"
        first = min(suspects)
        ranks = [rank for rank, seen in enumerate(told) if first.place in seen.sent]
        found = f"first in {first.name} (bucket {first.bucket})"
        if self._group.ranks == 1 or ranks:
            return f"{found}, from rank {', '.join(map(str, ranks or [0]))}"
        holders = ", ".join(str(rank) for rank, seen in enumerate(told) if seen.first == first)
        return f"{found}, in the slice of the sum over ranks that rank {holders} holds"

    def _first_bad(self, at_hand: bool) -> _Suspect | None:
        """By its gradient, while that is there; then by its master."""
        if at_hand:
            for place, record in enumerate(self._parameters):
                if record.sum is not None and _is_bad(self._families.of(record).gradients.averaged(record)):
                    return self._suspect(place, record)
        bad = ((place, record) for place, record in enumerate(self._parameters) if _is_bad(record.p32))
        return next((self._suspect(place, record) for place, record in bad), None)

    def _suspect(self, place: int, record: ShardedParameter) -> _Suspect:
        plan = self._families.of(record).reducer.plan.whole
        return _Suspect(place, record.name, plan.bucket_of[record.index])

    def _sent(self) -> set[int]:
        bad = {family.number: family.reducer.bad_buffers() for family in self._families}
        return {place for place, record in enumerate(self._parameters) if record.index in bad[record.family]}

    def _tell(self, text: str) -> None:
        if self._group.place == 0:
            _log.warning("%s", text)


def _is_bad(tensor: Tensor | None) -> bool:
    return tensor is not None and not bool(tensor.isfinite().all())
