"""How a run's results are held against the oracle's; ``mistakes`` show that the tolerances are worth something."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.oracle import Result, Run, build, check_close, emulate, train_alone


def check_run(
    run: Run,
    ranks: Sequence[Result],
    tolerance: float = 1.3e-6,
    rel: float = 1e-5,
    by: Callable[[Run], Result] = train_alone,
) -> None:
    """Check that every rank's parameters, bit for bit the same, and norms are the oracle's.

    Args:
        run: what was done.
        ranks: what came of it.
        tolerance: how far any element may be off.
        rel: by how much of itself a norm may be off.
        by: the oracle.
    """
    expected, norms = by(run)
    check_close(expected, [parameters for parameters, _ in ranks], tolerance)
    check_norms(norms, [own for _, own in ranks], rel)
    check_still(run, expected, ranks[0][0])


def check_share(
    run: Run, ranks: Sequence[Result], share: float, rel: float | None = None, by: Callable[[Run], Result] = emulate
) -> None:
    """As ``check_run``, where something is rounded to 16 bits: by the way that parameters, or masters, have gone.

    Args:
        run: what was done.
        ranks: what came of it.
        share: of the way that they should have gone, all together may be off by this much, and each by 4 times that.
        rel: by how much of itself a norm may be off; None: ``share``.
        by: the oracle.
    """
    expected, norms = by(run)
    check_close(ranks[0][0], [parameters for parameters, _ in ranks], 0.0)
    check_movement(run, expected, ranks[0][0], share)
    check_norms(norms, [own for _, own in ranks], share if rel is None else rel)


def mistakes(run: Run) -> dict[str, Run]:
    """Return runs that go wrong as a package may, by what goes wrong."""
    last, end = run.world_size - 1, run.micro_batches - 1
    wrong = {
        "gradients doubled": replace(run, weight=lambda step, micro, rank: 2.0),
        "the last step skipped": replace(run, steps=run.steps - 1),
    }
    if last > 0:
        wrong["the last rank left out"] = replace(run, weight=lambda step, micro, rank: float(rank < last))
    if end > 0:
        wrong["the last micro-batch lost"] = replace(run, weight=lambda step, micro, rank: float(micro < end))
    return wrong


def check_norms(expected: Sequence[float], ranks: Sequence[Sequence[float]], rel: float) -> None:
    for norms in ranks:
        assert list(norms) == pytest.approx(list(expected), rel=rel)


def check_still(run: Run, expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """Check that each parameter which the oracle never moved is as it was, bit for bit."""
    start = start_of(run)
    for name, value in expected.items():
        if torch.equal(start[name].to(value.dtype), value):
            assert torch.equal(got[name], value), f"{name} should be where it was"


def start_of(run: Run) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in build(run).named_parameters()}


def check_movement(run: Run, expected: dict[str, Tensor], got: dict[str, Tensor], share: float) -> None:
    """Check that all parameters are off by at most ``share`` of the way they went, and each by 4 times that."""
    start = start_of(run)
    off = off_the_way(start, expected, got)
    assert off <= share, f"off by {off:.2g} of the way"
    for name, (way, off_by) in movement(start, expected, got).items():
        assert off_by <= 4 * share * way, f"{name} is off by {off_by:.2g}, its way was {way:.2g}"


def off_the_way(start: dict[str, Tensor], expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """Return how far off all parameters together are, as a share of the way they should have gone."""
    ways, offs = zip(*movement(start, expected, got).values(), strict=True)
    return math.hypot(*offs) / math.hypot(*ways)


def movement(
    start: dict[str, Tensor], expected: dict[str, Tensor], got: dict[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Return how far each parameter should have gone, and how far off it is."""
    return {
        name: (
            (whole.double() - start[name].double()).norm().item(),
            (got[name].double() - whole.double()).norm().item(),
        )
        for name, whole in expected.items()
    }
