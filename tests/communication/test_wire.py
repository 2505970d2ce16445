"""Packing into a wire and out of it: against public operations, and against a table."""

from __future__ import annotations

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


def empty_wire(numels: list[int], world_size: int, dtype: torch.dtype) -> Tensor:
    row = sum(slice_size(numel, world_size) for numel in numels)
    return torch.full((world_size, row), -7.0, dtype=dtype)


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


def test_wire_is_the_table_s() -> None:
    a, b = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([10.0, 11.0, 12.0, 13.0, 14.0])
    wire = torch.full((2, 5), -7.0)
    pack(wire, [a, b])
    assert wire.tolist() == [[0, 1, 10, 11, 12], [2, 0, 13, 14, 0]]


@pytest.mark.parametrize("numels", NUMELS.values(), ids=NUMELS.keys())
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_packing_groups_by_rank(world_size: int, numels: list[int]) -> None:
    flats = [torch.randn(numel) for numel in numels]
    wire = empty_wire(numels, world_size, torch.float32)
    pack(wire, flats)
    assert torch.equal(wire, by_element(wire, flats))


@pytest.mark.parametrize("of", DTYPES, ids=str)
@pytest.mark.parametrize("to", DTYPES, ids=str)
def test_packing_casts(of: torch.dtype, to: torch.dtype) -> None:
    flats = [torch.randn(numel).to(of) for numel in (5, 13, 1)]
    wire = empty_wire([5, 13, 1], 4, to)
    pack(wire, flats)
    assert torch.equal(wire, by_element(wire, [flat.to(to) for flat in flats]))


@pytest.mark.parametrize("world_size", [1, 3])
def test_expanded_numbers_pack_as_if_they_were_written_out(world_size: int) -> None:
    zero = torch.zeros((), dtype=torch.bfloat16)
    flats = [zero.expand(5), torch.randn(7).bfloat16(), (zero + 1).expand(2 * world_size)]
    wire = empty_wire([5, 7, 2 * world_size], world_size, torch.bfloat16)
    pack(wire, flats)
    assert torch.equal(wire, by_element(wire, [flat.clone() for flat in flats]))
    assert wire[:, -2:].eq(1).all()


def test_strided_columns_pack() -> None:
    flat = torch.arange(10.0)[::2]
    wire = empty_wire([5], 2, torch.float32)
    pack(wire, [flat])
    assert wire.tolist() == [[0, 2, 4], [6, 8, 0]]


@pytest.mark.parametrize("numels", NUMELS.values(), ids=NUMELS.keys())
@pytest.mark.parametrize("world_size", [1, 3])
def test_unpacking_undoes_packing(world_size: int, numels: list[int]) -> None:
    flats = [torch.randn(numel) for numel in numels]
    wire = empty_wire(numels, world_size, torch.float32)
    pack(wire, flats)
    filled = torch.cat([wire, torch.full((world_size, 3), -9.0)], dim=1)  # a row may be padded behind its slices
    sizes = [slice_size(numel, world_size) for numel in numels]
    homes = [torch.full((world_size * size,), -7.0) for size in sizes]
    rows = [home.view(world_size, size) for home, size in zip(homes, sizes, strict=True)]
    unpack(filled, rows)
    for home, flat in zip(homes, flats, strict=True):
        assert torch.equal(home[: flat.numel()], flat)
        assert home[flat.numel() :].eq(0).all()
