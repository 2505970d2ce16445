"""A bucket's gradients summed over the ranks: one row for all its parameters, of which each sees its part."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..alignment import RowLayout
from .offload import Landing


class Scale(NamedTuple):
    """How sums become gradients.

    Attributes:
        unit: what they are to be multiplied with to be averaged, unscaled and clipped.
        overflow: 0-d; where it is true, an optimizer that scales gradients itself leaves everything as it is.
    """

    unit: float | Tensor
    overflow: Tensor | None = None

    @property
    def exact(self) -> bool:
        """Whether sums are gradients already, as far as the host knows."""
        return isinstance(self.unit, float) and self.unit == 1.0


class GradientSum:
    """What the reductions of one bucket leave until the step: added to, scaled and measured as one tensor.

    Attributes:
        members: indices of the parameters, in the row's order; one that no rank used has zeros there.
        layout: where the members' slices lie in the row; between them are zeros.
        row: this rank's row, ``[columns]``: the wire's dtype after one micro-batch, fp32 at least after more.
        whole: the rows of all ranks, ``[world_size, columns]``, of which ``row`` is one, or, of a compact bucket, the
            first of them; None in stage 2.
        unit: what ``row`` is to be multiplied with to be averaged and unscaled; None: as reductions leave it.
        landing: where ``row`` is on its way to the host, or has arrived; None: it is on the device.
        norm: of a ``row`` on the host its L2 norm, 0-d, on the device.
    """

    __slots__ = ("_parts", "_row", "_whole", "landing", "layout", "members", "norm", "unit")

    def __init__(self, members: tuple[int, ...], layout: RowLayout, row: Tensor, whole: Tensor | None = None) -> None:
        self.members = members
        self.layout = layout
        self.unit: float | Tensor | None = None
        self.hold(row, whole)

    @property
    def row(self) -> Tensor:
        """This rank's."""
        return self._row

    @property
    def whole(self) -> Tensor | None:
        """All ranks', or None."""
        return self._whole

    @property
    def measure(self) -> Tensor:
        """What has the row's L2 norm, on the device: the row or its norm."""
        return self._row if self.norm is None else self.norm

    def hold(self, row: Tensor, whole: Tensor | None = None) -> None:
        """Hold other tensors; ``row`` is one of ``whole``'s."""
        self._row = row
        self._whole = whole
        self._parts: dict[int, Tensor] | None = None
        self.landing: Landing | None = None
        self.norm: Tensor | None = None

    def forget_others(self) -> None:
        """Let go of what other ranks' rows were."""
        self._whole = None

    def rest_on_host(self, landing: Landing, norm: Tensor) -> None:
        """Have ``row`` on the host; ``whole`` stays where it is."""
        self.hold(landing.row, self._whole)
        self.landing = landing
        self.norm = norm

    def part_of(self, index: int) -> Tensor:
        """One member's ``g``, ``[s]``: a view of the row."""
        if self._parts is None:
            self._parts = dict(zip(self.members, self.layout.cut(self._row), strict=True))
        return self._parts[index]

    def rows_of(self, index: int) -> Tensor | None:
        """One member's rows in ``whole``, ``[rows, s]``; a view; None: they aren't kept."""
        if self._whole is None:
            return None
        at = self.members.index(index)
        return self._whole.narrow(1, self.layout.starts[at], self.layout.sizes[at])
