"""What the shard groups of one optimizer have in common about the step that is to come."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar
from weakref import WeakSet

from torch import Tensor

from ..loss_scaler import LossScaler


class Phase(Enum):
    """How far the gradients of the step that is to come are."""

    COMING = "backwards reduce them as they come"
    COMPLETE = "each g is complete on all ranks, and no gradient has come since"
    SYNCHRONIZED = "each g is averaged, unscaled and its caller's to edit as p32.grad, since synchronize"


class StepState:
    """One for each optimizer.

    Args:
        average: what sums over the ranks are to be multiplied with to be averages.
        scaler: of the loss; None: there is none.

    Attributes:
        phase: how far gradients are.
        syncs: gradients are reduced (False under ``no_sync``: hooks do nothing).
        failed: the error of a call before, since ``zero_grad``, in words, for its peers to be told; empty: none.
        lost: the error by which this rank has lost gradients of the step, in words; empty: none.
        agreed: the ranks have agreed on the call under way.
        undefined: the error by which this rank has failed to step or gather parameters, in words; empty: none.
        deferred: the error that leaves the call under way as soon as this rank has done what its peers wait for.
        in_backward: those of the optimizers whose ``backward`` runs, the innermost last.
        alive: those of all optimizers of this process.
    """

    in_backward: ClassVar[list[StepState]] = []
    alive: ClassVar[WeakSet[StepState]] = WeakSet()

    def __init__(self, average: float, scaler: LossScaler | None) -> None:
        self._average = average
        self._scaler = scaler
        self.phase = Phase.COMING
        self.syncs = True
        self.failed = self.lost = ""
        self.undefined = ""
        self.agreed = False
        self.deferred: Exception | None = None
        StepState.alive.add(self)

    @property
    def is_alone(self) -> bool:
        """Whether this process has no other optimizer."""
        return len(StepState.alive) == 1

    @property
    def is_scaled(self) -> bool:
        """Whether losses are scaled."""
        return self._scaler is not None

    def gradient_scale(self) -> float | Tensor:
        """What a gradient as reductions leave it is to be multiplied with to be averaged and unscaled."""
        return self._average if self._scaler is None else self._average / self._scaler.scale

    # ---- what an error leaves on this rank; its peers hear of it when they next agree ----

    def note_failure(self, error: BaseException | None) -> None:
        """Note that a call of this rank's ends by ``error``."""
        self.failed = self.failed or f"{type(error).__name__}: {error}"

    def lose(self, error: BaseException, undefined: bool = False) -> None:
        """Note that ``error`` has cost gradients of the step, or has left parameters ``undefined``."""
        self.note_failure(error)
        self.lost = self.lost or self.failed
        if undefined:
            self.undefined = self.undefined or self.lost

    def defer(self, error: BaseException) -> None:
        """Note that ``error`` has cost gradients, for ``raise_deferred`` to raise; an interrupt is raised at once."""
        self.lose(error)
        if not isinstance(error, Exception):
            raise error
        self.deferred = self.deferred or error

    def begin_anew(self) -> None:
        """Forget which gradients were lost: they have been dropped on all ranks."""
        self.failed = self.lost = ""
        self.deferred = None

    def raise_deferred(self) -> None:
        """Raise what was deferred while this rank did what its peers waited for."""
        error, self.deferred = self.deferred, None
        if error is not None:
            raise error
