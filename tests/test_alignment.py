"""Alignment: where slices start in a row, as tables, as plans and in the wires of a run, which nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.alignment import SLICE_BYTES, WIDE_ROW, Alignment, RowLayout, alignment_of, laid_out
from lowlevel_zero.bookkeeping.bucket_plan import FLAG_SHARE, Bucket, Item, make_plan, narrowed
from lowlevel_zero.bookkeeping.bucket_store import BucketStore
from lowlevel_zero.communication.collectives import ShardGroup
from lowlevel_zero.partition import EvenSplit
from tests.support.judging import check_run
from tests.support.oracle import Run, train_sharded
from tests.support.ranks import run_ranks

STAGES: dict[str, dict[str, Any]] = {"stage 1": {}, "stage 2": {"partition_grad": True}}
over_stages = pytest.mark.parametrize("stage", STAGES)
FOUR = Alignment(4, 4)


# A row


@pytest.mark.parametrize(
    ("sizes", "alignment", "fillers", "tail"),
    [
        ([5, 4, 1, 2], FOUR, (0, 3, 0, 0), 1),
        ([4, 8], FOUR, (), 0),
        ([1, 2, 3], FOUR, (), 2),
        ([1, 4], FOUR, (0, 3), 0),
        ([3], FOUR, (), 1),
        ([], FOUR, (), 0),
        ([5, 3, 2], Alignment(), (), 0),
        ([5, 4], Alignment(4, 16), (0, 3), 0),
        ([5, 6], Alignment(4, 8), (0, 3), 2),
    ],
)
def test_fillers_stand_before_what_would_start_between(
    sizes: list[int], alignment: Alignment, fillers: tuple[int, ...], tail: int
) -> None:
    layout = laid_out(sizes, alignment)
    assert (layout.fillers, layout.tail) == (fillers, tail)
    assert layout.columns == sum(sizes) + sum(fillers)


def test_a_row_is_cut_where_it_was_laid_out() -> None:
    layout = laid_out([5, 4, 1, 2], FOUR)
    assert layout.pieces == [5, 3, 4, 1, 2]
    row = torch.arange(15)
    assert [each.tolist() for each in layout.cut(row)] == [[0, 1, 2, 3, 4], [8, 9, 10, 11], [12], [13, 14]]
    assert layout.starts == [0, 8, 12, 13]
    assert RowLayout((2, 3)).cut(torch.arange(5))[1].tolist() == [2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_units_are_of_128_bytes(dtype: torch.dtype) -> None:
    assert alignment_of(dtype).slices * dtype.itemsize == SLICE_BYTES == 128
    assert alignment_of(dtype).rows == alignment_of(dtype).slices
    assert alignment_of(dtype, wide_rows=True).rows == WIDE_ROW == 2**16


# A plan


def random_plan(seed: int, alignment: Alignment) -> tuple[list[Item], Any]:
    draw = random.Random(seed)
    world_size = draw.choice([1, 2, 3, 4, 8])
    numels = [draw.choice([1, 3, 17, 64, 1000, 4096, 65_537, 2**17]) for _ in range(draw.randint(1, 30))]
    items = [Item(EvenSplit(numel, world_size), "a", draw.random() < 0.8, alignment=alignment) for numel in numels]
    return items, make_plan(items, draw.sample(range(len(items)), len(items)), draw.choice([1, 5000, 2**19]))


def check_bucket(bucket: Bucket, items: list[Item], alignment: Alignment) -> None:
    assert bucket.sizes == tuple(items[index].split.slice_size for index in bucket.members)
    for place, size in enumerate(bucket.sizes):
        assert size < alignment.slices or bucket.layout.starts[place] % alignment.slices == 0
    assert list(bucket.sizes) == sorted(bucket.sizes, key=lambda size: size < alignment.slices)
    assert bucket.row % (alignment.rows if bucket.row > alignment.rows else alignment.slices) == 0
    assert not bucket.in_place or bucket.row == bucket.body == bucket.sizes[0]
    spare = alignment.padded(bucket.body) - bucket.body
    assert len(bucket.flags) <= max(FLAG_SHARE * bucket.body, spare)


@pytest.mark.parametrize("alignment", [alignment_of(torch.float32), alignment_of(torch.float32, wide_rows=True)])
@pytest.mark.parametrize("seed", range(20))
def test_any_plan_is_aligned_and_so_is_what_is_left_of_it(seed: int, alignment: Alignment) -> None:
    items, plan = random_plan(seed, alignment)
    used = [random.Random(seed * 100 + index).random() < 0.5 for index in range(len(items))]
    for one in (plan, narrowed(plan, used)):
        for bucket in one.buckets:
            if bucket.members:
                check_bucket(bucket, items, alignment)
    assert narrowed(plan, [True] * len(items)) == plan
    flagged = sorted(index for bucket in plan.buckets for index in bucket.flags)
    assert flagged == list(range(len(items)))


def test_flags_ride_where_the_row_is_padded_anyway() -> None:
    items = [Item(EvenSplit(numel, 2), "a", True, alignment=alignment_of(torch.float32)) for numel in (200, 10)]
    (bucket,) = make_plan(items, [1, 0], 1000).buckets
    assert (bucket.members, bucket.sizes) == ((0, 1), (100, 5))  # the large one first, though the plan has it last
    assert sorted(bucket.flags) == [0, 1]
    assert (bucket.body, bucket.row, bucket.last) == (105, 128, True)


def test_flags_do_not_lengthen_a_wide_row() -> None:
    items = [Item(EvenSplit(2**18, 2), "a", False, alignment=alignment_of(torch.float32, wide_rows=True))]
    first, second = make_plan(items, [0], 2**18).buckets
    assert (first.row, first.flags, first.last) == (2**17, (), False)
    assert (second.members, second.flags, second.row) == ((), (0,), 2)


def test_a_gradient_of_unaligned_slices_is_packed() -> None:
    items = [Item(EvenSplit(numel, 2), "a", True, alignment=alignment_of(torch.float32)) for numel in (2000, 2048)]
    buckets = make_plan(items, [0, 1], 1000).buckets
    assert [(bucket.in_place, bucket.row) for bucket in buckets[:2]] == [(False, 1024), (True, 1024)]


# A run


@contextmanager
def packed_wires() -> Iterator[list[tuple[Bucket, Tensor, list[Tensor | None]]]]:
    """Buckets that are packed, their wires, as they leave, and the gradients in them."""
    seen: list[tuple[Bucket, Tensor, list[Tensor | None]]] = []
    pack = BucketStore._packed_wire

    def packed(store: BucketStore, bucket: Bucket, gradients: list[Tensor | None]) -> Tensor:
        kept = [None if gradient is None else gradient.clone() for gradient in gradients]
        wire = pack(store, bucket, gradients)
        seen.append((bucket, wire.clone(), kept))
        return wire

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketStore, "_packed_wire", packed)
        yield seen


class Mixed(nn.Module):
    """Slices of more and of fewer than 128 bytes, at and off multiples of them; the last is used on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 500, 64, 1, 129, 30, 256, 777)
        self.all = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)

    def forward(self, rank: int) -> Tensor:
        return torch.cat(list(self.all)[: len(self.all) - (rank > 0)]).square().sum() * (rank + 1)


