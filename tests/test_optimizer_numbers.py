"""The numbers are those of one process with plain torch: a sweep over what can be combined."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, cycle, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.numbers import (
    DROPS,
    STAGES,
    adagrad,
    adamw,
    check_masters,
    check_movement,
    check_norms,
    check_sixteen_bits,
    joined,
    masters_of,
    momentum,
    share_of,
)
from tests.support.oracle import (
    Run,
    build,
    check_close,
    emulate,
    train_alone,
    train_rank,
    train_sharded,
)
from tests.support.ranks import run_cases, run_ranks

WORLD_SIZES = (1, 2, 3, 4)
OTHER_FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "optimizer": {
        "adamw": {"optimizer": adamw},
        "momentum": {"optimizer": momentum},
        "adagrad": {"optimizer": adagrad},
    },
    "batches": {
        "once": {},
        "thrice": {"micro_batches": 3},
        "no_sync": {"micro_batches": 3, "no_sync": True},
    },
    "backward": {"driven": {}, "bare": {"bare": True}},
    "clip": {
        "whole": {},
        "clip": {"clip": 0.3},
        "clip_by_hand": {"clip": 0.3, "clip_by_hand": True},
    },
    "overlap": {"overlap": {}, "no_overlap": {"options": {"overlap_communication": False}}},
    "bucket": {
        "tiny": {"options": {"reduce_bucket_size": 1}},
        "mid": {"options": {"reduce_bucket_size": 50}},
        "one": {"options": {"reduce_bucket_size": 2**20}},
    },
}


class Case(NamedTuple):
    """One run by its levels' names."""

    world_size: int
    stage: str
    drop: str
    others: tuple[str, ...]

    @property
    def label(self) -> str:
        return "-".join([str(self.world_size), self.stage, self.drop, *self.others])

    @property
    def run(self) -> Run:
        run = Run(world_size=self.world_size, drop=DROPS[self.drop]).with_options(**STAGES[self.stage])
        for levels, name in zip(OTHER_FACTORS.values(), self.others, strict=True):
            settings = dict(levels[name])
            run = replace(run.with_options(**settings.pop("options", {})), **settings)
        return run


