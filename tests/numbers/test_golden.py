"""What must not change: short runs have the same numbers. ``tests/golden/make.py`` made the file of them."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from tests.golden.curves import CURVES, RANKS, RUNS, Run, curves_of, together
from tests.support.ranks import run_ranks


def tolerance(run: Run) -> float:
    """Return what sums in another order differ by in fp32 (measured: 1.2e-7), else one rounding of every gradient.

    That is half an epsilon: of bf16 4e-3 (measured, with fp32 on the way instead: 3e-3), of fp16 5e-4 (3e-4).
    """
    return 1e-6 if run.dtype == "float32" else torch.finfo(getattr(torch, run.dtype)).eps / 2


def test_curves_are_the_golden_ones(subtests: pytest.Subtests) -> None:
    golden = json.loads(CURVES.read_text())["runs"]
    assert [each["run"] for each in golden] == [asdict(run) for run in RUNS]
    for run, expected, ranks in zip(RUNS, golden, zip(*run_ranks(curves_of, RANKS), strict=True), strict=True):
        with subtests.test(str(run)):
            assert ranks[0].norms == ranks[1].norms
            curve = together(ranks)
            assert curve.losses == pytest.approx(expected["losses"], rel=tolerance(run), abs=0)
            assert curve.norms == pytest.approx(expected["norms"], rel=tolerance(run), abs=0)
