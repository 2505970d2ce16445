"""The bucket plan: literal tables, and what must hold for any plan."""

from __future__ import annotations

import random
from time import process_time
from typing import NamedTuple

import pytest
import torch

from lowlevel_zero.bookkeeping.bucket_plan import BucketPlan, Item, PlannedBucket, completed, make_plan, narrowed
from lowlevel_zero.partition import END_TO_END, Alignment, EvenSplit, alignment_of


class Row(NamedTuple):
    """One bucket as a table has it."""

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    in_place: bool = False


class Case(NamedTuple):
    """Parameters, as ``numel`` or ``(numel, kind, whole)``, on two ranks, and the plan that they get."""

    items: list[int | tuple[int, str, bool]]
    bucket_size: int
    plan: list[Row]
    order: list[int] | None = None


def item(of: int | tuple[int, str, bool], world_size: int = 2) -> Item:
    numel, kind, whole = (of, "a", True) if isinstance(of, int) else of
    return Item(EvenSplit(numel, world_size), kind, whole)


def plan_of(case: Case) -> BucketPlan:
    items = [item(each) for each in case.items]
    return make_plan(items, case.order or range(len(items)), case.bucket_size)


TABLE = {
    "one bucket": Case([4, 6], 1000, [Row((0, 1), (2, 3))]),
    "a bucket closes before it would overfill": Case(
        [400, 600, 200], 1000, [Row((0, 1), (200, 300)), Row((2,), (100,))]
    ),
    "padding counts when a bucket fills": Case([301, 301, 398], 1000, [Row((0, 1), (151, 151)), Row((2,), (199,))]),
    "larger than a bucket: alone and in place": Case(
        [2000, 300], 1000, [Row((0,), (1000,), in_place=True), Row((1,), (150,))]
    ),
    "larger, behind others: alone and in place": Case(
        [4, 6, 600], 12, [Row((0, 1), (2, 3)), Row((2,), (300,), in_place=True)]
    ),
    "larger, but with padding: packed": Case([2001], 1000, [Row((0,), (1001,))]),
    "larger, but cast on the way: packed": Case([(2000, "a", False)], 1000, [Row((0,), (1000,))]),
    "as large as a bucket: in place": Case([1000], 1000, [Row((0,), (500,), in_place=True)]),
    "alone, but smaller than a bucket: packed": Case([998], 1000, [Row((0,), (499,))]),
    "alternating kinds fill side by side": Case(
        [(300, "a", True), (300, "b", True), (300, "a", True), (300, "b", True)],
        1000,
        [Row((0, 2), (150, 150)), Row((1, 3), (150, 150))],
    ),
    "open buckets close in the order of their last member": Case(
        [(300, "a", True), (300, "b", True), (300, "a", True)],
        1000,
        [Row((1,), (150,)), Row((0, 2), (150, 150))],
    ),
    "a full bucket of one kind leaves the other open": Case(
        [(800, "a", True), (300, "b", True), (800, "a", True), (300, "b", True)],
        1000,
        [Row((0,), (400,)), Row((2,), (400,)), Row((1, 3), (150, 150))],
    ),
    "order is the caller's": Case([300, 300, 300], 600, [Row((2, 0), (150, 150)), Row((1,), (150,))], order=[2, 0, 1]),
    "empty parameters have no bucket": Case([0, 300, 0], 1000, [Row((1,), (150,))]),
    "nothing to reduce: no bucket": Case([0], 1000, []),
    "one element": Case([1], 1, [Row((0,), (1,))]),
}


def rows_of(plan: BucketPlan) -> list[Row]:
    return [Row(each.members, each.sizes, each.in_place) for each in plan]


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE.keys())
def test_plan_is_the_table_s(case: Case) -> None:
    assert rows_of(plan_of(case)) == case.plan


def test_slices_lie_end_to_end_and_the_row_is_padded_behind_them() -> None:
    """Slices of 500, 300 and 201 elements, on one rank, in a row of a multiple of 4."""
    items = [item(numel, 1)._replace(alignment=Alignment(4, 4)) for numel in (500, 300, 201)]
    (bucket,) = make_plan(items, range(3), 2000)
    assert (bucket.sizes, bucket.starts, bucket.body, bucket.row) == ((500, 300, 201), [0, 500, 800], 1001, 1004)
    (narrow,) = narrowed(make_plan(items, range(3), 2000), (0, 1, 1))
    assert (narrow.sizes, narrow.starts, narrow.body, narrow.row) == ((300, 201), [0, 300], 501, 504)
    assert PlannedBucket(0, (3, 1), (5, 2)).starts == [0, 5]


