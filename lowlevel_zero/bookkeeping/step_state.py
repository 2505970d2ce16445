"""What the shard groups of one optimizer have in common about the step that is to come."""

from __future__ import annotations

from typing import ClassVar


class StepState:
    """One for each optimizer.

    Attributes:
        in_backward: those of the optimizers whose ``backward`` runs, the innermost last.
        syncs: gradients are reduced (False under ``no_sync``: hooks do nothing).
        synchronized: each ``g`` is complete, averaged and unscaled, and its caller's to edit as ``p32.grad``, since
            ``synchronize``.
    """

    in_backward: ClassVar[list[StepState]] = []

    def __init__(self) -> None:
        self.syncs = True
        self.synchronized = False
