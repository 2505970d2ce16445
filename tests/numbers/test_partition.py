"""The two splits: against literal tables, and against torch's own chunk."""

from __future__ import annotations

import pytest
import torch

from lowlevel_zero.partition import EvenSplit, WholeSplit, deal_out

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


# ---- whole parameters on one rank each ----


def test_whole_split_gives_all_to_its_owner() -> None:
    split = WholeSplit(6, 3, owner=1)
    assert (split.rows, split.slice_size, split.short, split.padding, split.padded_numel) == (1, 16, 10, 0, 6)
    assert WholeSplit(256, 3, owner=1).slice_size == 256
    assert [split.span(rank) for rank in range(3)] == [(0, 0), (0, 6), (0, 0)]
    rows, p = torch.arange(6.0)[None], torch.empty(3, 2).t()
    assert [split.own_row(rows, rank).tolist() for rank in range(3)] == [[], [0, 1, 2, 3, 4, 5], []]
    assert torch.equal(split.shaped(rows[0], p), torch.tensor([[0.0, 2, 4], [1, 3, 5]]))
    assert split.shaped(rows[0], p).stride() == p.stride()
    assert split.shaped(rows[0, :0], p).shape == (0,)


def test_owner_that_is_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="owner below world_size, got 4, 2 and 2"):
        WholeSplit(4, 2, owner=2)


DEALT = [
    # costs, ranks, loads before, owners
    ([], 2, [], []),
    ([5], 3, [], [0]),
    ([1, 1, 1, 1], 2, [], [0, 1, 0, 1]),
    ([1, 2, 3], 2, [], [1, 1, 0]),
    ([1, 2, 3], 2, [10, 0], [1, 1, 1]),
    ([4, 4, 4, 4, 4, 4], 4, [], [0, 1, 2, 3, 0, 1]),
]


@pytest.mark.parametrize(("costs", "world_size", "loads", "owners"), DEALT)
def test_costliest_are_dealt_first_to_the_rank_with_least(
    costs: list[int], world_size: int, loads: list[int], owners: list[int]
) -> None:
    assert deal_out(costs, world_size, loads) == owners


@pytest.mark.parametrize(("layers", "width"), [(12, 768), (24, 2048), (32, 4096)])
def test_matrices_of_a_gpt_are_level(layers: int, width: int) -> None:
    costs = [factor * width * width for _ in range(layers) for factor in (3, 1, 4, 4)]
    for world_size in range(2, len(costs) // 2 + 1):
        loads = [0] * world_size
        for cost, owner in zip(costs, deal_out(costs, world_size), strict=True):
            loads[owner] += cost
        if world_size <= len(costs) // 4:
            assert max(loads) <= 1.15 * sum(costs) / world_size, world_size
        assert max(loads) <= 4 / 3 * sum(costs) / world_size
