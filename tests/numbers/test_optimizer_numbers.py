"""The numbers are those of one process with plain torch: a sweep over what can be combined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.covering import covering
from tests.support.judging import check_movement, check_norms, check_run, mistakes
from tests.support.numbers import (
    DROPS,
    STAGES,
    adagrad,
    check_masters,
    check_sixteen_bits,
    joined,
    masters_of,
    share_of,
    trained,
)
from tests.support.oracle import (
    Run,
    adamw,
    check_close,
    emulate,
    momentum,
    train_alone,
    train_rank,
)

FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "ranks": {f"{size} ranks": {"world_size": size} for size in (1, 2, 3, 4)},
    "stage": {stage: {"options": options} for stage, options in STAGES.items()},
    "drop": {name: {"drop": DROPS[name]} for name in ("all", "different", "total", "one_rank")},
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
    "overlap": {
        "overlap": {},
        "no_overlap": {"options": {"overlap_communication": False}},
        "overlapped_gather": {"options": {"overlap_allgather": True}},
    },
    "steps_on": {"device": {}, "host": {"options": {"cpu_offload": True}}},
    "bucket": {
        "tiny": {"options": {"reduce_bucket_size": 1}},
        "mid": {"options": {"reduce_bucket_size": 50}},
        "one": {"options": {"reduce_bucket_size": 2**20}},
    },
}


def label(case: Iterable[Any]) -> str:
    return "-".join(map(str, case))


def run_of(levels: Iterable[str]) -> Run:
    """Return the run that has these levels of the factors."""
    run = Run()
    for factor, level in zip(FACTORS.values(), levels, strict=True):
        settings = dict(factor[level])
        run = replace(run.with_options(**settings.pop("options", {})), **settings)
    return run


def test_the_selection_covers_every_pair_of_levels() -> None:
    rows, factors = covering(*FACTORS.values()), list(FACTORS.values())
    assert len(rows) < 30
    for one, other in combinations(range(len(factors)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(factors[one], factors[other]))


def test_fp32(subtests: pytest.Subtests) -> None:
    for name, run, ran in trained({label(row): run_of(row) for row in covering(*FACTORS.values())}):
        with subtests.test(name):
            check_run(run, ran.values())


# What the tolerance is worth


FOUR_BY_THREE = Run(world_size=4, micro_batches=3)


@pytest.mark.parametrize("mistake", mistakes(FOUR_BY_THREE))
def test_a_mistake_is_seen(mistake: str) -> None:
    wrong = train_alone(mistakes(FOUR_BY_THREE)[mistake])
    with pytest.raises(AssertionError, match="differs from the oracle"):
        check_run(FOUR_BY_THREE, [wrong])


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
    run = Run(world_size=world_size, dtype=SIXTEEN[dtype])
    options = {"reduce_bucket_size": 50, "initial_scale": 256.0}
    return replace(run, **SIXTEEN_WAYS[way]).with_options(**STAGES[stage], **options)


def test_sixteen_bits_over_fp32_masters(subtests: pytest.Subtests) -> None:
    cases = covering((2, 3), SIXTEEN, STAGES, SIXTEEN_WAYS)
    for name, run, ran in trained({label(case): sixteen(*case) for case in cases}, masters_of):
        with subtests.test(name):
            check_masters(run, ran.values(), share_of(run.dtype, run.world_size))


def test_masters_keep_what_sixteen_bits_cannot() -> None:
    """Steps far below the last bit of bf16 add up."""

    run = Run(dtype=torch.bfloat16, optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-5))
    check_sixteen_bits(run, share_of(run.dtype, 2))


def test_without_masters(subtests: pytest.Subtests) -> None:
    def of(world_size: int, stage: str) -> Run:
        run = Run(world_size=world_size, dtype=torch.bfloat16)
        return run.with_options(**STAGES[stage], master_weights=False)

    cases = [(2, "stage1"), (3, "stage2")]
    for name, run, ran in trained({label(case): of(*case) for case in cases}, masters_of):
        with subtests.test(name):
            expected, norms = emulate(run)
            ranks = ran.values()
            for slices, _, _ in ranks:
                assert {own.dtype for own in slices.values()} == {torch.bfloat16}
            got = joined([slices for slices, _, _ in ranks], expected)
            # One more rounding a step, of the parameter itself: a share of its size, not of its way.
            for key, whole in expected.items():
                torch.testing.assert_close(got[key], whole, rtol=4 * 2**-8, atol=2e-3, msg=key)
            check_norms(norms, [norms for _, _, norms in ranks], 2e-2)


# Wires of another dtype


def test_fp32_wire_for_a_bf16_model_rounds_no_sum(subtests: pytest.Subtests) -> None:
    def of(world_size: int, stage: str) -> Run:
        run = Run(world_size=world_size, dtype=torch.bfloat16, micro_batches=3)
        return run.with_options(**STAGES[stage], communication_dtype=torch.float32)

    cases = [(2, "stage1"), (3, "stage2")]
    for name, run, ran in trained({label(case): of(*case) for case in cases}, masters_of):
        with subtests.test(name):
            check_masters(run, ran.values(), 1e-6)


def test_sixteen_bit_wire_for_an_fp32_model(subtests: pytest.Subtests) -> None:
    wires = [("stage1", torch.float16), ("stage2", torch.bfloat16)]
    runs = {
        f"{stage}, {wire}": Run(world_size=3).with_options(**STAGES[stage], communication_dtype=wire)
        for stage, wire in wires
    }
    for name, run, ran in trained(runs, masters_of):
        with subtests.test(name):
            expected, norms = emulate(run)
            ranks = ran.values()
            got = joined([slices for slices, _, _ in ranks], expected)
            share = share_of(run.options["communication_dtype"], 3)
            check_movement(run, expected, got, share)
            check_norms(norms, [norms for _, _, norms in ranks], share)
            with pytest.raises(AssertionError, match="off by"):  # the wire was used at all
                check_movement(run, expected, got, 1e-6)


# A wide model


def test_fp64_stays_fp64(subtests: pytest.Subtests) -> None:
    def of(world_size: int, stage: str, clip: float) -> Run:
        run = Run(world_size=world_size, dtype=torch.float64, micro_batches=3, clip=clip)
        return run.with_options(**STAGES[stage])

    cases = [(2, "stage1", 0.0), (3, "stage2", 0.3)]
    for name, run, ran in trained({label(case): of(*case) for case in cases}, train_rank_numbers):
        with subtests.test(name):
            expected, norms = train_alone(run)
            for parameters, masters, own in ran.values():
                assert {slice_.dtype for slice_ in masters.values()} == {torch.float64}
                assert own == pytest.approx(norms, rel=1e-12)
                for key, value in expected.items():
                    torch.testing.assert_close(parameters[key], value, rtol=0, atol=1e-13, msg=key)


def train_rank_numbers(
    rank: int, world_size: int, run: Run
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    trained = train_rank(rank, world_size, run)
    return {name: p.detach() for name, p in trained.model.named_parameters()}, trained.masters(), trained.norms


def test_the_emulation_is_plain_torch_for_fp32() -> None:
    """What judges 16-bit runs gives, in fp32, what judges fp32 runs."""
    run = Run(3, micro_batches=2, clip=0.3)
    expected, norms = train_alone(run)
    got, own = emulate(run)
    check_close({name: expected[name] for name in got}, [got], 1e-6)
    assert own == pytest.approx(norms, rel=1e-5)
