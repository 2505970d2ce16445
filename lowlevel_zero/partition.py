"""The arithmetic of ``[world_size, -1]``: which elements each rank owns, how wide rows are, and who may step slices."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch

# torch's optimizers that step slices as they step what is whole. Their state is per parameter, step counters included.
ELEMENTWISE = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
    *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
)
# A cache line of a GPU, and what its memory is read by.
ROW_BYTES = 128
# Elements. NCCL reaches its bandwidth with messages that are multiples of large powers of 2 (Megatron-LM's measure).
WIDE_ROW = 2**16
# In a row, unless the unit is one element: with more ranks rows are shorter.
_LEAST_UNITS = 64


@dataclass(frozen=True)
class EvenSplit:
    """A flat parameter of ``numel`` elements, padded and viewed as ``[world_size, slice_size]``.

    Rank ``r`` owns row ``r``. With ``multiple`` 1 this is the split that ``torch.chunk`` makes of the unpadded
    parameter, and so also the layout of a 1-D ``DTensor`` with ``Shard(0)``: the first ranks hold whole slices, the one
    that meets the end a shorter one, those after it nothing but padding.

    Attributes:
        numel: elements of the parameter, without padding.
        world_size: ranks that share it.
        multiple: what rows are multiples of, in elements.
        slice_size: elements of one row, ``ceil(numel / world_size)`` rounded up to a ``multiple``.
    """

    numel: int
    world_size: int
    multiple: int = 1
    slice_size: int = field(init=False)

    def __post_init__(self) -> None:
        if self.numel < 0 or self.world_size < 1:
            raise ValueError(
                f"an even split needs numel >= 0 and world_size >= 1, got {self.numel} and {self.world_size}"
            )
        rows = -(-self.numel // (self.world_size * self.multiple))
        object.__setattr__(self, "slice_size", rows * self.multiple)

    @property
    def padded_numel(self) -> int:
        """Elements of the storage behind the parameter."""
        return self.slice_size * self.world_size

    @property
    def padding(self) -> int:
        """Elements at the end of the storage that belong to nobody."""
        return self.padded_numel - self.numel

    def span(self, rank: int) -> tuple[int, int]:
        """First and one-past-last element of the flat parameter that ``rank`` owns, padding left out."""
        start = min(rank * self.slice_size, self.numel)
        return start, min(start + self.slice_size, self.numel)


# ---- how wide a row of a bucket buffer is, so that copies and collectives begin at round addresses ----


class Alignment(NamedTuple):
    """What the width of a row is a multiple of, in elements.

    Attributes:
        short: of a row that is no wider than ``wide``; a power of 2, and less for a short row, so that padding stays
            below 2%.
        wide: of a wider one.
    """

    short: int = 1
    wide: int = 1

    def padded(self, columns: int) -> int:
        """The width of a row that holds so many elements."""
        unit = self.wide if columns > self.wide else self.short
        while 1 < unit <= self.short and unit * _LEAST_UNITS > columns:
            unit //= 2
        return -(-columns // unit) * unit


END_TO_END = Alignment()


@cache
def alignment_of(dtype: torch.dtype, wide_rows: bool = False) -> Alignment:
    """That of a buffer of ``dtype``; ``wide_rows``: for NCCL's bandwidth."""
    unit = ROW_BYTES // dtype.itemsize
    return Alignment(unit, WIDE_ROW if wide_rows else unit)