def random_items(seed: int) -> tuple[list[Item], list[int], int]:
    draw = random.Random(seed)
    world_size = draw.choice([1, 2, 3, 4, 8])
    numels = [draw.choice([0, 1, 3, 17, 64, 1000, 4096, 100_000]) for _ in range(draw.randint(1, 40))]
    aligned = draw.choice([END_TO_END, alignment_of(torch.float32), alignment_of(torch.float32, wide_rows=True)])
    items = [Item(EvenSplit(n, world_size), draw.choice("ab"), draw.random() < 0.8, alignment=aligned) for n in numels]
    order = draw.sample(range(len(items)), len(items))
    return items, order, draw.choice([1, 50, 5000, 1_000_000])


@pytest.mark.parametrize("seed", range(10))
def test_any_plan_holds_every_parameter_once_in_buckets_of_one_kind_that_are_full(seed: int) -> None:
    items, order, bucket_size = random_items(seed)
    plan = make_plan(items, order, bucket_size)
    full = sorted(index for index, each in enumerate(items) if each.split.numel)
    assert sorted(index for bucket in plan for index in bucket.members) == full
    assert [bucket.position for bucket in plan] == list(range(len(plan)))
    for bucket in plan:
        assert len({items[index].kind for index in bucket.members}) <= 1
        held = sum(items[index].split.padded_numel for index in bucket.members)
        assert held <= bucket_size or len(bucket.members) == 1
        assert [index for index in order if index in bucket.members] == list(bucket.members)
        assert not bucket.in_place or bucket.row == bucket.body
        check_row(bucket, items)


def check_row(bucket: PlannedBucket, items: list[Item]) -> None:
    """Rows are padded by two percent at most unless wide ones are wanted."""
    alignment = items[0].alignment
    assert bucket.sizes == tuple(items[index].split.slice_size for index in bucket.members)
    assert bucket.body == sum(bucket.sizes)
    assert bucket.row == alignment.padded(bucket.body)
    assert alignment.wide > alignment.short or 0 <= bucket.row - bucket.body <= 0.02 * bucket.body


@pytest.mark.parametrize("seed", range(10))
def test_a_narrowed_plan_has_what_is_used_in_the_same_order_and_company(seed: int) -> None:
    items, order, bucket_size = random_items(seed)
    plan = make_plan(items, order, bucket_size)
    used = [random.Random(seed * 100 + index).random() < 0.5 for index in range(len(items))]
    narrow = narrowed(plan, used)
    kept = [tuple(index for index in bucket.members if used[index]) for bucket in plan]
    assert [bucket.members for bucket in narrow] == [members for members in kept if members]
    for at, bucket in enumerate(narrow):
        assert bucket.position == at
        check_row(bucket, items)
    assert narrowed(plan, [True] * len(items)) == plan


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        ([4, 3, 2, 1, 0], [4, 3, 2, 1, 0]),
        ([4, 2, 0], [4, 3, 2, 1, 0]),
        ([2, 4, 0], [2, 1, 4, 3, 0]),
        ([1, 0], [4, 3, 2, 1, 0]),
        ([], [4, 3, 2, 1, 0]),
        ([0, 3], [4, 0, 3, 2, 1]),
    ],
)
def test_an_order_is_completed_where_backward_would_have_come_by(came: list[int], expected: list[int]) -> None:
    assert completed(came, 5) == expected


@pytest.mark.parametrize("world_size", [16, 512, 4096])
def test_tiny_parameters_travel_with_their_padding(world_size: int) -> None:
    """2,000 of 8 elements are one element a rank each, whatever the number of ranks."""
    plan = make_plan([item(8, world_size)] * 2000, range(2000), 2**20)
    most = 2**20 // world_size
    full, rest = divmod(2000, most)
    assert [len(bucket.members) for bucket in plan] == [most] * full + [rest] * bool(rest)
    assert all(bucket.sizes == (1,) * len(bucket.members) for bucket in plan)


def test_a_plan_of_ten_times_as_many_parameters_takes_about_ten_times_as_long() -> None:
    def seconds(count: int) -> float:
        items = [item(1)] * count
        began = process_time()
        make_plan(items, range(count), 2 * count)
        return process_time() - began

    least = min(seconds(20_000) for _ in range(3))
    assert min(seconds(200_000) for _ in range(2)) < 30 * least


def test_what_travels_in_fp8_says_so() -> None:
    items = [item((20, "a", False), 8)._replace(fp8=True), item((20, "b", False), 8)]
    assert [bucket.fp8 for bucket in make_plan(items, range(2), 100)] == [True, False]
