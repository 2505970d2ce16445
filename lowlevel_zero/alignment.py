"""Alignment: how wide a row of a bucket buffer is made, so that copies and collectives begin at round addresses."""

from __future__ import annotations

from typing import NamedTuple

import torch

# A cache line of a GPU, and what its memory is read by.
ROW_BYTES = 128
# Elements. NCCL reaches its bandwidth with messages that are multiples of large powers of 2 (Megatron-LM's measure).
WIDE_ROW = 2**16


class Alignment(NamedTuple):
    """What the width of a row is a multiple of, in elements.

    Attributes:
        short: of a row that is no wider than ``wide``.
        wide: of a wider one.
    """

    short: int = 1
    wide: int = 1

    def padded(self, columns: int) -> int:
        """The width of a row that holds so many elements."""
        unit = self.wide if columns > self.wide else self.short
        return -(-columns // unit) * unit


END_TO_END = Alignment()


def alignment_of(dtype: torch.dtype, wide_rows: bool = False) -> Alignment:
    """That of a buffer of ``dtype``; ``wide_rows``: for NCCL's bandwidth."""
    unit = ROW_BYTES // dtype.itemsize
    return Alignment(unit, WIDE_ROW if wide_rows else unit)
