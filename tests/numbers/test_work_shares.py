"""Who takes which piece of work: as tables, and as bounds."""

from __future__ import annotations

import random

import pytest

from lowlevel_zero.optim.muon import Batch, WorkItem, share_out


def pieces(*costs: int) -> list[WorkItem]:
    return [WorkItem(cost, cost) for cost in costs]


@pytest.mark.parametrize(
    ("costs", "world_size", "most", "expected"),
    [
        ((), 2, 100, []),
        ((5,), 3, 100, [[[0], [], []]]),
        ((1, 1, 1, 1), 2, 100, [[[0, 2], [1, 3]]]),
        ((1, 1, 1, 1), 2, 1, [[[0], [1]], [[2], [3]]]),
        ((2, 9, 4, 3), 2, 100, [[[1], [2, 3, 0]]]),
        ((9, 9, 9), 2, 1, [[[0], [1]], [[2], []]]),  # larger than a batch: a piece for each rank all the same
        ((4, 3, 2), 1, 4, [[[0]], [[1]], [[2]]]),
    ],
)
def test_tables(costs: tuple[int, ...], world_size: int, most: int, expected: list[Batch]) -> None:
    assert share_out(pieces(*costs), world_size, most) == expected


@pytest.mark.parametrize("seed", range(8))
def test_every_piece_has_one_owner_and_the_ranks_have_as_much_to_do(seed: int) -> None:
    draw = random.Random(seed)
    world_size, most = draw.randint(1, 9), draw.randint(1, 300)
    work = [WorkItem(draw.randint(1, 100) ** 2, draw.randint(1, 100)) for _ in range(draw.randint(1, 60))]
    batches = share_out(work, world_size, most)
    assert sorted(place for batch in batches for taken in batch for place in taken) == list(range(len(work)))
    loads = [sum(work[place].cost for batch in batches for place in batch[rank]) for rank in range(world_size)]
    assert max(loads) - min(loads) <= max(piece.cost for piece in work)
    for batch in batches:
        places = [place for taken in batch for place in taken]
        assert len(batch) == world_size
        assert len(places) <= world_size or sum(work[place].numel for place in places) <= most * world_size
