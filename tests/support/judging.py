"""How a run's results are held against the oracle's, and tolerances against mistakes.

Each of the ``mistakes`` that a package may make must move what is compared ten tolerances far, or norms are compared
too and show it: so no check passes on wrong numbers, nor on a tolerance that is too large for what it judges. A run is
held against one of them, its sisters against the others; ``every_mistake`` holds it against all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.oracle import Result, Run, build, check_close, emulate, train_alone, worst

MARGIN = 10  # a mistake is off by at least so many tolerances


def check_run(
    run: Run,
    ranks: Sequence[Result],
    tolerance: float = 1.3e-6,
    rel: float = 1e-5,
    by: Callable[[Run], Result] = train_alone,
    every_mistake: bool = False,
) -> None:
    """Every rank's parameters, bit for bit the same, and norms are the oracle's, and a mistake would show.

    Args:
        run: what was done.
        ranks: what came of it.
        tolerance: how far any element may be off.
        rel: by how much of itself a norm may be off.
        by: the oracle.
        every_mistake: hold it against all mistakes, and not one of them.
    """
    expected, norms = by(run)
    check_close(expected, [parameters for parameters, _ in ranks], tolerance)
    check_norms(norms, [own for _, own in ranks], rel)
    check_still(run, expected, ranks[0][0], MARGIN * tolerance)
    check_mistakes_show(run, lambda wrong: worst(expected, wrong)[0] / tolerance, norms, rel, by, every_mistake)


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
    rel = share if rel is None else rel
    expected, norms = by(run)
    check_close(ranks[0][0], [parameters for parameters, _ in ranks], 0.0)
    check_movement(run, expected, ranks[0][0], share)
    check_norms(norms, [own for _, own in ranks], rel)
    start = start_of(run)
    check_mistakes_show(run, lambda wrong: off_the_way(start, expected, wrong) / share, norms, rel, by)


def mistakes(run: Run) -> dict[str, Run]:
    """Runs that go wrong as a package may, by what goes wrong."""
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


def check_mistakes_show(
    run: Run,
    tolerances: Callable[[dict[str, Tensor]], float],
    norms: Sequence[float],
    rel: float,
    by: Callable[[Run], Result],
    every: bool = False,
) -> None:
    """A mistake is ``MARGIN`` tolerances off, or its norms are; ``tolerances``: how many a wrong result is."""
    wrongs = list(mistakes(run).items())
    turn = run.world_size + len(run.options)
    for what, wrong in wrongs if every else [wrongs[turn % len(wrongs)]]:
        result, own = by(wrong)
        off_norms = [abs(one - other) / one for one, other in zip(norms, own, strict=False)]
        shows = tolerances(result) > MARGIN or max(off_norms, default=0.0) > MARGIN * rel
        assert shows, f"the tolerance would hide it: {what}"


def check_norms(expected: Sequence[float], ranks: Sequence[Sequence[float]], rel: float) -> None:
    for norms in ranks:
        assert list(norms) == pytest.approx(list(expected), rel=rel)


def check_still(run: Run, expected: dict[str, Tensor], got: dict[str, Tensor], least: float) -> None:
    """What the oracle never moved is as it was, bit for bit; what it moved went ``least`` or further."""
    start = start_of(run)
    for name, value in expected.items():
        before = start[name].to(value.dtype)
        if torch.equal(before, value):
            assert torch.equal(got[name], value), f"{name} should be where it was"
        else:
            way = (value - before).abs().max().item()
            assert way >= least, f"{name} went {way:.2g}: of {least:.2g} a tolerance would show nothing"


def start_of(run: Run) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in build(run).named_parameters()}


def check_movement(run: Run, expected: dict[str, Tensor], got: dict[str, Tensor], share: float) -> None:
    """All parameters together are off by no more than ``share`` of the way they went, and each by 4 times that."""
    start = start_of(run)
    off = off_the_way(start, expected, got)
    assert off <= share, f"off by {off:.2g} of the way"
    for name, (way, off_by) in movement(start, expected, got).items():
        assert off_by <= 4 * share * way, f"{name} is off by {off_by:.2g}, its way was {way:.2g}"


def off_the_way(start: dict[str, Tensor], expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """How far off all parameters together are, as a share of the way they should have gone."""
    ways, offs = zip(*movement(start, expected, got).values(), strict=True)
    return math.hypot(*offs) / math.hypot(*ways)


def movement(
    start: dict[str, Tensor], expected: dict[str, Tensor], got: dict[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """How far each parameter should have gone, and how far off it is."""
    return {
        name: (
            (whole.double() - start[name].double()).norm().item(),
            (got[name].double() - whole.double()).norm().item(),
        )
        for name, whole in expected.items()
    }
