"""Which rank does which work items, and which of them travel together: integers only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

# Indices of items that travel together: for each rank those that it does.
Batch = list[list[int]]


class WorkItem(NamedTuple):
    """Something that one rank does for all.

    Attributes:
        cost: how long it takes, in any unit.
        numel: elements that travel to whoever does it, and back.
    """

    cost: int
    numel: int


def share_out(items: Sequence[WorkItem], world_size: int, most: int) -> list[Batch]:
    """Share ``items`` out, the costliest first, each to the rank that has least to do so far.

    Two ranks' costs differ by one item at most, and the largest is at most 4/3 of the least possible (Graham, 1969).
    The same on every rank that gives the same.

    Args:
        items: the work.
        world_size: ranks that share it.
        most: elements in a batch, for each rank, unless there is but one for each.
    """
    loads = [(0, rank) for rank in range(world_size)]
    batches: list[Batch] = []
    count = held = 0
    for place in sorted(range(len(items)), key=lambda place: -items[place].cost):
        cost, numel = items[place]
        if not batches or (count >= world_size and held + numel > most * world_size):
            batches.append([[] for _ in range(world_size)])
            count = held = 0
        count, held = count + 1, held + numel
        load, rank = loads[0]
        batches[-1][rank].append(place)
        heapq.heapreplace(loads, (load + cost, rank))
    return batches
