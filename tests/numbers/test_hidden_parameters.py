"""What the graph hides, or shows in vain: every gradient is reduced, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.numbers import trained
from tests.support.ranks import run_ranks
from tests.support.tower import (
    STAGES,
    TIMEOUT,
    Tower,
    Training,
    check,
    check_each,
    detection_of,
    draw,
    judge,
    random_kept,
    sharded,
)

WAYS = ["reentrant", "non-reentrant", "hidden", "swallowed"]


def test_ways_that_change_by_rank_and_step(subtests: pytest.Subtests) -> None:
    def way(step: int, at: int, rank: int) -> str:
        return draw(7, step, at, rank).choice([*WAYS, "plain"])

    def of(stage: str, world_size: int, backwards: int) -> Training:
        return Training(random_kept(2), world_size, backwards=backwards, way=way, options=STAGES[stage])

    cases = [("stage1", 2, 3), ("stage2", 3, 1)]
    runs = {
        f"{stage}, {size} ranks, {backwards} backwards": of(stage, size, backwards) for stage, size, backwards in cases
    }
    check_each(runs, subtests, 5e-6)


def test_what_came_unforeseen_is_foreseen_from_then_on(forecasting: None, subtests: pytest.Subtests) -> None:
    """The first step needs one more sync, of what had been left out alone; the others don't."""
    runs = {way: Training(lambda *_: {1, 3}, steps=3, way=lambda *_, way=way: way) for way in ("reentrant", "hidden")}
    for way, run, ran in trained(runs, sharded, timeout=TIMEOUT):
        with subtests.test(way):
            seen, _ = judge(run, ran.values())
            assert [len(messages) for messages in seen.messages] == [3, 2, 2]
            first, *others = seen.reduced
            assert others[0] == others[1]
            assert sorted(first) == sorted(others[0])


def test_what_is_shown_in_vain_stays_bit_for_bit(forecasting: None) -> None:
    seen, _ = check(Training(lambda *_: {1, 3}, steps=3, way=lambda *_: "swallowed"))
    start = Tower().state_dict()
    for place in (1, 3):
        assert torch.equal(seen.parameters[f"layers.{place}.weight"], start[f"layers.{place}.weight"])
    assert not torch.equal(seen.parameters["first.weight"], start["first.weight"])


# The walk


def reached(model: nn.Module, *backwards: tuple[Tensor, Any]) -> list[set[str]]:
    """Names of what a walk through the graph finds, for each loss and ``inputs``."""

    def look(rank: int, world_size: int) -> list[set[str]]:
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        names = {record.index: record.name for record in optimizer.sharded_parameters}
        return [{names[index] for index in detection_of(optimizer).reached(*each)} for each in backwards]

    return run_ranks(look, 1)[0]


def test_the_walk_finds_what_backward_would_give_a_gradient() -> None:
    model = Tower()
    loss = model(torch.ones(2, 6), {1, 4}, "non-reentrant").square().mean() + model.layers[2].bias[0]
    used = {f"{name}.{kind}" for name in ("first", "layers.1", "layers.4", "last") for kind in ("weight", "bias")}
    assert reached(
        model,
        (loss, None),
        (loss, model.first.bias),
        (loss, [model.layers[2].bias, model.layers[3].bias]),
    ) == [used | {"layers.2.bias"}, {"first.bias"}, {"layers.2.bias"}]


def test_a_loss_that_is_a_parameter_and_one_that_is_nothing() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    assert reached(model, (model.scale, None), (torch.zeros(()), None)) == [{"scale"}, set()]
