"""Unused parameters: they stay as they are, don't travel once they are detected, and none that is used is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lowlevel_zero import LowLevelZeroOptimizer, unused_parameters
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.covering import covering
from tests.support.internals import with_and_without_detection
from tests.support.numbers import trained
from tests.support.oracle import check_close
from tests.support.patching import patch_rank
from tests.support.ranks import run_cases, run_ranks
from tests.support.tower import (
    CALLS,
    LAYERS,
    STAGES,
    TIMEOUT,
    Kept,
    Tower,
    Training,
    alone,
    check,
    check_each,
    detection_of,
    draw,
    everything,
    in_stages,
    judge,
    parameters_of,
    random_kept,
    sharded,
    wrapped,
)

# What it spares


@pytest.mark.usefixtures("unaligned")
def test_bytes_shrink_by_exactly_the_dropped_share(subtests: pytest.Subtests) -> None:
    """Buckets of several parameters, of which one may lose some."""
    dropped = {1, 2, 5}

    def kept(step: int, at: int, rank: int) -> set[int]:
        return set(range(LAYERS)) - (dropped if step else set())

    def of(world_size: int, stage: str) -> Training:
        options = {"reduce_bucket_size": 6000, **STAGES[stage]}
        return Training(kept, world_size, steps=5, width=60, options=options)

    cases = covering((1, 2, 3), STAGES)
    runs = {f"{size} ranks, {stage}": of(size, stage) for size, stage in cases}
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
        announced, deadline = optimizer.sharded_groups[0].reducer._announced, time.monotonic() + TIMEOUT
        while announced is not None and not announced.done() and time.monotonic() < deadline:
            time.sleep(0.001)

    all_but_one = 2 * (2 + 3) - 1  # weights and biases of the first, the last and three layers
    for (stage, always_whole), ran in run_cases(train, 2, product(STAGES, (True, False)), one_group=True):
        with subtests.test(stage=stage, always_whole=always_whole):
            early = ran.values()[0]
            assert (max(early) < all_but_one) if always_whole else (early[1:] == [all_but_one] * 2), early


def test_what_never_comes_on_any_rank_has_no_bucket() -> None:
    seen, _ = check(Training(lambda step, at, rank: None if step > 2 else {0}, steps=5))
    assert len(seen.reduced[0]) > len(seen.reduced[1]) > 0
    assert seen.reduced[-1] == []


# What the hosts tell each other


@pytest.mark.parametrize(("call", "stage"), [("driven", "stage1"), ("bare", "stage2")])
def test_a_byte_a_parameter_is_sent_by_a_step_that_lacks_a_gradient_and_by_every_sync_that_detects(
    call: str, stage: str
) -> None:
    run = Training(everything, 2, 4, 3, call=lambda *_: call, options=STAGES[stage])
    message = len(list(run.model().parameters())) + 2
    for seen in check(run):
        assert seen.messages == [[]] * 4
    lacking = replace(run, kept=lambda step, at, rank: {0} if (step, rank) == (2, 1) else everything(step, at, rank))
    for seen in check(lacking):
        assert seen.messages[:3] == [[], [], [message]]
    for _, detecting in run_ranks(with_and_without_detection(sharded), 2, run):
        assert detecting.messages == [[message] * (3 + 1)] * 4


# When unused parameters are detected


def no_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a walk through the graph")

    monkeypatch.setattr(unused_parameters, "_leaves", refuse)


def test_a_run_without_drops_never_walks_the_graph(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    no_walks(monkeypatch)

    def of(call: str) -> Training:
        return Training(everything, 2, 4, 2, call=lambda *_: call)

    runs = {call: of(call) for call in CALLS}
    travelling = len(list(Tower().parameters()))
    for name, run, ran in trained(runs, sharded, timeout=TIMEOUT):
        with subtests.test(name):
            for seen in judge(run, ran.values()):
                assert not any(seen.detecting)
                assert [len(reduced) for reduced in seen.reduced] == [2 * travelling] * 4
                assert len(set(map(sum, seen.reduced))) == 1


def test_plain_backwards_alone_carry_everything(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    """However many each rank runs: who has run fewer joins with zeros."""
    no_walks(monkeypatch)
    kept = random_kept(3, nothing=0.4)
    runs = in_stages(Training(kept, 3, 6, 3, call=lambda *_: "bare"))
    syncs = [[sum(kept(step, at, rank) is not None for at in range(3)) for rank in range(3)] for step in range(6)]
    assert any(len(set(by_rank)) > 1 for by_rank in syncs)
    travelling = len(list(Tower().parameters()))
    for name, run, ran in trained(runs, sharded, timeout=TIMEOUT):
        with subtests.test(name):
            for seen in judge(run, ran.values(), 5e-6):
                assert not any(seen.detecting)
                assert [len(reduced) for reduced in seen.reduced] == [max(by_rank) * travelling for by_rank in syncs]


def test_without_drops_detection_changes_no_bit(subtests: pytest.Subtests) -> None:
    run = Training(everything, 3, steps=4)
    runs = {stage: replace(run, options={"reduce_bucket_size": 50, **own}) for stage, own in STAGES.items()}
    for name, _, ran in trained(runs, with_and_without_detection(sharded), timeout=TIMEOUT):
        with subtests.test(name):
            whole, detected = zip(*ran.values(), strict=True)
            assert not any(whole[0].detecting)
            assert all(detected[0].detecting)
            assert whole[0].reduced == detected[0].reduced
            for key, value in whole[0].parameters.items():
                assert torch.equal(value, detected[0].parameters[key]), key


def test_one_drop_on_one_rank_switches_detection_on_everywhere_for_good(subtests: pytest.Subtests) -> None:
    def kept(step: int, at: int, rank: int) -> set[int]:
        return {0, 2} if (step, rank) == (1, 2) else everything(step, at, rank)

    steps = 5
    for name, run, ran in trained(in_stages(Training(kept, 3, steps)), sharded, timeout=TIMEOUT):
        with subtests.test(name):
            for seen in judge(run, ran.values(), 2e-5):
                assert seen.detecting == [False] + [True] * (steps - 1)
                assert len(set(map(sum, seen.reduced))) == 1  # and all of them carried everything, which somebody used


# Who had a gradient


PARTLY_USED: dict[str, Kept] = {
    "by one rank, in one micro-batch": lambda step, at, rank: {0, 4} if (at, rank) == (1, 1) else {0},
    "by one rank, in the last": lambda step, at, rank: {0, 4} if (at, rank) == (2, 0) else {0},
    "by one that uses nothing else": lambda step, at, rank: ({4} if at == 0 else None) if rank == 1 else {0},
}


def test_a_parameter_is_present_if_one_rank_used_it_in_one_micro_batch(subtests: pytest.Subtests) -> None:
    def of(who: str, call: str) -> Training:
        return Training(PARTLY_USED[who], 3, 4, 3, call=lambda *_: call)

    start = Tower().state_dict()
    for name, run, ran in trained(in_all_ways(PARTLY_USED, of), sharded, timeout=TIMEOUT):
        with subtests.test(name):
            ranks = ran.values()
            check_close(alone(run), [seen.parameters for seen in ranks], 2e-6)
            for seen in ranks:
                for still in ("layers.3.weight", "layers.5.bias"):  # which decay would have moved
                    assert torch.equal(seen.parameters[still], start[still])
                assert not torch.equal(seen.parameters["layers.4.weight"], start["layers.4.weight"])


def in_all_ways(whats: Iterable[str], of: Callable[[str, str], Training]) -> dict[str, Training]:
    """``of(what, call)`` for each call, in each stage and place, of which any two meet."""
    return {
        f"{what}, {call}, {stage}": replace(of(what, call), options=STAGES[stage])
        for what, call, stage in covering(whats, CALLS, STAGES)
    }


def test_a_dropped_parameter_has_no_gradient_when_gradients_become_zeros(subtests: pytest.Subtests) -> None:
    """A parameter that had one goes on having one, of zeros, so that momentum and decay move it; as in torch."""

    def kept(step: int, at: int, rank: int) -> set[int]:
        return {0, 1} if (step, rank) == (1, 1) else {0}

    whats = {
        "one, once": Training(kept, 2, 4, to_none=False),
        "any": Training(random_kept(5), 2, 4, to_none=False),
        "any, cleared to zeros in between": Training(random_kept(6), 2, 4, 2, to_none=False, discarded=True),
        "any, cleared to None in between": Training(random_kept(7), 2, 4, 2, discarded=True),
    }
    start = Tower().state_dict()
    runs = in_all_ways(whats, lambda what, call: replace(whats[what], call=lambda *_: call))
    for name, run, ran in trained(runs, sharded, timeout=TIMEOUT):
        with subtests.test(name):
            ranks = ran.values()
            check_close(alone(run), [seen.parameters for seen in ranks], 2e-6)
            for seen in ranks if run.kept is kept else ():
                assert torch.equal(seen.parameters["layers.2.weight"], start["layers.2.weight"])
                assert not torch.equal(seen.parameters["layers.1.weight"], start["layers.1.weight"])


def test_whoever_looks_at_gradients_sees_those_that_another_rank_had(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, run: Training) -> dict[str, Tensor]:
        model = run.model()
        optimizer = wrapped(run, model)
        for step in range(run.steps):
            optimizer.backward(run.loss(model, step, 0, rank))
            seen = {name for name, p in model.named_parameters() if optimizer.get_param_grad(p) is not None}
            assert {name.rpartition(".")[0] for name in seen} == {"first", "layers.0", "layers.4", "last"}
            assert len(optimizer.get_working_grads_by_group_id(0)) == len(seen) == 8
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    runs = in_stages(Training(lambda step, at, rank: {0, 4} if rank else {0}, 2, 4))
    for name, run, ran in trained(runs, train, timeout=TIMEOUT):
        with subtests.test(name):
            check_close(alone(run), ran.values(), 2e-6)


# Whatever may be called, in whatever mixture


def random_calls(seed: int, names: list[str]) -> Callable[[int, int, int], str]:
    return lambda step, at, rank: draw(seed, step, at, rank, 5).choice(names)


def test_random_drops(subtests: pytest.Subtests) -> None:
    def of(seed: int) -> Training:
        rng = random.Random(seed)
        options = {
            "partition_grad": seed % 2 == 0,
            "reduce_bucket_size": rng.choice([1, 40, 100, 2000]),
            "overlap_communication": rng.random() < 0.7,
        }
        return Training(
            random_kept(seed, nothing=0.2),
            world_size=2 + seed % 3,
            steps=6,
            backwards=1 + seed % 3,
            clip=rng.choice([0.0, 0.1]),
            options=options,
        )

    for name, run, ran in trained({f"seed {seed}": of(seed) for seed in range(6)}, sharded, timeout=TIMEOUT):
        with subtests.test(name):
            seen, *_ = judge(run, ran.values(), 5e-6)
            assert seen.detecting[2:] == [True] * 4


def test_random_drops_under_no_sync(forecasting: None, subtests: pytest.Subtests) -> None:
    """Leftovers count as used, also where the last backward of a step is under no_sync."""

    def of(seed: int) -> Training:
        calls = random_calls(seed, ["driven", "no_sync"])
        return Training(
            random_kept(seed, nothing=0.1),
            2 + seed % 2,
            backwards=3,
            call=lambda step, at, rank: calls(step, at, 0),  # the same on all
            options=STAGES["stage2" if seed % 2 else "stage1"],
        )

    check_each({f"seed {seed}": of(seed) for seed in range(3)}, subtests, 5e-6)


def test_any_mixture_of_calls_on_any_rank(forecasting: None, subtests: pytest.Subtests) -> None:
    """Driven here, bare there, under no_sync or not at all elsewhere; buckets are small, and waited for in stage 2."""

    def of(world_size: int, stage: str) -> Training:
        calls = random_calls(world_size, ["driven", "bare", "no_sync", "none"])
        kept = random_kept(world_size, nothing=0.2)

        def kept_if_called(step: int, at: int, rank: int) -> set[int] | None:
            return None if calls(step, at, rank) == "none" else kept(step, at, rank)

        def call(step: int, at: int, rank: int) -> str:
            return "bare" if calls(step, at, rank) == "none" else calls(step, at, rank)

        return Training(kept_if_called, world_size, backwards=3, call=call, options=STAGES[stage])

    cases = product((2, 3, 4), STAGES)
    check_each({f"{size} ranks, {stage}": of(size, stage) for size, stage in cases}, subtests, 5e-6)
