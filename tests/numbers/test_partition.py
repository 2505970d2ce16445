"""The even split: against literal tables, and against torch's own chunk."""

from __future__ import annotations

import pytest
import torch

from lowlevel_zero.partition import EvenSplit

TABLE = [
    # numel, world_size, slice_size, padding, what each rank owns
    (0, 1, 0, 0, [(0, 0)]),
    (0, 3, 0, 0, [(0, 0), (0, 0), (0, 0)]),
    (1, 1, 1, 0, [(0, 1)]),
    (1, 4, 1, 3, [(0, 1), (1, 1), (1, 1), (1, 1)]),
    (4, 2, 2, 0, [(0, 2), (2, 4)]),
    (5, 2, 3, 1, [(0, 3), (3, 5)]),
    (5, 4, 2, 3, [(0, 2), (2, 4), (4, 5), (5, 5)]),
    (9, 4, 3, 3, [(0, 3), (3, 6), (6, 9), (9, 9)]),
    (10, 3, 4, 2, [(0, 4), (4, 8), (8, 10)]),
]


@pytest.mark.parametrize(("numel", "world_size", "slice_size", "padding", "spans"), TABLE)
def test_split_is_the_table_s(
    numel: int, world_size: int, slice_size: int, padding: int, spans: list[tuple[int, int]]
) -> None:
    split = EvenSplit(numel, world_size)
    assert (split.slice_size, split.padding) == (slice_size, padding)
    assert split.padded_numel == numel + padding == slice_size * world_size
    assert [split.span(rank) for rank in range(world_size)] == spans


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8, 64])
def test_split_is_that_of_torch_chunk(world_size: int) -> None:
    for numel in (0, 1, 2, 3, 5, 8, 13, 63, 64, 65, 100):
        flat = torch.arange(numel)
        chunks = [chunk for chunk in flat.chunk(world_size) if chunk.numel()]
        chunks += [flat[numel:]] * (world_size - len(chunks))
        split = EvenSplit(numel, world_size)
        for rank, chunk in enumerate(chunks):
            start, stop = split.span(rank)
            assert torch.equal(flat[start:stop], chunk), f"rank {rank} of {numel} elements"


@pytest.mark.parametrize(("numel", "world_size"), [(-1, 1), (3, 0), (3, -2)])
def test_impossible_split_is_refused(numel: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"numel >= 0 and world_size >= 1, got {numel} and {world_size}"):
        EvenSplit(numel, world_size)


def test_equal_splits_are_equal_values() -> None:
    assert EvenSplit(5, 2) == EvenSplit(5, 2)
    assert len({EvenSplit(5, 2), EvenSplit(5, 2), EvenSplit(6, 2)}) == 2
