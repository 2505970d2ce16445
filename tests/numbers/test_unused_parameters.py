"""Unused parameters: they stay as they are, don't travel once they are detected, and none that is used is lost."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping import unused_parameters
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.internals import with_and_without_detection
from tests.support.numbers import STAGES, trained
from tests.support.on_ranks import on_ranks
from tests.support.patching import patch_rank
from tests.support.ranks import run_cases, run_ranks
from tests.support.tower import (
    CALLS,
    LAYERS,
    TIMEOUT,
    Tower,
    Training,
    check,
    check_each,
    detection_of,
    draw,
    everything,
    judge,
    random_kept,
    sharded,
)

# What it spares


@pytest.mark.usefixtures("unaligned")
def test_bytes_shrink_by_exactly_the_dropped_share(subtests: pytest.Subtests) -> None:
    """Buckets of several parameters, of which one may lose some."""
    dropped = {1, 2, 5}

    def kept(step: int, at: int, rank: int) -> set[int]:
        return set(range(LAYERS)) - (dropped if step else set())

    run = Training(kept, steps=5, width=60)
    runs = {
        stage: replace(run, world_size=size, options={"reduce_bucket_size": 6000, **STAGES[stage]})
        for size, stage in zip((2, 3), STAGES, strict=True)
    }
    layer = 60 * 60 + 60
    for name, run, ran in trained(runs, sharded, timeout=TIMEOUT):
        with subtests.test(name):
            for seen in judge(run, ran.values(), 2e-5):
                whole, *_, spared = map(sum, seen.reduced)
                size = run.world_size
                assert whole == sum(-(-p.numel() // size) * size for p in run.model().parameters())
                assert whole - spared == len(dropped) * layer
                assert sum(seen.gathered[0]) - sum(seen.gathered[-1]) == len(dropped) * layer
                assert seen.detecting == [False, True, True, True, True]  # the drop shows in step 1


def test_buckets_behind_a_dropped_layer_start_in_the_midst_of_backward(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, stage: str, always_whole: bool) -> list[int]:
        """How many buckets have started by the time of the last gradient, by step."""
        model = Tower()
        events: list[str] = []
        model.first.weight.register_post_accumulate_grad_hook(lambda p: events.append("the last gradient"))
        optimizer = LowLevelZeroOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model=model, reduce_bucket_size=1, **STAGES[stage]
        )
        handle = model.last.weight.register_hook(lambda _: until_all_have_announced(optimizer))
        early = []
        for _ in range(3):
            events.clear()
            if always_whole:
                patch_rank(detection_of(optimizer), "detecting", False)
            with pytest.MonkeyPatch.context() as patch:
                for name in ("all_reduce", "reduce_scatter"):
                    patch.setattr(ShardGroup, name, telling(getattr(ShardGroup, name), events))
                optimizer.backward(model(torch.ones(2, 6), {0, 1, 4}).square().mean())
            early.append(events.index("the last gradient"))
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()  # it holds the optimizer
        return early

    def telling(collective: Any, events: list[str]) -> Any:
        return lambda group, *args: events.append("bucket") or collective(group, *args)

    def until_all_have_announced(optimizer: LowLevelZeroOptimizer) -> None:
        """What they will use: before that no bucket can start."""
        announced, deadline = optimizer.sharded_groups[0].reducer.syncs._announced, time.monotonic() + TIMEOUT
        while announced is not None and not announced.ready() and time.monotonic() < deadline:
            time.sleep(0.001)

    all_but_one = 2 * (2 + 3) - 1  # weights and biases of the first, the last and three layers
    for (stage, always_whole), ran in run_cases(train, 2, product(STAGES, (True, False)), one_group=True):
        with subtests.test(stage=stage, always_whole=always_whole):
            early = ran.values()[0]
            assert (max(early) < all_but_one) if always_whole else (early[1:] == [all_but_one] * 2), early


# What the hosts tell each other


@pytest.mark.parametrize(("call", "stage"), [("driven", "stage1"), ("bare", "stage2")])
def test_a_byte_a_parameter_is_sent_by_a_step_that_lacks_a_gradient_and_by_every_sync_that_detects(
    call: str, stage: str
) -> None:
    run = Training(everything, 2, 4, 3, call=lambda *_: call, options=STAGES[stage])
    message = len(list(run.model().parameters())) + 1
    for seen in check(run):
        assert seen.messages == [[]] * 4
    lacking = replace(run, kept=lambda step, at, rank: {0} if (step, rank) == (2, 1) else everything(step, at, rank))
    for seen in check(lacking):
        assert seen.messages[:3] == [[], [], [message]]
        assert seen.detecting == [False, False, *[call == "driven"] * 2]  # on all ranks, and from then on
    for _, detecting in run_ranks(with_and_without_detection(sharded), 2, run):
        assert detecting.messages == [[message] * 3] * 4


# When unused parameters are detected


def test_a_run_without_drops_never_walks_the_graph(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a walk through the graph")

    monkeypatch.setattr(unused_parameters, "_leaves", refuse)
    runs = {call: Training(everything, 2, 4, 2, call=lambda *_, call=call: call) for call in CALLS}
    travelling = len(list(Tower().parameters()))
    for name, run, ran in trained(runs, sharded, timeout=TIMEOUT):
        with subtests.test(name):
            for seen in judge(run, ran.values()):
                assert not any(seen.detecting)
                assert [len(reduced) for reduced in seen.reduced] == [2 * travelling] * 4
                assert len(set(map(sum, seen.reduced))) == 1


# What the graph hides, or shows in vain

WAYS = ["reentrant", "non-reentrant", "hidden", "swallowed"]


def test_ways_that_change_by_rank_and_step(subtests: pytest.Subtests) -> None:
    def way(step: int, at: int, rank: int) -> str:
        return draw(7, step, at, rank).choice([*WAYS, "plain"])

    run = Training(random_kept(2), way=way)
    runs = {
        "stage 1, 3 backwards": replace(run, backwards=3),
        "stage 2, 3 ranks": replace(run, world_size=3, options=STAGES["stage2"]),
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


# The walk through the graph


def reached(model: nn.Module, *backwards: tuple[Tensor, Any]) -> list[set[str]]:
    """Names of what a walk through the graph finds, for each loss and ``inputs``."""

    def look(rank: int, world_size: int) -> list[set[str]]:
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        names = {record.index: record.name for record in optimizer.sharded_parameters}
        return [{names[index] for index in detection_of(optimizer).reached(*each)} for each in backwards]

    return run_ranks(look, 1)[0]


@on_ranks(1)
def test_plans_of_few_sets_are_made_once_and_those_of_many_are_not_all_kept(rank: int) -> None:
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(Tower().parameters(), lr=0.1))
    plan = optimizer.sharded_groups[0].reducer.plan
    count = sum(len(bucket.members) for bucket in plan.whole)
    sets = [bytes(at >> place & 1 for place in range(count)) for at in range(1, 200)]
    assert plan.of(sets[2]) is plan.of(sets[2])
    made = [ref(plan.of(used)[0]) for used in sets]
    assert made[-1]() is not None
    assert sum(each() is not None for each in made) < 100


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


class Decaying(torch.optim.SGD):
    """Writes all parameters, those without a gradient too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.mul_(0.99)


@on_ranks(2)
def test_an_empty_parameter_may_be_written_by_a_class_that_writes_all_parameters(rank: int) -> None:
    model = nn.Linear(3, 3)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    optimizer = LowLevelZeroOptimizer(Decaying(model.parameters(), lr=0.1), model=model)
    for _ in range(3):
        optimizer.backward(0.0 * model(torch.ones(2, 3)).sum())
        before = model.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.weight.detach(), 0.99 * before, rtol=0, atol=1e-6)
