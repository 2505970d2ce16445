"""A bucket's gradients summed over the ranks: one row for all its parameters, of which each sees its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

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
        sizes: of their slices, which lie end to end in the row.
        row: this rank's row, ``[columns]``: the wire's dtype after one micro-batch, fp32 at least after more.
        rows: those of all ranks, ``[world_size, row]``, of which ``row`` begins one; None: they aren't kept.
        unit: what ``row`` is to be multiplied with to be averaged and unscaled; None: as reductions leave it.
        landing: where ``row`` is on its way to the host, or has arrived; None: it is on the device.
        norm: of a ``row`` on the host its L2 norm, 0-d, on the device.
    """

    __slots__ = ("_parts", "_row", "_rows", "landing", "members", "norm", "sizes", "unit")

    def __init__(
        self, members: tuple[int, ...], sizes: tuple[int, ...], row: Tensor, rows: Tensor | None = None
    ) -> None:
        self.members = members
        self.sizes = sizes
        self.unit: float | Tensor | None = None
        self.hold(row, rows)

    @property
    def row(self) -> Tensor:
        """This rank's."""
        return self._row

    @property
    def rows(self) -> Tensor | None:
        """All ranks', or None."""
        return self._rows

    @property
    def measure(self) -> Tensor:
        """What has the row's L2 norm, on the device: the row or its norm."""
        return self._row if self.norm is None else self.norm

    def hold(self, row: Tensor, rows: Tensor | None = None) -> None:
        """Hold other tensors; ``row`` is one of ``rows``."""
        self._row = row
        self._rows = rows
        self._parts: dict[int, Tensor] | None = None
        self.landing: Landing | None = None
        self.norm: Tensor | None = None

    def forget_others(self) -> None:
        """Let go of what other ranks' rows were."""
        self._rows = None

    def rest_on_host(self, landing: Landing, norm: Tensor) -> None:
        """Have ``row`` on the host; ``rows`` stay where they are."""
        self.hold(landing.row, self._rows)
        self.landing = landing
        self.norm = norm

    def part_of(self, index: int) -> Tensor:
        """One member's ``g``, ``[s]``: a view of the row."""
        if self._parts is None:
            self._parts = dict(zip(self.members, self.cut(self._row), strict=True))
        return self._parts[index]

    def cut(self, row: Tensor) -> Sequence[Tensor]:
        """The members' slices in a row like this one's: views."""
        return row.split_with_sizes(self.sizes)

    def rows_of(self, index: int) -> Tensor | None:
        """One member's part of ``rows``, ``[world_size, s]``: a view; None: they aren't kept."""
        if self._rows is None:
            return None
        at = self.members.index(index)
        return self._rows.narrow(1, sum(self.sizes[:at]), self.sizes[at])
