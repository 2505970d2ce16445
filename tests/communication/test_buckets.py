"""Buckets: their size follows the carrier where nobody chose one; packing and unpacking, element by element."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.bucket_store import pack
from lowlevel_zero.bookkeeping.gather_store import PART, GatherStore
from lowlevel_zero.communication.flat_buffers import unpack
from lowlevel_zero.communication.shard_group import SWITCH
from lowlevel_zero.layout import layout_of
from tests.support.ranks import run_ranks

# Sizes: all ranks choose alike


HALF = 2**19  # elements of each parameter: two make a bucket by shared memory


def buckets_of(rank: int, world_size: int, switched_off: int, options: dict[str, Any]) -> list[tuple[str, ...]]:
    """Train one step with shared memory switched off on one rank; return the names in each bucket."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == switched_off:
            patch.setenv(SWITCH, "0")
        model = nn.ParameterList(nn.Parameter(torch.zeros(HALF)) for _ in range(9))
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, **options)
    optimizer.backward(torch.stack([(rank + 1) * p.sum() for p in model]).sum())
    optimizer.step()
    mean = -sum(range(1, world_size + 1)) / world_size
    assert all(torch.equal(p, torch.full_like(p, mean)) for p in model)
    return [bucket.members for bucket in layout_of(optimizer).buckets]


def test_messages_carry_larger_buckets_than_shared_memory_unless_a_size_is_chosen() -> None:
    nobody, rank_0 = -1, 0
    by_memory, by_messages = (run_ranks(buckets_of, 2, off, {"partition_grad": True}) for off in (nobody, rank_0))
    assert [[len(names) for names in found] for found in by_memory] == [[2, 2, 2, 2, 1]] * 2
    assert [[len(names) for names in found] for found in by_messages] == [[8, 1]] * 2  # 2**22 elements
    of_three = run_ranks(buckets_of, 3, rank_0, {})
    assert [[len(names) for names in found] for found in of_three] == [[9]] * 3  # 3 * 2**21 elements
    chosen = run_ranks(buckets_of, 2, rank_0, {"reduce_bucket_size": HALF})
    assert [[len(names) for names in found] for found in chosen] == [[1] * 9] * 2


def most_gathers(rank: int, world_size: int, switch: str) -> int:
    """Return the largest number of gathers that were under way at once in a step over many parameters."""
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, switch)
        limit = GatherStore.limit

        def counting(store: GatherStore) -> None:
            counts.append(len(store._under_way))
            limit(store)

        patch.setattr(GatherStore, "limit", counting)
        model = nn.ParameterList(nn.Parameter(torch.zeros(world_size * PART)) for _ in range(12))
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = LowLevelZeroOptimizer(sgd, model=model, reduce_bucket_size=1)
        optimizer.backward(torch.stack([p.sum() for p in model]).sum())
        optimizer.step()
    assert all(torch.equal(p, torch.full_like(p, -1.0)) for p in model)
    return max(counts)


def test_messages_have_more_gathers_under_way_than_shared_memory_unless_there_are_many_ranks() -> None:
    assert run_ranks(most_gathers, 2, "0") == [9, 9]
    assert run_ranks(most_gathers, 2, "1") == [3, 3]
    assert run_ranks(most_gathers, 4, "0") == [5] * 4


# Packing into a wire and out of it: against the definition


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
