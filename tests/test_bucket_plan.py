"""The bucket plan: literal tables, and what must hold for any plan."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from lowlevel_zero.bookkeeping.bucket_plan import FLAG_SHARE, Bucket, BucketPlan, Item, completed, make_plan, narrowed
from lowlevel_zero.partition import EvenSplit


class Row(NamedTuple):
    """One bucket as a table has it."""

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    flags: tuple[int, ...] = ()
    in_place: bool = False
    last: bool = False


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
    "one bucket, whose 1% has room for all flags": Case([300, 300], 1000, [Row((0, 1), (150, 150), (0, 1), last=True)]),
    "flags that would be more than 1% get a wire at the end": Case(
        [4, 6], 1000, [Row((0, 1), (2, 3)), Row((), (), (0, 1), last=True)]
    ),
    "1% exactly is room enough": Case([200], 1000, [Row((0,), (100,), (0,), last=True)]),
    "a hair more than 1% is too much": Case([198], 1000, [Row((0,), (99,)), Row((), (), (0,), last=True)]),
    "flags without room wait for a later wire that has it": Case(
        [4, 6, 600],
        12,
        [Row((0, 1), (2, 3)), Row((2,), (300,), in_place=True), Row((), (), (0, 1, 2), last=True)],
    ),
    "flags without room ride in a packed wire": Case(
        [8, (601, "a", True)], 8, [Row((0,), (4,), in_place=True), Row((1,), (301,), (0, 1), last=True)]
    ),
    "a bucket closes before it would overfill": Case(
        [400, 600, 200], 1000, [Row((0, 1), (200, 300), (0, 1)), Row((2,), (100,), (2,), last=True)]
    ),
    "padding counts when a bucket fills": Case(
        [301, 301, 398], 1000, [Row((0, 1), (151, 151), (0, 1)), Row((2,), (199,), (2,), last=True)]
    ),
    "larger than a bucket: alone and in place": Case(
        [2000, 300],
        1000,
        [Row((0,), (1000,), in_place=True), Row((1,), (150,)), Row((), (), (0, 1), last=True)],
    ),
    "larger, but with padding: packed": Case([2001], 1000, [Row((0,), (1001,), (0,), last=True)]),
    "larger, but cast on the way: packed": Case([(2000, "a", False)], 1000, [Row((0,), (1000,), (0,), last=True)]),
    "as large as a bucket: in place": Case(
        [1000], 1000, [Row((0,), (500,), in_place=True), Row((), (), (0,), last=True)]
    ),
    "alone, but smaller than a bucket: packed": Case([998], 1000, [Row((0,), (499,), (0,), last=True)]),
    "alternating kinds fill side by side": Case(
        [(300, "a", True), (300, "b", True), (300, "a", True), (300, "b", True)],
        1000,
        [Row((0, 2), (150, 150), (0, 2)), Row((1, 3), (150, 150), (1, 3), last=True)],
    ),
    "open buckets close in the order of their last member": Case(
        [(300, "a", True), (300, "b", True), (300, "a", True)],
        1000,
        [Row((1,), (150,), (1,)), Row((0, 2), (150, 150), (0, 2), last=True)],
    ),
    "a full bucket of one kind leaves the other open": Case(
        [(800, "a", True), (300, "b", True), (800, "a", True), (300, "b", True)],
        1000,
        [Row((0,), (400,), (0,)), Row((2,), (400,), (2,)), Row((1, 3), (150, 150), (1, 3), last=True)],
    ),
    "order is the caller's": Case(
        [300, 300, 300], 600, [Row((2, 0), (150, 150), (2, 0)), Row((1,), (150,), (1,), last=True)], order=[2, 0, 1]
    ),
    "empty parameters have no bucket": Case([0, 300, 0], 1000, [Row((1,), (150,), (1,), last=True)]),
    "nothing to reduce: still one wire, for the late flag": Case([0], 1000, [Row((), (), (), last=True)]),
    "one element": Case([1], 1, [Row((0,), (1,)), Row((), (), (0,), last=True)]),
}


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE.keys())
def test_plan_is_the_table_s(case: Case) -> None:
    got = [Row(each.members, each.sizes, each.flags, each.in_place, each.last) for each in plan_of(case).buckets]
    assert got == case.plan


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE.keys())
def test_every_parameter_finds_its_bucket(case: Case) -> None:
    plan = plan_of(case)
    for index, position in enumerate(plan.bucket_of):
        if item(case.items[index]).split.numel == 0:
            assert position == -1
        else:
            assert index in plan.buckets[position].members


def test_a_row_is_body_flags_and_late() -> None:
    bucket = Bucket(0, (3, 1), (5, 2), flags=(3, 1), last=True)
    assert (bucket.body, bucket.row) == (7, 10)
    assert Bucket(0, (3, 1), (5, 2), flags=(3,)).row == 8
    assert Bucket(0, (3, 1), (5, 2)).row == 7


def random_items(seed: int) -> tuple[list[Item], list[int], int]:
    draw = random.Random(seed)
    world_size = draw.choice([1, 2, 3, 4, 8])
    numels = [draw.choice([0, 1, 3, 17, 64, 1000, 4096, 100_000]) for _ in range(draw.randint(1, 40))]
    items = [Item(EvenSplit(numel, world_size), draw.choice("ab"), draw.random() < 0.8) for numel in numels]
    order = draw.sample(range(len(items)), len(items))
    return items, order, draw.choice([1, 50, 5000, 1_000_000])


@pytest.mark.parametrize("seed", range(30))
def test_any_plan_holds_every_parameter_and_flag_once(seed: int) -> None:
    items, order, bucket_size = random_items(seed)
    buckets = make_plan(items, order, bucket_size).buckets
    full = sorted(index for index, each in enumerate(items) if each.split.numel)
    assert sorted(index for bucket in buckets for index in bucket.members) == full
    assert sorted(index for bucket in buckets for index in bucket.flags) == full
    assert [bucket.position for bucket in buckets] == list(range(len(buckets)))
    assert [bucket.last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]


@pytest.mark.parametrize("seed", range(30))
def test_any_plan_keeps_flags_small_and_not_before_their_parameter(seed: int) -> None:
    items, order, bucket_size = random_items(seed)
    plan = make_plan(items, order, bucket_size)
    for bucket in plan.buckets:
        assert all(plan.bucket_of[index] <= bucket.position for index in bucket.flags)
        assert not bucket.members or len(bucket.flags) <= FLAG_SHARE * bucket.body
        assert not (bucket.in_place and bucket.row > bucket.body)


@pytest.mark.parametrize("seed", range(30))
def test_any_plan_fills_buckets_of_one_kind_to_their_size(seed: int) -> None:
    items, order, bucket_size = random_items(seed)
    for bucket in make_plan(items, order, bucket_size).buckets:
        assert len({items[index].kind for index in bucket.members}) <= 1
        assert bucket.sizes == tuple(items[index].split.slice_size for index in bucket.members)
        held = sum(items[index].split.padded_numel for index in bucket.members)
        assert held <= bucket_size or len(bucket.members) == 1
        assert [index for index in order if index in bucket.members] == list(bucket.members)


NARROWED = {
    "a member leaves its bucket": ((0, 1, 1), [Row((1,), (150,), (1,)), Row((2,), (200,), (2,), last=True)]),
    "a bucket that is empty goes": ((0, 0, 1), [Row((2,), (200,), (2,), last=True)]),
    "the last one goes": ((1, 1, 0), [Row((0, 1), (150, 150), (0, 1), last=True)]),
    "all of it": ((0, 0, 0), [Row((), (), (), last=True)]),
}


@pytest.mark.parametrize(("used", "expected"), NARROWED.values(), ids=NARROWED.keys())
def test_a_narrowed_plan_is_the_table_s(used: tuple[int, ...], expected: list[Row]) -> None:
    plan = plan_of(Case([300, 300, 400], 700, []))
    rows = [
        Row(each.members, each.sizes, each.flags, each.in_place, each.last) for each in narrowed(plan, used).buckets
    ]
    assert rows == expected


@pytest.mark.parametrize("seed", range(30))
def test_a_narrowed_plan_has_what_is_used_in_the_same_order_and_company(seed: int) -> None:
    items, order, bucket_size = random_items(seed)
    plan = make_plan(items, order, bucket_size)
    used = [random.Random(seed * 100 + index).random() < 0.5 for index in range(len(items))]
    narrow = narrowed(plan, used)
    kept = [tuple(index for index in bucket.members if used[index]) for bucket in plan.buckets]
    assert [bucket.members for bucket in narrow.buckets if bucket.members] == [members for members in kept if members]
    assert sorted(index for bucket in narrow.buckets for index in bucket.flags) == sorted(sum(kept, ()))
    for bucket in narrow.buckets:
        assert bucket.sizes == tuple(items[index].split.slice_size for index in bucket.members)
        assert all(narrow.bucket_of[index] == bucket.position for index in bucket.members)
    assert all(position < 0 for index, position in enumerate(narrow.bucket_of) if not used[index])
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


# Tiny parameters


def test_tiny_parameters_cost_what_travels_at_any_world_size() -> None:
    """2,000 of 8 elements at 4,096 ranks: one wire of 8 rows, and their flags, once."""
    for world_size in (16, 512, 4096):
        plan = make_plan([item(8, world_size)] * 2000, range(2000), 2**20)
        assert [(len(bucket.members), bucket.compact) for bucket in plan.buckets] == [(2000, 8), (0, 1)]
        assert [bucket.row for bucket in plan.buckets] == [2000, 2001]
    assert [bucket.compact for bucket in make_plan([item(8, 8)] * 2000, range(2000), 2**20).buckets] == [0, 1]


def test_a_wire_s_tiny_parameters_have_as_many_rows() -> None:
    items = [item(numel, 4096) for numel in (8, 7, 1, 5000, 5, 9, 1)]
    plan = make_plan(items, range(7), 2**20)
    rows = {bucket.members: bucket.compact for bucket in plan.buckets}
    assert rows == {(3,): 0, (0, 1, 4): 8, (5,): 16, (2, 6): 1, (): 1}
    narrow = narrowed(plan, (0, 1, 1, 1, 0, 1, 0))
    assert {bucket.members: bucket.compact for bucket in narrow.buckets} == {(3,): 0, (1,): 8, (5,): 16, (2,): 1, (): 1}


def test_what_travels_counts_when_a_bucket_of_tiny_parameters_fills() -> None:
    plan = make_plan([item(8, 4096)] * 5, range(5), 16)
    assert [bucket.members for bucket in plan.buckets] == [(0, 1), (2, 3), (4,), ()]


def test_what_travels_in_fp8_has_all_rows() -> None:
    (bucket, _) = make_plan([item(2, 8)._replace(fp8=True)], [0], 100).buckets
    assert (bucket.compact, bucket.fp8) == (0, True)
