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
from tests.support.numbers import DROPS, STAGES, adagrad, check_masters, joined, masters_of, share_of, trained
from tests.support.oracle import Run, adamw, check_close, emulate, momentum, train_alone, train_sharded
from tests.support.ranks import run_ranks

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
    runs = {label(case): sixteen(*case) for case in cases}
    # Steps far below the last bit of bf16 add up.
    runs["small steps"] = Run(dtype=torch.bfloat16, optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-5))
    for name, run, ran in trained(runs, masters_of):
        with subtests.test(name):
            check_masters(run, ran.values(), share_of(run.dtype, run.world_size))


def test_without_masters(subtests: pytest.Subtests) -> None:
    run = Run(dtype=torch.bfloat16).with_options(master_weights=False)
    for name, each, ran in trained(on_two_and_three(run), masters_of):
        with subtests.test(name):
            expected, norms = emulate(each)
            ranks = ran.values()
            for slices, _, _ in ranks:
                assert {own.dtype for own in slices.values()} == {torch.bfloat16}
            got = joined([slices for slices, _, _ in ranks], expected)
            # One more rounding a step, of the parameter itself: a share of its size, not of its way.
            for key, whole in expected.items():
                torch.testing.assert_close(got[key], whole, rtol=4 * 2**-8, atol=2e-3, msg=key)
            check_norms(norms, [norms for _, _, norms in ranks], 2e-2)


def on_two_and_three(run: Run) -> dict[str, Run]:
    """The run on two ranks in stage 1, and on three in stage 2."""
    return {f"stage {stage}": replace(run, world_size=stage + 1).with_options(stage=stage) for stage in (1, 2)}


# Wires of another dtype


def test_fp32_wire_for_a_bf16_model_rounds_no_sum(subtests: pytest.Subtests) -> None:
    run = Run(dtype=torch.bfloat16, micro_batches=3).with_options(communication_dtype=torch.float32)
    for name, each, ran in trained(on_two_and_three(run), masters_of):
        with subtests.test(name):
            check_masters(each, ran.values(), 1e-6)


def test_sixteen_bit_wire_for_an_fp32_model(subtests: pytest.Subtests) -> None:
    wires = [(1, torch.float16), (2, torch.bfloat16)]
    runs = {str(wire): Run(world_size=3).with_options(stage=stage, communication_dtype=wire) for stage, wire in wires}
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
    for name, run, ran in trained(on_two_and_three(Run(dtype=torch.float64, micro_batches=3, clip=0.3)), masters_of):
        with subtests.test(name):
            expected, norms = train_alone(run)
            for masters, parameters, own in ran.values():
                assert {slice_.dtype for slice_ in masters.values()} == {torch.float64}
                assert own == pytest.approx(norms, rel=1e-12)
                check_close(expected, [parameters], 1e-13)


def test_the_emulation_is_plain_torch_for_fp32() -> None:
    """What judges 16-bit runs gives, in fp32, what judges fp32 runs."""
    run = Run(3, micro_batches=2, clip=0.3)
    expected, norms = train_alone(run)
    got, own = emulate(run)
    check_close({name: expected[name] for name in got}, [got], 1e-6)
    assert own == pytest.approx(norms, rel=1e-5)


# ---- the same bits, whichever way communication overlaps, and however often it is run ----


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
