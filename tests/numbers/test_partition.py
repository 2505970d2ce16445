"""The two splits: against literal tables, against torch's own chunk, and of more elements than 31 bits count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowlevel_zero.bookkeeping.bucket_plan import Item, make_plan
from lowlevel_zero.layout.records import ParameterLayout, with_buckets
from lowlevel_zero.optim.costs import costs_of
from lowlevel_zero.options import Communication, ZeroOptions
from lowlevel_zero.partition import EvenSplit, WholeSplit, alignment_of, deal_out
from lowlevel_zero.planning import estimate

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


def test_equal_splits_are_equal_values() -> None:
    assert EvenSplit(5, 2) == EvenSplit(5, 2)
    assert len({EvenSplit(5, 2), EvenSplit(5, 2), EvenSplit(6, 2)}) == 2


def test_what_travels_in_fp8_has_2048_elements_or_more_that_ranks_share() -> None:
    in_fp8 = Communication(fp8=True).in_fp8
    splits = [EvenSplit(2047, 2), EvenSplit(2048, 2), EvenSplit(2048, 1), WholeSplit(2048, 2, owner=0)]
    assert [in_fp8(split) for split in splits] == [False, True, False, False]


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
    before = [(rank, (load,)) for rank, load in enumerate(loads)]
    assert deal_out([(cost,) for cost in costs], world_size, before) == owners


def test_two_measures_are_level_at_once() -> None:
    """Two that are large are slow to step, others are quick: by either measure alone both large ones could meet."""
    costs = [(1.0, 100), (1.0, 100), (100.0, 1), (100.0, 1)]
    assert sorted(deal_out(costs, 2)[:2]) == sorted(deal_out(costs, 2)[2:]) == [0, 1]
    assert deal_out([(0.0,), (0.0,)], 2) == [0, 0]


# The matrices of GPTs: (rows, columns) of a block, in units of the width.
GPT_2 = [(3, 1), (1, 1), (4, 1), (1, 4)]
APART = [(1, 1)] * 4 + [(4, 1), (1, 4)]
LLAMA = [(1, 1), (0.25, 1), (0.25, 1), (1, 1), (3.5, 1), (3.5, 1), (1, 3.5)]
GPTS = [(GPT_2, 12, 768), (GPT_2, 24, 2048), (GPT_2, 48, 1600), (APART, 12, 768), (LLAMA, 32, 4096), (LLAMA, 16, 2048)]


@pytest.mark.parametrize(("block", "layers", "width"), GPTS)
def test_work_and_memory_of_a_gpt_are_level(block: list[tuple[float, float]], layers: int, width: int) -> None:
    """Each rank has at most 1.15 of the mean, with two matrices a rank or more, but for numbers of no use.

    Matrices aren't cut. Where two of the ``world_size + 1`` largest are more than 1.15 of the mean, one rank has them.
    """
    p = [torch.empty(int(rows * width), int(columns * width), device="meta") for rows, columns in block] * layers
    muon = type("Muon", (torch.optim.SGD,), {})([torch.nn.Parameter(torch.ones(1))])
    costs = [costs_of(muon, {}, each, "", None) for each in p]
    for world_size in (2, 3, 4, 6, 8, 12, 16, 32, 64, 128):
        if 2 * world_size > len(p):
            continue
        loads = [[0.0, 0.0] for _ in range(world_size)]
        for measures, owner in zip(costs, deal_out(costs, world_size), strict=True):
            loads[owner] = [load + each for load, each in zip(loads[owner], measures, strict=True)]
        for measure, of_rank in zip(zip(*costs, strict=True), zip(*loads, strict=True), strict=True):
            assert max(of_rank) <= 1.15 * sum(measure) / world_size, world_size


# ---- parameters of more elements than 31 bits count, where nothing is allocated ----

NUMEL = 2**31 + 7


def test_a_kernel_costs_as_the_matrix_does_that_it_is_flattened_to_and_a_stack_as_its_matrices() -> None:
    muon = type("Muon", (torch.optim.SGD,), {})([torch.nn.Parameter(torch.ones(1))])
    shapes = ((8, 4, 3, 5), (8, 60), (7, 8, 60))
    kernel, one, stack = (costs_of(muon, {}, torch.empty(shape, device="meta"), "", None) for shape in shapes)
    assert kernel == one == (5 * 8 * 8 * (2 * 60 + 8), 480)
    assert stack == (7 * one[0], 7 * one[1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 64])
def test_slices_tile_it(world_size: int) -> None:
    spans = [EvenSplit(NUMEL, world_size).span(rank) for rank in range(world_size)]
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == NUMEL
    owned = torch.empty(NUMEL, device="meta").tensor_split([stop for _, stop in spans[:-1]])
    assert [stop - start for start, stop in spans] == [len(part) for part in owned]


def test_a_bucket_of_several_has_all_their_places() -> None:
    split, alignment = EvenSplit(NUMEL, 2), alignment_of(torch.bfloat16)
    items = [Item(split, torch.bfloat16, True, alignment=alignment) for _ in range(4)]
    (bucket,) = make_plan(items, [3, 2, 1, 0], 2**40)
    assert bucket.starts == [at * (2**30 + 4) for at in range(4)]
    assert bucket.body == 2**32 + 16
    assert 0 <= bucket.row - bucket.body < alignment.short
    assert bucket.row % alignment.short == 0
    options = ZeroOptions(stage=2)
    parameters = [ParameterLayout(f"{at}", (NUMEL,), torch.bfloat16, 0, (0, 1), split, options, 8) for at in range(4)]
    layout = with_buckets([(parameters, make_plan(items, [3, 2, 1, 0], 2**40))], stage=2)
    assert [p.offset for p in layout.parameters] == [3 * (2**30 + 4), 2 * (2**30 + 4), 2**30 + 4, 0]
    assert layout.buckets[0].buffer_bytes == 2 * bucket.row * 2
    assert layout.parameters[0].as_dict()["spans"] == [(0, 2**30 + 4), (2**30 + 4, NUMEL)]
    assert layout.bytes.parameters == 4 * 2 * (NUMEL + 1)


def test_its_memory_is_estimated() -> None:
    model = nn.Linear(2**16, 2**15 + 1, bias=False, device="meta", dtype=torch.bfloat16)
    assert model.weight.numel() > 2**31
    held = estimate(model, world_size=4, stage=2)
    assert held.parameters == model.weight.numel() * 2
    assert held.masters == model.weight.numel()
    assert held.states == pytest.approx(2 * model.weight.numel(), abs=64)
