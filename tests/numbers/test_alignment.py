"""Alignment: how wide rows are, as a table, in plans and in the buffers of a run, of which nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.bucket_plan import BucketPlan, Item, PlannedBucket, make_plan, narrowed
from lowlevel_zero.bookkeeping.bucket_store import Bucket, Reduction
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.partition import ROW_BYTES, WIDE_ROW, Alignment, EvenSplit, alignment_of
from tests.support.judging import check_run
from tests.support.oracle import Run, train_sharded
from tests.support.ranks import run_cases, run_ranks

STAGES: dict[str, dict[str, Any]] = {"stage 1": {}, "stage 2": {"partition_grad": True}}
over_stages = pytest.mark.parametrize("stage", STAGES)


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


# A plan


def random_plan(seed: int, alignment: Alignment) -> tuple[list[Item], BucketPlan]:
    draw = random.Random(seed)
    world_size = draw.choice([1, 2, 3, 4, 8])
    numels = [draw.choice([1, 3, 17, 64, 1000, 4096, 65_537, 2**17]) for _ in range(draw.randint(1, 30))]
    items = [Item(EvenSplit(numel, world_size), "a", draw.random() < 0.8, alignment=alignment) for numel in numels]
    return items, make_plan(items, draw.sample(range(len(items)), len(items)), draw.choice([1, 5000, 2**19]))


def check_bucket(bucket: PlannedBucket, items: list[Item], alignment: Alignment) -> None:
    assert bucket.sizes == tuple(items[index].split.slice_size for index in bucket.members)
    assert bucket.row == alignment.padded(bucket.body)
    assert bucket.body > alignment.wide > alignment.short or 0 <= bucket.row - bucket.body <= 0.02 * bucket.body
    assert not bucket.in_place or bucket.row == bucket.body == bucket.sizes[0]


@pytest.mark.parametrize("alignment", [alignment_of(torch.float32), alignment_of(torch.float32, wide_rows=True)])
@pytest.mark.parametrize("seed", range(20))
def test_any_plan_is_aligned_and_so_is_what_is_left_of_it(seed: int, alignment: Alignment) -> None:
    items, plan = random_plan(seed, alignment)
    alignments = [alignment] * len(items)
    used = [random.Random(seed * 100 + index).random() < 0.5 for index in range(len(items))]
    for one in (plan, narrowed(plan, used, alignments)):
        for bucket in one.buckets:
            check_bucket(bucket, items, alignment)
    assert narrowed(plan, [True] * len(items), alignments) == plan


def test_a_gradient_of_unaligned_slices_is_packed() -> None:
    items = [Item(EvenSplit(numel, 2), "a", True, alignment=alignment_of(torch.float32)) for numel in (4002, 4096)]
    buckets = make_plan(items, [0, 1], 1000).buckets
    assert [(bucket.in_place, bucket.row) for bucket in buckets] == [(False, 2016), (True, 2048)]


# A run


@contextmanager
def packed_wires() -> Iterator[list[tuple[PlannedBucket, Tensor, list[Tensor | None]]]]:
    """Buckets that are packed, their wires, as they leave, and the gradients in them."""
    seen: list[tuple[PlannedBucket, Tensor, list[Tensor | None]]] = []
    pack = Bucket._packed

    def packed(bucket: Bucket, gradients: list[Tensor | None], how: Reduction) -> Tensor:
        kept = [None if gradient is None else gradient.clone() for gradient in gradients]
        wire = pack(bucket, gradients, how)
        seen.append((bucket.planned, wire.clone(), kept))
        return wire

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "_packed", packed)
        yield seen


class Mixed(nn.Module):
    """Slices of more and of fewer than 128 bytes; the last parameter is used on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 500, 64, 1, 129, 30, 256, 777)
        self.all = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)

    def forward(self, rank: int) -> Tensor:
        return torch.cat(list(self.all)[: len(self.all) - (rank > 0)]).square().sum() * (rank + 1)


def check_wire(bucket: PlannedBucket, wire: Tensor, gradients: list[Tensor | None]) -> None:
    """Each slice behind the one before it, and zeros behind the last, up to the row's aligned width."""
    assert wire.shape[1] == alignment_of(wire.dtype).padded(bucket.body)
    end = 0
    for size, gradient in zip(bucket.sizes, gradients, strict=True):
        flat = wire[:, end : end + size].reshape(-1)
        expected = torch.zeros_like(flat)
        if gradient is not None:
            expected[: gradient.numel()] = gradient
        assert torch.equal(flat, expected)
        end += size
    assert wire[:, end:].eq(0).all()


