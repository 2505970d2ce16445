"""Short columns: many of a few elements each, copied out of a wire on the host by way of views that are kept.

To make a view takes the host longer than to copy a few elements. So one copy brings the columns to where views of them
lie ready from the last time, and the rest is one multi-tensor call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

# Elements of a column, all rows together.
_SHORT = 64


class _Kept(threading.local):
    """A thread's last memory for short columns, ``[columns, rows, s]``, and its views."""

    memory = torch.empty(0)
    views: Sequence[Tensor] = ()

    def of(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """The memory for as many columns."""
        if self.memory.shape != shape or self.memory.dtype != dtype:
            with torch.inference_mode(False):  # it may be used out of one too
                self.memory = torch.empty(shape, dtype=dtype)
                self.views = self.memory.unbind()
        return self.memory


_kept = _Kept()


def are_short(wire: Tensor, homes: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether ``copy_out`` is the quicker way for columns of these sizes."""
    alike = wire.device.type == "cpu" and wire.dtype == homes[0].dtype and len(homes) > 1 and len(set(sizes)) == 1
    return alike and sizes[0] * len(wire) <= _SHORT


def copy_out(wire: Tensor, homes: Sequence[Tensor]) -> None:
    """Copy the first columns of ``wire`` (``[rows, row]``) to their ``homes``, of one shape, ``[rows, s]``."""
    rows, size = homes[0].shape
    columns = wire[:, : len(homes) * size].view(rows, len(homes), size)
    _kept.of((len(homes), rows, size), wire.dtype).copy_(columns.transpose(0, 1))
    torch._foreach_copy_(list(homes), list(_kept.views))
