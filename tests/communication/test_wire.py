"""Packing into a wire and out of it: against the definition, element by element."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lowlevel_zero.bookkeeping.bucket_store import pack
from lowlevel_zero.communication.flat_buffers import unpack

NUMELS = {
    "one": [1],
    "ones": [1, 1, 1],
    "below the world size": [2, 3],
    "divisible": [12, 24],
    "odd": [5, 13, 1, 7, 100],
    "many": [*range(1, 40)],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def slice_size(numel: int, world_size: int) -> int:
    return -(-numel // world_size)


def packed(flats: list[Tensor], world_size: int, dtype: torch.dtype) -> Tensor:
    row = sum(slice_size(flat.numel(), world_size) for flat in flats)
    wire = torch.full((world_size, row), -7.0, dtype=dtype)
    pack(wire, flats)
    return wire


def by_element(wire: Tensor, flats: list[Tensor]) -> Tensor:
    """The wire, element by element: the definition."""
    expected = torch.zeros_like(wire)
    column = 0
    for flat in flats:
        size = slice_size(flat.numel(), len(wire))
        for at, value in enumerate(flat.tolist()):
            expected[at // size, column + at % size] = value
        column += size
    return expected


@pytest.mark.parametrize("numels", NUMELS.values(), ids=NUMELS.keys())
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_packing_groups_by_rank_and_unpacking_undoes_it(world_size: int, numels: list[int]) -> None:
    flats = [torch.randn(numel) for numel in numels]
    wire = packed(flats, world_size, torch.float32)
    assert torch.equal(wire, by_element(wire, flats))
    filled = torch.cat([wire, torch.full((world_size, 3), -9.0)], dim=1)  # a row may be padded behind its slices
    sizes = [slice_size(numel, world_size) for numel in numels]
    homes = [torch.full((world_size * size,), -7.0) for size in sizes]
    unpack(filled, [home.view(world_size, size) for home, size in zip(homes, sizes, strict=True)])
    for home, flat in zip(homes, flats, strict=True):
        assert torch.equal(home[: flat.numel()], flat)
        assert home[flat.numel() :].eq(0).all()


def test_packing_casts() -> None:
    for of, to in product(DTYPES, DTYPES):
        flats = [torch.randn(numel).to(of) for numel in (5, 13, 1)]
        wire = packed(flats, 4, to)
        assert torch.equal(wire, by_element(wire, [flat.to(to) for flat in flats])), f"{of} to {to}"


@pytest.mark.parametrize("world_size", [1, 3])
def test_expanded_and_strided_numbers_pack_as_if_they_were_written_out(world_size: int) -> None:
    zero = torch.zeros((), dtype=torch.bfloat16)
    strided = torch.arange(10.0).bfloat16()[::2]
    flats = [zero.expand(5), torch.randn(7).bfloat16(), strided, (zero + 1).expand(2 * world_size)]
    wire = packed(flats, world_size, torch.bfloat16)
    assert torch.equal(wire, by_element(wire, [flat.clone() for flat in flats]))
    assert wire[:, -2:].eq(1).all()