def covering() -> list[Case]:
    """A selection in which every two levels of different factors meet: a regular frame, the rest dealt from decks."""
    draw = random.Random(52)
    decks = []
    for levels in OTHER_FACTORS.values():
        deck = [name for _ in range(20) for name in draw.sample(range(len(levels)), len(levels))]
        decks.append(cycle([list(levels)[at] for at in deck]))
    stages, drops = list(STAGES), list(DROPS)
    return [
        Case(WORLD_SIZES[at // 5 % 4], stages[at % 3], drops[at % 5], tuple(next(deck) for deck in decks))
        for at in range(30)
    ]


CASES = covering()


def test_the_selection_covers_every_pair_of_levels() -> None:
    rows = [(case.world_size, case.stage, case.drop, *case.others) for case in CASES]
    levels = [WORLD_SIZES, tuple(STAGES), tuple(DROPS), *(tuple(each) for each in OTHER_FACTORS.values())]
    for one, other in combinations(range(len(levels)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(levels[one], levels[other]))


over_world_sizes = pytest.mark.parametrize("world_size", WORLD_SIZES)


@over_world_sizes
def test_fp32(world_size: int, subtests: pytest.Subtests) -> None:
    cases = [case for case in CASES if case.world_size == world_size]
    for (case,), ran in run_cases(train_fp32, world_size, [(case,) for case in cases]):
        with subtests.test(case.label):
            expected, norms = train_alone(case.run)
            ranks = ran.values()
            check_close(expected, [parameters for parameters, _ in ranks], 2e-6)
            check_norms(norms, [norms for _, norms in ranks], 1e-5)


def train_fp32(rank: int, world_size: int, case: Case) -> tuple[dict[str, Tensor], list[float]]:
    return train_sharded(rank, world_size, case.run)


@pytest.mark.parametrize("stage", STAGES)
def test_buckets_and_overlap_do_not_change_a_bit_on_two_ranks(stage: str) -> None:
    """A sum of two numbers has one order, so neither buckets nor overlap may be seen in it."""

    def train(rank: int, world_size: int) -> list[dict[str, Tensor]]:
        run = Run(steps=3).with_options(**STAGES[stage])
        ways = product((1, 50, 2**20), (True, False))
        runs = [run.with_options(reduce_bucket_size=size, overlap_communication=overlap) for size, overlap in ways]
        return [train_sharded(rank, world_size, each)[0] for each in runs]

    results = [each for ranks in run_ranks(train, 2) for each in ranks]
    check_close(results[0], results, 0.0)


# What the tolerance is worth


def without_a_rank(run: Run) -> Run:
    return replace(run, world_size=run.world_size - 1)


def without_averaging(run: Run) -> Run:
    def faster(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05 * run.world_size, momentum=0.9)

    return replace(run, optimizer=faster)


def without_a_micro_batch(run: Run) -> Run:
    return replace(run, micro_batches=run.micro_batches - 1)


MISTAKES = [without_a_rank, without_averaging, without_a_micro_batch]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_fp32_tolerance_would_show(mistake: Callable[[Run], Run]) -> None:
    run = Run(world_size=4, micro_batches=3, optimizer=momentum)
    expected, _ = train_alone(run)
    got, _ = train_alone(mistake(run))
    with pytest.raises(AssertionError, match="differs from the oracle"):
        check_close(expected, [got], 2e-6)


# 16 bits


SIXTEEN = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIXTEEN_WAYS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "adamw-clip": {"optimizer": adamw, "clip": 0.3},
    "thrice": {"micro_batches": 3},
    "no_sync-clip": {"micro_batches": 3, "no_sync": True, "clip": 0.3},
    "drop": {"drop": DROPS["different"]},
}


def sixteen(world_size: int, dtype: str, stage: str, way: str) -> Run:
    run = Run(world_size=world_size, dtype=SIXTEEN[dtype], optimizer=momentum)
    options = {"reduce_bucket_size": 50, "initial_scale": 256.0}
    return replace(run, **SIXTEEN_WAYS[way]).with_options(**STAGES[stage], **options)


SIXTEEN_CASES = [(*place, way) for place, way in zip(product(WORLD_SIZES, SIXTEEN, STAGES), cycle(SIXTEEN_WAYS))]


@over_world_sizes
def test_sixteen_bits_over_fp32_masters(world_size: int, subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, *case: Any) -> Any:
        return masters_of(rank, world_size, sixteen(*case))

    for case, ran in run_cases(train, world_size, [case for case in SIXTEEN_CASES if case[0] == world_size]):
        with subtests.test(case=case):
            run = sixteen(*case)
            check_masters(run, share_of(run.dtype, world_size), ran.values())


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_sixteen_bit_tolerance_would_show(dtype: str, mistake: Callable[[Run], Run]) -> None:
    run = sixteen(4, dtype, "stage1", "thrice")
    expected, _ = emulate(run)
    got, _ = emulate(mistake(run))
    with pytest.raises(AssertionError, match="off by"):
        check_movement(run, expected, got, share_of(run.dtype, 4))


def test_masters_keep_what_sixteen_bits_cannot() -> None:
    """Steps far below the last bit of bf16 add up."""

    run = Run(dtype=torch.bfloat16, optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-5))
    expected, _ = emulate(run)
    ranks = run_ranks(masters_of, 2, run)
    check_movement(run, expected, joined([each[0] for each in ranks], expected), share_of(run.dtype, 2))


@pytest.mark.parametrize(("world_size", "stage"), [(1, "stage1"), (2, "stage1-scatter"), (3, "stage1"), (4, "stage2")])
def test_without_masters(world_size: int, stage: str) -> None:
    run = Run(world_size=world_size, dtype=torch.bfloat16, optimizer=momentum).with_options(
        **STAGES[stage], master_weights=False
    )
    expected, norms = emulate(run)
    ranks = run_ranks(masters_of, world_size, run)
    for slices, _, _ in ranks:
        assert {own.dtype for own in slices.values()} == {torch.bfloat16}
    got = joined([slices for slices, _, _ in ranks], expected)
    # One more rounding a step, of the parameter itself: a share of its size, not of its way.
    for name, whole in expected.items():
        torch.testing.assert_close(got[name], whole, rtol=4 * 2**-8, atol=2e-3, msg=name)
    check_norms(norms, [norms for _, _, norms in ranks], 2e-2)


# Wires of another dtype


@pytest.mark.parametrize(("world_size", "stage"), [(2, "stage1-scatter"), (3, "stage1"), (4, "stage2")])
def test_fp32_wire_for_a_bf16_model_rounds_no_sum(world_size: int, stage: str) -> None:
    run = Run(world_size=world_size, dtype=torch.bfloat16, optimizer=momentum, micro_batches=3)
    check_sixteen_bits(run.with_options(**STAGES[stage], communication_dtype=torch.float32), 1e-6)


def test_sixteen_bit_wire_for_an_fp32_model(subtests: pytest.Subtests) -> None:
    def with_wire(wire: torch.dtype, stage: str) -> Run:
        return Run(world_size=3, optimizer=momentum).with_options(**STAGES[stage], communication_dtype=wire)

    def train(rank: int, world_size: int, wire: torch.dtype, stage: str) -> Any:
        return masters_of(rank, world_size, with_wire(wire, stage))

    cases = [(torch.bfloat16, "stage1"), (torch.bfloat16, "stage2"), (torch.float16, "stage1-scatter")]
    for (wire, stage), ran in run_cases(train, 3, cases):
        with subtests.test(wire=wire, stage=stage):
            run = with_wire(wire, stage)
            expected, norms = emulate(run)
            ranks = ran.values()
            got = joined([slices for slices, _, _ in ranks], expected)
            check_movement(run, expected, got, share_of(wire, 3))
            check_norms(norms, [norms for _, _, norms in ranks], share_of(wire, 3))
            with pytest.raises(AssertionError, match="off by"):  # the wire was used at all
                check_movement(run, expected, got, 1e-6)


# Models of several dtypes, and of a wide one


class Mixed(nn.Module):
    """16-bit linears between fp32 norms, as ``build`` leaves them whatever dtype it asks for."""

    low = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in ((4, 5), (5, 5), (5, 5), (5, 3)))
        self.norms = nn.ModuleList(nn.LayerNorm(5) for _ in range(3))

    def to(self, *args: Any, **kwargs: Any) -> Mixed:
        self.linears.to(self.low)
        return self

    def forward(self, x: Tensor, drop: set[int]) -> Tensor:
        hidden = x
        for place, linear in enumerate(self.linears):
            if place in (1, 2) and place in drop:
                continue
            hidden = linear(hidden.to(self.low)).float()
            if place < 3:
                hidden = torch.tanh(self.norms[place](hidden))
        return hidden


