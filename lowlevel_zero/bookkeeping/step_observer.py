"""The seam of ``diagnostics``: who is told what happens in a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..loss_scaler import LossScaler
from .sharded_parameter import ShardedParameter


class StepObserver:
    """Is told of a step as it goes; this one does nothing. Chosen once, when the optimizer is constructed.

    Attributes:
        waits: the host is to look whether the next step overflows, even where that means to wait for the device.
    """

    waits = False

    def step_begins(self, last_norm: Tensor | None) -> None:
        """A step begins; the one before had this gradient norm, 0-d, which ``norm`` hasn't told; None: it has."""

    def packed(self, records: Sequence[ShardedParameter], buffer: Tensor) -> None:
        """The gradients of these parameters have been packed into a bucket buffer, which is about to be reduced."""

    def norm(self, value: Tensor) -> None:
        """The gradient norm of the step that is being taken, 0-d, on the device.

        Raises:
            RuntimeError: the step must not be taken; on all ranks.
        """

    def skipped(self, scaler: LossScaler) -> None:
        """The step is being skipped, since gradients overflowed.

        Raises:
            RuntimeError: there is no sense in going on; on all ranks.
        """

    def cleared(self) -> None:
        """The gradients that have been packed so far count no more: they have been stepped, or dropped."""
