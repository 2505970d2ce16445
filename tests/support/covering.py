"""Selections of what can be combined, in which every two levels of different factors meet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

Row = tuple[Any, ...]


def covering(*factors: Iterable[Any]) -> list[Row]:
    """Rows with a level of each factor: not all of them, but any two levels of two factors are in one.

    Greedy, and always the same: a row begins with a pair that hasn't met yet, and takes what meets most others.
    """
    levels = [list(factor) for factor in factors]
    due = {
        ((one, a), (other, b)): None  # a dict keeps its order
        for one, other in combinations(range(len(levels)), 2)
        for a in range(len(levels[one]))
        for b in range(len(levels[other]))
    }
    rows = []
    while due:
        row = dict(next(iter(due)))
        for factor in (factor for factor in range(len(levels)) if factor not in row):
            row[factor] = max(range(len(levels[factor])), key=lambda at: len(_met({**row, factor: at}) & due.keys()))
        for pair in _met(row):
            due.pop(pair, None)
        rows.append(tuple(levels[factor][row[factor]] for factor in range(len(levels))))
    return rows


def _met(row: dict[int, int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(combinations(sorted(row.items()), 2))  # type: ignore[arg-type]
