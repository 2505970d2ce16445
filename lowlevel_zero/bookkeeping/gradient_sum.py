"""A bucket's gradients summed over the ranks: one row for all its parameters, of which each sees its part."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Scale(NamedTuple):
    """How sums become gradients.

    Attributes:
        unit: what they are to be multiplied with to be averaged, unscaled and clipped.
        by_optimizer: the optimizer multiplies, in its own kernel, and writes the gradients back so.
        may_skip: unless it finds an overflow, and leaves everything as it is.
    """

    unit: float | Tensor
    by_optimizer: bool = False
    may_skip: bool = False


class GradientSum:
    """What the reductions of one bucket leave until the step: added to, scaled and measured as one tensor.

    Attributes:
        members: indices of the parameters, in the row's order; one that no rank used has zeros there.
        sizes: the members' slice sizes.
        row: this rank's row, ``[sum of sizes]``: the wire's dtype after one micro-batch, fp32 at least after more.
        whole: the rows of all ranks, ``[world_size, sum of sizes]``, of which ``row`` is one; None in stage 2.
        unit: what ``row`` is to be multiplied with to be averaged and unscaled; None: as reductions leave it.
    """

    __slots__ = ("members", "row", "sizes", "unit", "whole")

    def __init__(
        self, members: tuple[int, ...], sizes: tuple[int, ...], row: Tensor, whole: Tensor | None = None
    ) -> None:
        self.members = members
        self.sizes = sizes
        self.row = row
        self.whole = whole
        self.unit: float | Tensor | None = None

    def parts(self) -> tuple[Tensor, ...]:
        """Each member's ``g``, ``[s]``: views of the row."""
        return self.row.split_with_sizes(self.sizes)

    def rows_of(self, index: int) -> Tensor | None:
        """One member's rows of all ranks, ``[world_size, s]``, where they are kept; a view."""
        if self.whole is None:
            return None
        at = self.members.index(index)
        return self.whole.narrow(1, sum(self.sizes[:at]), self.sizes[at])

    def take(self, rank: int, row: Tensor, whole: Tensor | None) -> None:
        """Hold other tensors: ``whole``'s row of ``rank``, or ``row`` where there is no whole."""
        self.whole = whole
        self.row = row if whole is None else whole[rank]
