"""Rows: a sum over the ranks as one of them has it: its own row, and the others' for who looks."""

from __future__ import annotations

from torch import Tensor


class Rows:
    """What an all-reduce leaves, here with all rows in this rank's memory.

    Args:
        whole: ``[rows, columns]``; later ranks' rows, of padding alone, may be missing.
        rank: this one.

    Attributes:
        writable: ``columns`` are views, to be written to.
    """

    __slots__ = ("_rank", "_whole")

    writable = True

    def __init__(self, whole: Tensor, rank: int) -> None:
        self._whole = whole
        self._rank = rank

    @property
    def at_hand(self) -> Tensor:
        """This rank's row, or the first where it has none, ``[columns]``."""
        return self._whole[self._rank if self._rank < len(self._whole) else 0]

    @property
    def row(self) -> Tensor:
        """This rank's, or zeros, ``[columns]``."""
        return self.at_hand if self._rank < len(self._whole) else self._whole.new_zeros(self._whole.shape[1])

    def columns(self, start: int, count: int) -> Tensor:
        """Some of all rows, ``[rows, count]``."""
        return self._whole.narrow(1, start, count)

    def add_to(self, total: Tensor) -> None:
        """Add the first columns to ``total``, ``[rows, count]``."""
        total.add_(self.columns(0, total.shape[1]))

    def held(self) -> list[Tensor]:
        """The tensors that this takes."""
        return [self._whole]
