"""Same seed, same world size, same bits: whichever way communication overlaps, and however often it is run."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.support.oracle import Run, train_sharded
from tests.support.ranks import run_ranks


def drop(step: int, rank: int) -> set[int]:
    return {(step + rank) % 3} if step % 2 else {1}


@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (3, 2)])
def test_the_same_bits_twice_and_with_overlap_or_without(world_size: int, stage: int) -> None:
    run = Run(world_size=world_size, steps=4, micro_batches=2, drop=drop, clip=0.5)
    run = run.with_options(partition_grad=stage == 2, reduce_bucket_size=40)

    def live(rank: int, world_size: int) -> list[tuple[dict[str, Tensor], list[float]]]:
        ways = product((True, False), repeat=2)
        runs = [run.with_options(overlap_communication=one, overlap_allgather=other) for one, other in ways]
        return [train_sharded(rank, world_size, each) for each in (runs[0], *runs)]

    (expected, norms), *others = (trained for rank in run_ranks(live, world_size) for trained in rank)
    assert len(others) == 5 * world_size - 1
    for got, got_norms in others:
        assert got_norms == norms
        for name, value in expected.items():
            assert torch.equal(value, got[name]), name
