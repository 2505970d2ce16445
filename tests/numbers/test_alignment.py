"""Alignment: how wide rows are, as a table, in plans and in the buffers of a run, of which nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero import Communication, LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.layout import traffic_of
from lowlevel_zero.partition import ROW_BYTES, WIDE_ROW, Alignment, alignment_of
from tests.support.judging import check_run
from tests.support.numbers import trained
from tests.support.on_ranks import on_ranks
from tests.support.options import grouped
from tests.support.oracle import Run, train_sharded
from tests.support.ranks import run_ranks

STAGES: dict[str, dict[str, Any]] = {"stage 1": {}, "stage 2": {"partition_grad": True}}


# A row


@pytest.mark.parametrize(
    ("columns", "alignment", "padded"),
    [
        (0, Alignment(4, 4), 0),
        (1, Alignment(4, 4), 1),
        (127, Alignment(4, 4), 127),
        (129, Alignment(4, 4), 130),
        (255, Alignment(4, 4), 256),
        (256, Alignment(4, 4), 256),
        (257, Alignment(4, 4), 260),
        (5, Alignment(), 5),
        (257, Alignment(4, 512), 260),
        (512, Alignment(4, 512), 512),
        (513, Alignment(4, 512), 1024),
    ],
)
def test_a_row_is_padded_at_its_end(columns: int, alignment: Alignment, padded: int) -> None:
    assert alignment.padded(columns) == padded


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_units_are_of_128_bytes(dtype: torch.dtype) -> None:
    assert alignment_of(dtype).short * dtype.itemsize == ROW_BYTES == 128
    assert alignment_of(dtype).wide == alignment_of(dtype).short
    assert alignment_of(dtype, wide_rows=True) == (alignment_of(dtype).short, 2**16)


# A run


def of_each_kind(world_size: int) -> Run:
    """Layers dropped by rank, so that plans are narrowed, and micro-batches, so that sums of other members merge."""
    return Run(
        world_size, 4, 2, drop=lambda step, rank: {(step + rank) % 2, 2} if step else set(), options={"verbose": False}
    )


@pytest.mark.parametrize(("world_size", "stage"), [(2, "stage 1"), (3, "stage 2")])
def test_alignment_changes_no_bit(world_size: int, stage: str, request: pytest.FixtureRequest) -> None:
    """Of elementwise sums; in stage 1 the sums of messages depend on where in a wire a number lies."""
    run = of_each_kind(world_size).with_options(reduce_bucket_size=60, **STAGES[stage])
    aligned = run_ranks(train_sharded, world_size, run)
    request.getfixturevalue("unaligned")
    plain = run_ranks(train_sharded, world_size, run)
    for (ours, norms), (theirs, plain_norms) in zip(aligned, plain, strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
        assert norms == pytest.approx(plain_norms, rel=1e-6)


WIDER: dict[str, dict[str, Any]] = {
    "rows": {"pad_buckets_for_high_nccl_busbw": True, "reduce_bucket_size": 300, "partition_grad": True},
    "slices": {"overlap_allgather": True},
    "slices on the host": {"cpu_offload": True, "partition_grad": True},
    "slices that are scattered": {"partition_grad": True, "gradient_predivide_factor": 2.0},
}


def test_wider_rows_and_slices_change_no_number(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    """Wide rows are of a multiple of 64 elements here, in place of 65,536, and slices of a multiple of 7."""
    monkeypatch.setattr("lowlevel_zero.partition.WIDE_ROW", 64)
    monkeypatch.setattr(
        "lowlevel_zero.construction.sharding.slice_multiple", lambda optimizer: lambda numel, world_size: 7
    )
    cases = {
        name: of_each_kind(3).with_options(**grouped({"reduce_bucket_size": 60, **own})) for name, own in WIDER.items()
    }
    for name, run, ran in trained(cases):
        with subtests.test(name):
            check_run(run, ran.values())


@on_ranks(2, [True, False])
def test_rows_are_as_wide_as_wanted(rank: int, wide: bool) -> None:
    model = nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 200))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = Communication(pad_buckets_for_high_nccl_busbw=wide)
    optimizer = LowLevelZeroOptimizer(sgd, model=model, partition_grad=True, communication=chosen)
    optimizer.backward(model(torch.ones(1, 400)).sum())
    optimizer.step()
    sent, elements = traffic_of(optimizer), 400 * 300 + 300 + 300 * 200 + 200
    if wide:
        assert sent == {"reduce": 2 * WIDE_ROW * 4, "gather": 2 * WIDE_ROW * 4}
    else:
        assert all(elements // 2 * 4 <= nbytes < (elements // 2 + 100) * 4 for nbytes in sent.values())


@pytest.mark.parametrize(("world_size", "shared"), [(2, "0"), (3, "1")], ids=["messages", "shared memory"])
def test_gathers_are_aligned_and_fill_the_rows(world_size: int, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", shared)
    sizes = [5, 40, 1, 33, 64]

    def gather(rank: int, world_size: int) -> None:
        group = ShardGroup()
        group.connect()
        for alignment in (Alignment(), Alignment(32, 32), Alignment(32, 128)):
            for dtype in (torch.float32, torch.bfloat16):
                rows = [torch.full((world_size, size), -1.0, dtype=dtype) for size in sizes]
                own = [torch.arange(size) + 10.0 * rank for size in sizes]
                group.gather(own, rows, alignment=alignment).wait()
                for size, each in zip(sizes, rows, strict=True):
                    expected = torch.arange(size) + 10.0 * torch.arange(world_size)[:, None]
                    assert torch.equal(each, expected.to(dtype))

    run_ranks(gather, world_size)
