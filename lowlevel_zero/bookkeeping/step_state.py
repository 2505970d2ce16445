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
        lost: the error by which this rank has lost gradients of the step, in words; empty: none.
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
        self.lost = ""
        StepState.alive.add(self)

    @property
    def is_alone(self) -> bool:
        """Whether this process has no other optimizer."""
        return len(StepState.alive) == 1

    def gradient_scale(self) -> float | Tensor:
        """What a gradient as reductions leave it is to be multiplied with to be averaged and unscaled."""
        return self._average if self._scaler is None else self._average / self._scaler.scale
