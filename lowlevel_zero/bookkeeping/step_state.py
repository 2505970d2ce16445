"""What the shard groups of one optimizer have in common about the step that is to come."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor


class StepState:
    """One for each optimizer.

    Args:
        gradient_scale: makes what a gradient as reductions leave it is to be multiplied with to be averaged and
            unscaled.

    Attributes:
        gradient_scale: as given.
        in_backward: those of the optimizers whose ``backward`` runs, the innermost last.
        syncs: gradients are reduced (False under ``no_sync``: hooks do nothing).
        synchronized: each ``g`` is complete, averaged and unscaled, and its caller's to edit as ``p32.grad``, since
            ``synchronize``.
    """

    in_backward: ClassVar[list[StepState]] = []

    def __init__(self, gradient_scale: Callable[[], float | Tensor]) -> None:
        self.gradient_scale = gradient_scale
        self.syncs = True
        self.synchronized = False
