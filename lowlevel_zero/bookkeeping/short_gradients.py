"""Short gradients: on the host, views of a row of many tiny slices are kept from step to step, with the row's memory.

To make a view takes the host longer than to fill a few elements, and the view more memory than they do.
"""

from __future__ import annotations

from torch import Tensor

from .gradient_sum import GradientSum

# Elements of a slice, on average over a row.
_SHORT = 16
# Rows that are kept: few buckets are of tiny slices, but with dropped layers they may be ever new ones.
_ROWS_KEPT = 8


class ShortGradients:
    """Rows of slices' gradients, each with its views, by the members of the bucket."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], tuple[Tensor, list[Tensor]]] = {}

    def slices(self, total: GradientSum, row: Tensor) -> list[Tensor]:
        """The slices of ``row``, laid out as ``total``'s; short ones are overwritten when this is next called."""
        if row.device.type != "cpu" or row.numel() > _SHORT * len(total.members):
            return total.layout.cut(row)
        kept, slices = self._kept.get(total.members, (None, []))
        if kept is not None and kept.dtype == row.dtype:
            kept.copy_(row)
            return slices
        if len(self._kept) == _ROWS_KEPT:
            self._kept.clear()
        self._kept[total.members] = row, total.layout.cut(row)
        return self._kept[total.members][1]
