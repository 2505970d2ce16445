"""Finds the parameter and the rank that an inf or NaN came from, and raises after too many skipped steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks

from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..communication.agreement import raised_by_all
from ..loss_scaler import LossScaler
from ..options import ZeroOptions
from ..sharded_group import ShardedGroup
from ..streams import streams_of

_log = logging.getLogger("lowlevel_zero")


class _Suspect(NamedTuple):
    """A parameter whose gradient or value holds an inf or NaN."""

    place: int  # in the order of all parameters
    name: str
    bucket: int


# The first parameter whose slice on a rank holds an inf or NaN, or None, and the places of those whose bucket buffers
# held one before that rank sent them.
_Seen: TypeAlias = "tuple[_Suspect | None, set[int]]"


class LaterRead:
    """A few numbers on a device at some step, which are copied to the host without waiting, and read later."""

    def __init__(self, value: Tensor, step: int) -> None:
        streams = streams_of([value.device])
        self.step = step
        self._value = value
        if streams.pins:
            self._value = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
        self._arrived = streams.mark()  # on the stream of the value's device, which may not be the current device

    def read(self) -> Tensor:
        """Wait for the copy alone, and return it."""
        self._arrived.synchronize()
        return self._value


class BadNumbers:
    """Checks gradient norms, mostly without waiting for a device, and names the source of an inf or NaN.

    All ranks see the same norms at the same points of a step, so they look for the parameter together.

    Attributes:
        waits: the host reads whether the next step overflows, even if it has to wait for the device.
    """

    def __init__(
        self,
        parameters: ParameterStore,
        groups: Iterable[ShardedGroup],
        options: ZeroOptions,
        scaler: LossScaler | None,
    ) -> None:
        self._parameters = parameters
        self._groups = groups
        self._ranks = parameters.shard_groups[0]
        self._options = options
        self._scaler = scaler
        self._on_host = parameters.on_host
        self._measures = scaler is not None or options.diagnostics.error_if_nonfinite
        # The largest absolute value that this rank put into each bucket buffer, 0-d; NaN if the buffer held one.
        self._packed: list[tuple[Sequence[ShardedParameter], Tensor]] = []
        self._later: LaterRead | None = None
        self._in_a_row = 0
        self._always_waits = self._on_host or options.diagnostics.verbose or options.cpu_offload
        self.waits = self._always_waits

    # ---- norms ----

    def norm(self, value: Tensor) -> None:
        """Check the step's norm: now on the host or if ``error_if_nonfinite``, else at the next step. May communicate.

        Raises:
            RuntimeError: the norm isn't finite and ``error_if_nonfinite`` is set, for which the host waits.
        """
        step = self._ranks.progress.step
        if self._on_host or self._options.diagnostics.error_if_nonfinite:
            self._judge(value.item(), step, at_hand=True)
        else:
            self._later = LaterRead(value, step)

    def step_begins(self) -> None:
        """Check the norm of the step before, if ``norm`` has put that off. May communicate if it isn't finite."""
        later, self._later = self._later, None
        if later is not None:
            self._judge(later.read().item(), later.step, at_hand=False)

    def _judge(self, norm: float, step: int, at_hand: bool) -> None:
        """Count bad norms in a row; without a loss scale, raise if so asked, or warn of some, which communicates."""
        good = math.isfinite(norm)
        self._in_a_row = 0 if good else self._in_a_row + 1
        if self._scaler is not None:
            self.waits = self._always_waits or not good
        elif not good and self._options.diagnostics.error_if_nonfinite:
            found = f"expected a finite gradient norm, got {norm}: {self._found(at_hand)}"
            remedy = "call optimizer.zero_grad() on every rank, and go on with the next batch"
            error = RuntimeError(f"step {step + 1}: {found}. Nothing was stepped: {remedy}")
            raise raised_by_all(error, self._ranks)
        elif self._in_a_row.bit_count() == 1:  # warn at the 1st, 2nd, 4th, ...: parameters seldom recover
            found = self._found(at_hand)
            self._tell(f"step {step + 1}: the gradient norm is {norm}, {self._in_a_row} in a row: {found}")

    # ---- fp16 ----

    def skipped(self, scaler: LossScaler) -> None:
        """Find and log the source of the overflow that skips this step. Communicates: every rank calls it.

        Raises:
            RuntimeError: ``max_skipped_steps`` steps were skipped in a row, and the loss scale is at its minimum.
        """
        count, scale = int(scaler.skipped_in_a_row.item()), scaler.loss_scale
        text = (
            f"step {self._ranks.progress.step + 1}: skipped, since gradients overflowed: {self._found(at_hand=True)}. "
            f"Loss scale now {scale:g}, {count} steps skipped in a row"
        )
        limit = self._options.loss_scale.max_skipped_steps
        if 0 < limit <= count and scale <= scaler.min_scale:
            error = RuntimeError(
                f"{text}. The loss scale is at its minimum: look for what is inf or NaN in the model or its inputs, "
                "use a smaller learning rate or bf16, or pass a smaller min_scale"
            )
            raise raised_by_all(error, self._ranks)
        self._tell(text)

    # ---- the source ----

    def packed(self, records: Sequence[ShardedParameter], buffer: Tensor) -> None:
        """Keep a bucket buffer's largest absolute number, before its reduction, if a bad one stops the step."""
        if self._measures:
            dtype = torch.promote_types(buffer.dtype, torch.float32)
            self._packed.append((records, torch.linalg.vector_norm(buffer, math.inf, dtype=dtype)))

    def cleared(self) -> None:
        """Forget the numbers that ``packed`` has kept."""
        self._packed.clear()

    def _found(self, at_hand: bool) -> str:
        """Return as text the first parameter with an inf or NaN, its bucket and the ranks at fault. Communicates."""
        mine: _Seen = None, set()
        try:
            bad = {record for records, largest in self._packed if not largest.isfinite() for record in records}
            sent = {place for place, record in enumerate(self._parameters) if at_hand and record in bad}
            mine = self._first_bad(at_hand), sent
        except Exception as error:  # such as out of memory: the other ranks wait for this rank's findings
            _log.warning("could not look for numbers that aren't finite: %s: %s", type(error).__name__, error)
        gathered: Sequence[_Seen] = [mine] if self._ranks.ranks == 1 else self._ranks.all_gather_object(mine)
        first = min((suspect for suspect, _ in gathered if suspect is not None), default=None)
        if first is None:
            return "no parameter has kept a sign of where it came from"
        by_rank = dict(zip(get_process_group_ranks(self._ranks.group), gathered, strict=True))
        ranks = [rank for rank, (_, sent) in by_rank.items() if first.place in sent]
        found = f"first in {first.name} (bucket {first.bucket})"
        if self._ranks.ranks == 1 or ranks:
            return f"{found}, from rank {', '.join(map(str, ranks or by_rank))}"
        holders = ", ".join(str(rank) for rank, (suspect, _) in by_rank.items() if suspect == first)
        return f"{found}, in the slice of the sum over ranks that rank {holders} holds"

    def _first_bad(self, at_hand: bool) -> _Suspect | None:
        """Return the first parameter with a bad gradient, if these are ``at_hand``, or else a bad master; or None."""
        groups = {group.number: group for group in self._groups}
        for gradient in (True, False) if at_hand else (False,):
            for place, record in enumerate(self._parameters):
                group = groups[record.shard_group]
                tensor = group.gradients.averaged(record) if gradient else record.p32
                if tensor is not None and not tensor.isfinite().all():
                    plan = group.reducer.plan.whole
                    bucket = next(each.position for each in plan if record.index in each.members)
                    return _Suspect(place, record.name, bucket)
        return None

    def _tell(self, text: str) -> None:
        if self._ranks.group_rank == 0:
            _log.warning("%s", text)