def check_wire(bucket: Bucket, wire: Tensor, gradients: list[Tensor | None]) -> None:
    """Each slice where the layout says, which is aligned, and nothing between."""
    rest = torch.ones(wire.shape[1], dtype=torch.bool)
    rest[bucket.body : bucket.late + bucket.last] = False
    for place, (size, gradient) in enumerate(zip(bucket.sizes, gradients, strict=True)):
        start = bucket.layout.starts[place]
        for row in range(len(wire)):
            at = (row * wire.shape[1] + start) * wire.element_size()
            assert size * wire.element_size() < SLICE_BYTES or at % SLICE_BYTES == 0
        rest[start : start + size] = False
        flat = wire[:, start : start + size].reshape(-1)
        expected = torch.zeros_like(flat)
        if gradient is not None:
            expected[: gradient.numel()] = gradient
        assert torch.equal(flat, expected)
    assert wire[:, rest].eq(0).all()


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (3, torch.float32), (4, torch.bfloat16)], ids=str
)
@over_stages
def test_slices_start_at_multiples_of_128_bytes_in_wires_and_gradients(
    stage: str, world_size: int, dtype: torch.dtype
) -> None:
    def train(rank: int, world_size: int) -> None:
        model = Mixed().to(dtype)
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer = LowLevelZeroOptimizer(adam, model=model, reduce_bucket_size=1300, **STAGES[stage])
        fillers = 0
        for _ in range(3):
            with packed_wires() as wires:
                optimizer.backward(model(rank))
            for wire in wires:
                check_wire(*wire)
                fillers += sum(wire[0].layout.fillers)
            optimizer.synchronize()
            for p32 in optimizer.get_working_to_master_map().values():
                gradient = p32.grad
                assert gradient is not None
                start = gradient.storage_offset() * gradient.element_size()
                assert p32.numel() * dtype.itemsize < SLICE_BYTES or start % SLICE_BYTES == 0
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        assert fillers > 0

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
    monkeypatch.setattr("lowlevel_zero.alignment.WIDE_ROW", 64)
    run = of_each_kind(world_size).with_options(
        reduce_bucket_size=300, pad_buckets_for_high_nccl_busbw=True, **STAGES[stage]
    )
    check_run(run, run_ranks(train_sharded, world_size, run))


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
        group.own_wires()
        for alignment in (Alignment(), Alignment(32, 32), Alignment(32, 128)):
            for dtype in (torch.float32, torch.bfloat16):
                rows = [torch.full((world_size, size), -1.0, dtype=dtype) for size in sizes]
                own = [torch.arange(size) + 10.0 * rank for size in sizes]
                group.gather(own, rows, alignment=alignment).wait()
                for size, each in zip(sizes, rows, strict=True):
                    expected = torch.arange(size) + 10.0 * torch.arange(world_size)[:, None]
                    assert torch.equal(each, expected.to(dtype))

    run_ranks(gather, world_size)
