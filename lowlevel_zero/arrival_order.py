"""The order in which gradients come: rank 0's first backward teaches it to all ranks, and the plan follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .bookkeeping.bucket_plan import completed
from .communication.collectives import ShardGroup


class PlanState(NamedTuple):
    """What the first steps have taught about the order of gradients, by parameter index.

    Attributes:
        order: as rank 0's first backward had it: what came, then what didn't.
        came: how many came.
        reentrant: gradients may come again after their bucket has left.
        repeats: parameters whose gradient came more than once in one backward.
        forecast: one number, 1 where unused parameters are being detected; None: as at first. (Older states have more.)
    """

    order: list[int]
    came: int
    reentrant: bool
    repeats: list[int]
    forecast: list[int] | None


class ArrivalOrder:
    """What came in rank 0's first backward, in its order, and what didn't.

    Args:
        group: the ranks that learn it.

    Attributes:
        known: all ranks know it; else gradients are expected in the reverse order of registration.
        came: indices of the parameters that had a gradient.
        lacked: those of the others.
    """

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self.forget()

    def forget(self) -> None:
        """Learn it anew."""
        self._first: Sequence[int] | None = None
        self.known = False
        self.came: list[int] = []
        self.lacked: list[int] = []

    def restore(self, state: PlanState) -> None:
        """Have it from another run."""
        self._first = None
        self.known = True
        self.came, self.lacked = state.order[: state.came], state.order[state.came :]

    def saw(self, arrivals: Sequence[int]) -> None:
        """In one more round gradients came in this order; the first since it was forgotten counts."""
        if self._first is None:
            self._first = arrivals

    def learn(self, count: int) -> None:
        """Take over rank 0's, of ``count`` parameters. All ranks call it; it communicates."""
        came = dict.fromkeys(self._first or reversed(range(count)))
        lacked = [index for index in range(count) if index not in came]
        number, *order = self._group.from_rank_zero([len(came), *came, *lacked])
        self.came, self.lacked = order[:number], order[number:]
        self.known = True

    def expected(self, count: int, detecting: bool) -> list[int]:
        """In which order gradients of ``count`` parameters will come.

        What didn't come takes its place among the others if it is known beforehand when it will; else it is last.
        """
        if not self.known:
            return list(reversed(range(count)))
        return completed(self.came, count) if detecting else self.came + self.lacked