@pytest.mark.parametrize(
    ("world_size", "dtype", "stage"),
    [
        (1, torch.float32, "stage 1"),
        (2, torch.bfloat16, "stage 2"),
        (3, torch.float32, "stage 2"),
        (4, torch.bfloat16, "stage 1"),
    ],
    ids=str,
)
def test_rows_are_aligned_in_buffers(stage: str, world_size: int, dtype: torch.dtype) -> None:
    def train(rank: int, world_size: int) -> None:
        model = Mixed().to(dtype)
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer = LowLevelZeroOptimizer(adam, model=model, reduce_bucket_size=1300, **STAGES[stage])
        padding = 0
        for _ in range(3):
            with packed_wires() as wires:
                optimizer.backward(model(rank))
            for wire in wires:
                check_wire(*wire)
                padding += wire[0].row - wire[0].body
            optimizer.step()
            optimizer.zero_grad()
        assert padding > 0

    run_ranks(train, world_size)


def of_each_kind(world_size: int) -> Run:
    """Layers dropped by rank, so that plans are narrowed, and micro-batches, so that sums of other members merge."""
    return Run(
        world_size, 4, 2, drop=lambda step, rank: {(step + rank) % 2, 2} if step else set(), options={"verbose": False}
    )


@pytest.mark.parametrize("world_size", [2, 3])
@over_stages
def test_alignment_changes_no_bit(stage: str, world_size: int, request: pytest.FixtureRequest) -> None:
    """Of elementwise sums; in stage 1 the sums of messages depend on where in a wire a number lies."""
    run = of_each_kind(world_size).with_options(reduce_bucket_size=60, **STAGES[stage])
    aligned = run_ranks(train_sharded, world_size, run)
    request.getfixturevalue("unaligned")
    plain = run_ranks(train_sharded, world_size, run)
    for (ours, norms), (theirs, plain_norms) in zip(aligned, plain, strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
        assert norms == pytest.approx(plain_norms, rel=1e-6)


@pytest.mark.parametrize("world_size", [1, 3])
@over_stages
def test_wide_rows_change_no_number(stage: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows of a multiple of 64 elements in place of 65,536."""
    monkeypatch.setattr("lowlevel_zero.partition.WIDE_ROW", 64)
    run = of_each_kind(world_size).with_options(
        reduce_bucket_size=300, pad_buckets_for_high_nccl_busbw=True, **STAGES[stage]
    )
    check_run(run, run_ranks(train_sharded, world_size, run))


MULTIPLES: dict[str, dict[str, Any]] = {
    "stage 1": {"slice_multiple": 7},
    "stage 2": {"slice_multiple": 4, "partition_grad": True, "overlap_allgather": True},
    "offloaded": {"slice_multiple": 40, "cpu_offload": True, "partition_grad": True},
    "scattered": {"slice_multiple": 3, "reduce_scatter": True, "gradient_predivide_factor": 2.0},
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_wider_slices_change_no_number(world_size: int, subtests: pytest.Subtests) -> None:
    run = of_each_kind(world_size).with_options(reduce_bucket_size=60)
    cases = [(run.with_options(**options),) for options in MULTIPLES.values()]
    for (case,), ran in run_cases(train_sharded, world_size, cases, one_group=True):
        with subtests.test(**case.options):
            check_run(case, ran.values())


def test_rows_are_as_wide_as_wanted() -> None:
    def train(rank: int, world_size: int, **options: Any) -> tuple[list[int], dict[str, int]]:
        model = nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 200))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LowLevelZeroOptimizer(sgd, model=model, partition_grad=True, **options)
        with packed_wires() as wires:
            optimizer.backward(model(torch.ones(1, 400)).sum())
        optimizer.step()
        return [wire.shape[1] for _, wire, _ in wires], optimizer.traffic()

    elements = 400 * 300 + 300 + 300 * 200 + 200
    for rows, sent in run_ranks(lambda *of: train(*of, pad_buckets_for_high_nccl_busbw=True), 2):
        assert rows == [2 * WIDE_ROW]
        assert sent == {"reduce": 2 * WIDE_ROW * 4, "gather": 2 * WIDE_ROW * 4}
    for rows, sent in run_ranks(train, 2):
        assert elements // 2 <= rows[0] < elements // 2 + 100
        assert elements // 2 * 4 <= sent["gather"] < (elements // 2 + 100) * 4


@pytest.mark.parametrize("shared", ["0", "1"], ids=["messages", "shared memory"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
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
