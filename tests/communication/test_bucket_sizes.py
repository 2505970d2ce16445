"""The bucket size follows the carrier where the caller has chosen none, and all ranks choose alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.gather_store import PART, GatherStore
from lowlevel_zero.communication.shard_group import SWITCH
from lowlevel_zero.layout import layout_of
from tests.support.ranks import run_ranks

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