class MixedHalf(Mixed):
    low = torch.float16


MIXED_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.3},
    "no_sync": {"micro_batches": 3, "no_sync": True},
    "drop": {"drop": DROPS["same"]},
    "drop-differently": {"drop": DROPS["different"], "micro_batches": 3},
}


MIXED_CASES = list(zip(cycle([2, 4, 3]), cycle(STAGES), [*MIXED_WAYS, *MIXED_WAYS], strict=False))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_mixed_dtypes(world_size: int, subtests: pytest.Subtests) -> None:
    def mixed(stage: str, way: str) -> Run:
        run = Run(world_size=world_size, model=Mixed, optimizer=momentum, **MIXED_WAYS[way])
        return run.with_options(**STAGES[stage], reduce_bucket_size=60)

    def train(rank: int, world_size: int, stage: str, way: str) -> Any:
        return masters_of(rank, world_size, mixed(stage, way))

    cases = [(stage, way) for size, stage, way in MIXED_CASES if size == world_size]
    for (stage, way), ran in run_cases(train, world_size, cases):
        with subtests.test(stage=stage, way=way):
            check_masters(mixed(stage, way), share_of(torch.bfloat16, world_size), ran.values())


def test_fp16_beside_fp32_is_scaled_and_unscaled(subtests: pytest.Subtests) -> None:
    def of(stage: str) -> Run:
        run = Run(world_size=2, model=MixedHalf, optimizer=momentum, clip=0.3)
        return run.with_options(**STAGES[stage], initial_scale=512.0)

    def train(rank: int, world_size: int, stage: str) -> Any:
        return masters_of(rank, world_size, of(stage))

    for (stage,), ran in run_cases(train, 2, [(stage,) for stage in STAGES]):
        with subtests.test(stage=stage):
            check_masters(of(stage), share_of(torch.float16, 2), ran.values())


