"""Alignment: where slices lie in a row of a wire, so that copies and collectives find them at round addresses.

A slice of 128 bytes or more starts at a multiple of them, as in Megatron-LM's distributed optimizer; where it wouldn't,
a filler lies before it. Shorter slices lie end to end: their fillers would be longer than they are. With slices that
start at multiples of 4 elements::

    | a0 a1 a2 a3 a4 | -  -  - | b0 b1 b2 b3 | c0 | d0 d1 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# A cache line of a GPU, and what its memory is read by.
SLICE_BYTES = 128
# Elements. NCCL reaches its bandwidth with messages that are multiples of large powers of 2 (Megatron-LM's measure).
WIDE_ROW = 2**16

T = TypeVar("T")


class Alignment(NamedTuple):
    """What columns of a wire are multiples of, in elements.

    Attributes:
        slices: where a slice of as many elements or more starts.
        rows: how many columns a row has; a shorter one has a multiple of ``slices``.
    """

    slices: int = 1
    rows: int = 1

    def padded(self, columns: int) -> int:
        """The columns of the row that holds so many."""
        unit = self.rows if columns > self.rows else self.slices
        return -(-columns // unit) * unit


END_TO_END = Alignment()


def alignment_of(dtype: torch.dtype, wide_rows: bool = False) -> Alignment:
    """That of a wire of ``dtype``."""
    slices = SLICE_BYTES // dtype.itemsize
    return Alignment(slices, WIDE_ROW if wide_rows else slices)


@dataclass(frozen=True)
class RowLayout:
    """Where slices lie in a row.

    Attributes:
        sizes: of the slices, in their order.
        fillers: columns that are left free before each slice; empty: none are.
        tail: columns that are left free behind the last one.
    """

    sizes: tuple[int, ...]
    fillers: tuple[int, ...] = ()
    tail: int = 0

    @cached_property
    def columns(self) -> int:
        """Up to the last slice's end."""
        return sum(self.sizes) + sum(self.fillers)

    @cached_property
    def starts(self) -> list[int]:
        """Each slice's first column."""
        ends = list(accumulate(self.pieces))
        kept = self.spread([True] * len(self.sizes), lambda free: False)
        return [end - size for end, size in zip(compress(ends, kept), self.sizes, strict=True)]

    @cached_property
    def pieces(self) -> list[int]:
        """Sizes of slices and fillers, as they lie."""
        return self.spread(self.sizes, lambda free: free)

    def spread(self, slices: Sequence[T], filler: Callable[[int], T]) -> list[T]:
        """``slices`` with ``filler(columns)`` before each that isn't to follow straight on the last one."""
        if not self.fillers:
            return list(slices)
        pieces = []
        for free, each in zip(self.fillers, slices, strict=True):
            pieces += [filler(free), each] if free else [each]
        return pieces

    def cut(self, row: Tensor) -> list[Tensor]:
        """The slices in a row of ``columns`` elements, 1-D: views."""
        are_slices = self.spread([True] * len(self.sizes), lambda free: False)
        return list(compress(row.split_with_sizes(self.pieces), are_slices))


def laid_out(sizes: Sequence[int], alignment: Alignment) -> RowLayout:
    """Slices of these sizes in a row of their own, aligned."""
    fillers = []
    end = 0
    for size in sizes:
        free = -end % alignment.slices if size >= alignment.slices else 0
        fillers.append(free)
        end += free + size
    return RowLayout(tuple(sizes), tuple(fillers) if any(fillers) else (), alignment.padded(end) - end)
