"""What must not change: short runs have the same numbers. ``tests/golden/make.py`` made the file of them."""

from __future__ import annotations

import json
from itertools import combinations, product

import pytest
import torch

from tests.golden.curves import CURVES, NONE, OPTIMIZERS, RANKS, RUNS, Curve, Mistake, Run, curve_of, together
from tests.support.ranks import run_ranks


def tolerance(run: Run) -> float:
    """Of sums in another order in fp32 (measured: 1.2e-7), else of one rounding of every gradient on its way.

    Half an epsilon: of bf16 4e-3 (measured, with fp32 on the way instead: 3e-3), of fp16 5e-4 (3e-4).
    """
    return 1e-6 if run.dtype == "float32" else torch.finfo(getattr(torch, run.dtype)).eps / 2


def differing(run: Run, expected: dict[str, list[float]], got: Curve) -> set[str]:
    """Which of losses and norms aren't the golden ones."""
    pairs = {"losses": (expected["losses"], got.losses), "norms": (expected["norms"], got.norms)}
    return {what for what, (one, two) in pairs.items() if two != pytest.approx(one, rel=tolerance(run), abs=0)}


# Each with what shows it. By AdamW a factor of all gradients changes no step, and where norms are clipped by neither.
MISTAKES = {
    "one rank left out": (Mistake(rank_left_out=True), {"losses", "norms"}),
    "factor 2": (Mistake(factor=2.0), {"norms"}),
    "one micro-batch lost": (Mistake(micro_batch_lost=True), {"losses", "norms"}),
    "a step skipped": (Mistake(step_skipped=True), {"losses", "norms"}),
    "clipping forgotten": (Mistake(clipping_forgotten=True), {"losses", "norms"}),
    "zeros for what is dropped": (Mistake(zeros_for_dropped=True), {"norms"}),
}


def mistakes_of(run: Run) -> dict[str, tuple[Mistake, set[str]]]:
    """Those that it can make."""
    can = {"one micro-batch lost": run.micro_batches > 1, "clipping forgotten": run.clip > 0}
    can["zeros for what is dropped"] = run.drop
    return {name: each for name, each in MISTAKES.items() if can.get(name, True)}


@pytest.fixture(scope="module")
def curves() -> dict[tuple[Run, str, str], Curve]:
    """Of each run by each optimizer: as it should be, and with each mistake."""

    def train(rank: int, world_size: int) -> dict[tuple[Run, str, str], Curve]:
        ways = {run: {"": (NONE, set()), **mistakes_of(run)} for run in RUNS}
        return {
            (run, optimizer, name): curve_of(rank, world_size, run, optimizer, mistake)
            for run in RUNS
            for optimizer in OPTIMIZERS
            for name, (mistake, _) in ways[run].items()
        }

    ranks = run_ranks(train, RANKS)
    assert all(curve.norms == ranks[1][which].norms for which, curve in ranks[0].items())
    return {which: together([each[which] for each in ranks]) for which in ranks[0]}


GOLDEN_CURVES = {Run(**each["run"]): each for each in json.loads(CURVES.read_text())["runs"]}


def test_every_run_has_its_curves() -> None:
    assert list(GOLDEN_CURVES) == RUNS
    rows = [(run.stage, run.dtype, run.micro_batches, run.drop, run.clip) for run in RUNS]
    for one, other in combinations(zip(*rows, strict=True), 2):
        assert set(zip(one, other, strict=True)) == set(product(one, other))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.label)
def test_curves_are_the_golden_ones(run: Run, optimizer: str, curves: dict[tuple[Run, str, str], Curve]) -> None:
    expected = GOLDEN_CURVES[run][optimizer]
    assert differing(run, expected, curves[run, optimizer, ""]) == set(), (expected, curves[run, optimizer, ""])
    for name, (_, shown_by) in mistakes_of(run).items():
        assert shown_by <= differing(run, expected, curves[run, optimizer, name]), name