@pytest.mark.parametrize(("world_size", "stages"), [(1, ["stage2"]), (3, ["stage1", "stage2"])])
def test_fp64_stays_fp64(world_size: int, stages: list[str], subtests: pytest.Subtests) -> None:
    def of(stage: str, clip: float) -> Run:
        run = Run(world_size=world_size, dtype=torch.float64, optimizer=momentum, micro_batches=3, clip=clip)
        return run.with_options(**STAGES[stage])

    def train(rank: int, world_size: int, stage: str, clip: float) -> Any:
        return train_rank_numbers(rank, world_size, of(stage, clip))

    for (stage, clip), ran in run_cases(train, world_size, product(stages, (0.0, 0.3))):
        with subtests.test(stage=stage, clip=clip):
            expected, norms = train_alone(of(stage, clip))
            for parameters, masters, own in ran.values():
                assert {slice_.dtype for slice_ in masters.values()} == {torch.float64}
                assert own == pytest.approx(norms, rel=1e-12)
                for name, value in expected.items():
                    torch.testing.assert_close(parameters[name], value, rtol=0, atol=1e-13, msg=name)


def train_rank_numbers(
    rank: int, world_size: int, run: Run
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    trained = train_rank(rank, world_size, run)
    return {name: p.detach() for name, p in trained.model.named_parameters()}, trained.masters(), trained.norms


# The loss scale


def train_with_overflow(rank: int, world_size: int, run: Run) -> list[Any]:
    """Of three steps the second overflows on rank 1: what stood still in each, and the scale after it."""
    model = build(run)
    optimizer = LowLevelZeroOptimizer(run.optimizer(model.parameters()), model=model, **run.options)
    held = {"p": list(model.parameters()), "p32": list(optimizer.get_working_to_master_map().values())}
    seen = []
    for step in range(3):
        before = {kind: [each.detach().clone() for each in tensors] for kind, tensors in held.items()}
        x = torch.full((2, 4), float("inf") if (step, rank) == (1, 1) else 1.0, dtype=run.dtype)
        optimizer.backward(model(x, set()).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        still = [kind for kind in held if all(map(torch.equal, before[kind], held[kind]))]
        seen.append((still, optimizer.loss_scale))
    return seen


def test_a_step_that_overflows_on_one_rank_is_skipped_by_all(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, stage: str) -> list[Any]:
        run = Run(dtype=torch.float16).with_options(**STAGES[stage], initial_scale=256.0, hysteresis=1)
        return train_with_overflow(rank, world_size, run)

    for (stage,), ran in run_cases(train, 2, [(stage,) for stage in STAGES]):
        with subtests.test(stage=stage):
            for seen in ran.values():
                assert seen == [([], 256.0), (["p", "p32"], 128.0), ([], 128.0)]
