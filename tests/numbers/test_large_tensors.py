"""Parameters of more elements than 31 bits count: all arithmetic of who owns what, where nothing is allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowlevel_zero.bookkeeping.bucket_plan import Item, make_plan
from lowlevel_zero.layout.records import parameter_layout, with_buckets
from lowlevel_zero.options import ZeroOptions
from lowlevel_zero.partition import EvenSplit, alignment_of
from lowlevel_zero.planning import estimate

NUMEL = 2**31 + 7


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
    (bucket,) = make_plan(items, [3, 2, 1, 0], 2**40).buckets
    assert bucket.starts == [at * (2**30 + 4) for at in range(4)]
    assert bucket.body == 2**32 + 16
    assert 0 <= bucket.row - bucket.body < alignment.short
    assert bucket.row % alignment.short == 0
    options = ZeroOptions(stage=2)
    parameters = [parameter_layout(f"{at}", (NUMEL,), torch.bfloat16, 0, (0, 1), split, options, 8) for at in range(4)]
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
