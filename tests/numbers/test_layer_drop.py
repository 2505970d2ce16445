"""Layer drop: the right numbers whatever the ranks leave out, stillness of what nobody used, and no hang."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.covering import covering
from tests.support.internals import with_and_without_detection
from tests.support.judging import check_norms, check_run
from tests.support.numbers import trained
from tests.support.oracle import Odd, Result, Run, batch, check_close, groups
from tests.support.ranks import run_cases, run_ranks

WORLD_SIZES = (1, 2, 3, 4)
STAGES: dict[str, dict[str, Any]] = {
    "stage1": {},
    "stage1-scatter": {"reduce_scatter": True},
    "stage2": {"partition_grad": True},
}
LAYERS = 4  # the last of them shares its weight with the first
ALL = frozenset(range(LAYERS))
TIMEOUT = 20.0

WAYS = {"bare": True, "driven": False}

Rounds = Callable[[int, int], list[set[int] | None]]
"""``rounds(step, rank)``: for each backward of a rank in a step the layers that it drops; None: it uses nothing."""


MOMENTUM = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)  # which counts steps


@dataclass(frozen=True)
class Training:
    """A run whose ranks may differ in all that they use.

    ``bare``: by ``loss.backward()``, not called where a rank uses nothing; else by ``optimizer.backward``, which
    then gets a loss that doesn't require grad. ``factor``: of losses, in runs that go wrong.
    """

    rounds: Rounds
    world_size: int = 2
    steps: int = 4
    bare: bool = False
    clip: float = 0.0
    weight_decay: float = 0.1
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    kind: Callable[..., torch.optim.Optimizer] = MOMENTUM
    factor: float = 1.0

    def model(self) -> Odd:
        torch.manual_seed(0)
        return Odd().to(self.dtype)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.kind(groups(model), weight_decay=self.weight_decay)

    def loss(self, model: nn.Module, step: int, at: int, rank: int, drop: set[int] | None) -> Tensor:
        x, y = batch(Run(dtype=self.dtype), step, at, rank)
        if drop is None:
            return x.sum()
        loss: Tensor = (model(x, drop) - y).square().mean() * self.factor
        return loss

    def wrap(self, model: nn.Module) -> LowLevelZeroOptimizer:
        options = {"reduce_bucket_size": 40, **self.options}
        return LowLevelZeroOptimizer(self.optimizer(model), model=model, clip_grad_norm=self.clip, **options)

    def backwards(self, model: nn.Module, optimizer: LowLevelZeroOptimizer, step: int, rank: int) -> None:
        for at, drop in enumerate(self.rounds(step, rank)):
            loss = self.loss(model, step, at, rank, drop)
            if not self.bare:
                optimizer.backward(loss)
            elif drop is not None:
                loss.backward()


def backwards_alone(run: Training, model: nn.Module, step: int) -> None:
    """The gradient of the mean over ranks of each rank's losses."""
    for rank in range(run.world_size):
        for at, drop in enumerate(run.rounds(step, rank)):
            if drop is not None:
                (run.loss(model, step, at, rank, drop) / run.world_size).backward()


def alone(run: Training) -> Result:
    model = run.model()
    optimizer = run.optimizer(model)
    norms = []
    for step in range(run.steps):
        backwards_alone(run, model, step)
        max_norm = run.clip if run.clip > 0 else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model), norms


def sharded(rank: int, world_size: int, run: Training) -> Result:
    model = run.model()
    optimizer = run.wrap(model)
    norms = []
    for step in range(run.steps):
        run.backwards(model, optimizer, step, rank)
        optimizer.step()
        norms.append(optimizer.get_grad_norm() or 0.0)
        optimizer.zero_grad()
    return parameters_of(model), norms


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def in_all_stages(run: Training) -> dict[str, Training]:
    return {stage: replace(run, options={**run.options, **options}) for stage, options in STAGES.items()}


def check(runs: Mapping[str, Training], subtests: pytest.Subtests, tolerance: float = 2e-6) -> None:
    """The oracle's numbers, whether the ranks find out beforehand what a backward will use or not."""
    for name, run, ran in trained(runs, with_and_without_detection(sharded), timeout=TIMEOUT):
        with subtests.test(name):
            expected, norms = alone(run)
            for ranks in zip(*ran.values(), strict=True):
                check_close(expected, [parameters for parameters, _ in ranks], tolerance)
                check_norms(norms, [own for _, own in ranks], 1e-5)


# What the ranks drop

PATTERNS: dict[str, Rounds] = {
    "same": lambda step, rank: [{step % LAYERS}],
    "different": lambda step, rank: [{(step + rank) % LAYERS}],
    "total": lambda step, rank: [set(ALL)],
    "total-at-times": lambda step, rank: [set(ALL) if step % 2 else set()],
    "one-rank-all-layers": lambda step, rank: [set(ALL) if rank == 0 else {1}],
    "last-rank-all-layers": lambda step, rank: [set(ALL) if rank == 3 else {2}],
    "one-rank-everything": lambda step, rank: [None if rank == 1 else set()],
    "rank-zero-everything": lambda step, rank: [None if rank == 0 else {step % LAYERS}],
    "everything-at-times": lambda step, rank: [None if step in (0, 3) else {0}],
    "some-micro-batches": lambda step, rank: [{1}, {1, 2}, {rank % LAYERS}],
    "never-the-same-twice": lambda step, rank: [{at for at in ALL if (step >> at & 1) ^ (rank >> at & 1)}],
    "one-loss-of-two-nowhere": lambda step, rank: [{1}, None if rank == 0 else {2}],
    "first-loss-of-two-nowhere": lambda step, rank: [None if rank == 0 else {2}, {3}],
    "more-losses-on-higher-ranks": lambda step, rank: [{at} if at <= rank else None for at in range(4)],
}


OF_FOUR = ("last-rank-all-layers", "never-the-same-twice", "more-losses-on-higher-ranks", "different")


def test_pattern(subtests: pytest.Subtests) -> None:
    ways = zip(PATTERNS, cycle(STAGES), cycle(["bare", "bare", "driven", "driven"]))
    check(
        {
            f"{pattern}, {stage}, {way}": Training(
                PATTERNS[pattern], 4 if pattern in OF_FOUR else 2, bare=WAYS[way], options=STAGES[stage]
            )
            for pattern, stage, way in ways
        },
        subtests,
    )


def test_drop_in_buckets_of_any_size(subtests: pytest.Subtests) -> None:
    def of(size: int, overlap: bool) -> Training:
        options = {"partition_grad": True, "reduce_bucket_size": size, "overlap_communication": overlap}
        return Training(PATTERNS["different"], 3, options=options)

    cases = [(1, True), (2**20, False)]
    check({f"{size}, overlap {overlap}": of(size, overlap) for size, overlap in cases}, subtests)


def test_drop_with_clip(subtests: pytest.Subtests) -> None:
    def of(way: str, stage: str) -> Training:
        return Training(PATTERNS["one-rank-all-layers"], 2, bare=WAYS[way], clip=0.2, options=STAGES[stage])

    check({f"{stage}, {way}": of(way, stage) for way, stage in zip(cycle(WAYS), STAGES)}, subtests)


def test_drop_under_accumulation(subtests: pytest.Subtests) -> None:
    def of(stage: str, no_sync: bool) -> Run:
        run = Run(3, micro_batches=3, no_sync=no_sync, drop=lambda step, rank: {(step + rank) % LAYERS, 1})
        return run.with_options(**STAGES[stage], reduce_bucket_size=40)

    cases = [("stage1", True), ("stage1-scatter", False), ("stage2", True), ("stage2", False)]
    runs = {f"{stage}, no_sync {no_sync}": of(stage, no_sync) for stage, no_sync in cases}
    for name, run, ran in trained(runs):
        with subtests.test(name):
            check_run(run, ran.values())


def random_rounds(seed: int, bare: bool) -> Rounds:
    """Any layers, and any number of losses: under ``optimizer.backward`` as many on each rank, some of nothing."""

    def rounds(step: int, rank: int) -> list[set[int] | None]:
        count = 3 if not bare else random.Random(f"{seed} {step} {rank} count").randint(0, 3)
        return list(draw(random.Random(f"{seed} {step} {rank}"), count))

    def draw(draws: random.Random, count: int) -> Iterator[set[int] | None]:
        for _ in range(count):
            yield None if draws.random() < 0.25 else {at for at in ALL if draws.random() < 0.5}

    return rounds


def test_random_rounds(subtests: pytest.Subtests) -> None:
    def of(world_size: int, way: str) -> Training:
        bare, options = WAYS[way], list(STAGES.values())[world_size % 3]
        return Training(random_rounds(world_size, bare), world_size, bare=bare, options=options)

    runs = {f"{size} ranks, {way}": of(size, way) for size, way in zip(WORLD_SIZES, cycle(WAYS))}
    check(runs, subtests, tolerance=4e-6)


def test_the_pattern_matters() -> None:
    """The check above would show a layer that is stepped, or averaged, as if it hadn't been dropped."""
    different, total = Training(PATTERNS["different"]), Training(PATTERNS["total"])
    for right, wrong in (
        (different, replace(different, rounds=lambda step, rank: [{step % LAYERS}])),
        (total, replace(total, rounds=lambda step, rank: [{0, 1, 2}])),
        (different, replace(different, factor=2.0)),
        (different, replace(different, steps=3)),
    ):
        with pytest.raises(AssertionError, match="differs from the oracle by 0"):
            check_close(alone(right)[0], [alone(wrong)[0]], 2e-6)


# Who has used what: the numbers of rounds differ


def test_a_bare_backward_after_the_optimizer_s_own_on_one_rank_alone(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, run: Training) -> dict[str, Tensor]:
        model = run.model()
        optimizer = run.wrap(model)
        for step in range(run.steps):
            first, second = run.rounds(step, rank)
            optimizer.backward(run.loss(model, step, 0, rank, first))
            if second is not None:
                run.loss(model, step, 1, rank, second).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    def of(world_size: int, stage: str) -> Training:
        rounds: Rounds = lambda step, rank: [{1}, {2} if rank == 0 else None]  # noqa: E731
        return Training(rounds, world_size, steps=3, options=STAGES[stage])

    cases = [(1, "stage1"), (2, "stage1"), (3, "stage2")]
    for name, run, ran in trained(
        {f"{size} ranks, {stage}": of(size, stage) for size, stage in cases}, train, timeout=TIMEOUT
    ):
        with subtests.test(name):
            check_close(alone(run)[0], ran.values(), 2e-6)


def test_gradients_of_one_rank_alone_can_be_discarded(subtests: pytest.Subtests) -> None:
    """By ``loss.backward()`` alone, and in a step after one by the optimizer's own backward."""

    def train(rank: int, world_size: int, run: Training, when: int, set_to_none: bool) -> dict[str, Tensor]:
        model = run.model()
        optimizer = run.wrap(model)
        for step in range(run.steps):
            if step == when and rank == 0:
                run.loss(model, step, 7, rank, set()).backward()
            if step == when:
                optimizer.zero_grad(set_to_none)
            run.backwards(model, optimizer, step, rank)
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    run = Training(lambda step, rank: [set()], 2, steps=3)
    starts = [("bare", 0, "stage1"), ("bare", 0, "stage2"), ("bare", 1, "stage2"), ("driven", 1, "stage1")]
    cases = [
        (replace(run, bare=WAYS[way], options=STAGES[stage]), when, set_to_none)
        for (way, when, stage), set_to_none in product(starts, (True, False))
    ]
    for (own, when, set_to_none), ran in run_cases(train, 2, cases, timeout=TIMEOUT, one_group=True):
        with subtests.test(bare=own.bare, options=own.options, when=when, set_to_none=set_to_none):
            check_close(alone(own)[0], ran.values(), 2e-6)


def test_a_group_can_be_added_while_one_rank_alone_has_gradients(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, run: Training) -> dict[str, Tensor]:
        model = run.model()
        optimizer = LowLevelZeroOptimizer(
            torch.optim.SGD(model.layers.parameters(), lr=0.1), model=model, **run.options
        )
        run.backwards(model, optimizer, 0, rank)
        optimizer.add_param_group({"params": [model.scale]})
        optimizer.step()
        return parameters_of(model)

    run = Training(lambda step, rank: [set()] if rank == 0 else [None], 2, bare=True)
    expected = run.model()
    backwards_alone(run, expected, 0)
    torch.optim.SGD([*expected.layers.parameters(), expected.scale], lr=0.1).step()
    runs = {stage: replace(run, options=STAGES[stage]) for stage in ("stage1", "stage2")}
    for name, _, ran in trained(runs, with_and_without_detection(train), timeout=TIMEOUT):
        with subtests.test(name):
            for ranks in zip(*ran.values(), strict=True):
                check_close(parameters_of(expected), ranks, 2e-6)


def test_clipping_by_hand_when_one_rank_alone_has_gradients(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, run: Training) -> tuple[dict[str, Tensor], float]:
        model = run.model()
        optimizer = run.wrap(model)
        run.backwards(model, optimizer, 0, rank)
        norm = float(optimizer.clip_grad_norm_(0.1))
        optimizer.step()
        return parameters_of(model), norm

    run = Training(lambda step, rank: [{1}] if rank == 1 else [None], 3, bare=True)
    expected = run.model()
    backwards_alone(run, expected, 0)
    norm = float(torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1))
    run.optimizer(expected).step()
    for name, _, ran in trained(in_all_stages(run), train, timeout=TIMEOUT):
        with subtests.test(name):
            ranks = ran.values()
            assert [got for _, got in ranks] == pytest.approx([norm] * 3, rel=1e-5)
            check_close(parameters_of(expected), [parameters for parameters, _ in ranks], 2e-6)


# Stillness of what nobody used

Snapshot = dict[str, list[Tensor]]


def snapshot(model: nn.Module, optimizer: LowLevelZeroOptimizer, names: str) -> Snapshot:
    """Copies of p, p32 and all of its state, by name; no state at all is none here."""
    slices = optimizer.get_working_to_master_map()
    held = {}
    for name, p in model.named_parameters():
        if name.startswith(names) and id(p) in slices:
            state = [torch.as_tensor(value) for _, value in sorted(optimizer.state.get(slices[id(p)], {}).items())]
            held[name] = [each.detach().clone() for each in (p, slices[id(p)], *state)]
    return held


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def train_and_watch(rank: int, world_size: int, run: Training, names: str) -> list[Snapshot]:
    model = run.model()
    optimizer = run.wrap(model)
    seen = [snapshot(model, optimizer, names)]
    for step in range(run.steps):
        run.backwards(model, optimizer, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(snapshot(model, optimizer, names))
    return seen


ABSENT = (2, 3)


def test_a_layer_that_nobody_used_stays_bit_for_bit(subtests: pytest.Subtests) -> None:
    def of(world_size: int, stage: str, dtype: torch.dtype) -> Training:
        return Training(
            lambda step, rank: [{1} if step in ABSENT else {rank % 2 * 2}],
            world_size,
            steps=5,
            weight_decay=0.5,
            dtype=dtype,
            options=STAGES[stage],
            kind=ADAMW,
        )

    places = [(1, "stage2"), (2, "stage1"), (3, "stage1-scatter"), (3, "stage2")]
    cases = zip(places, cycle((torch.float32, torch.bfloat16)))
    runs = {f"{size} ranks, {stage}, {dtype}": of(size, stage, dtype) for (size, stage), dtype in cases}
    for name, _, ran in trained(runs, train_and_watch, "layers.1", timeout=TIMEOUT):
        with subtests.test(name):
            for seen in ran.values():
                check_still_when_absent(seen)


def check_still_when_absent(seen: list[Snapshot]) -> None:
    assert set(seen[0]) == {"layers.1.weight", "layers.1.bias"}
    for step, (before, after) in enumerate(pairwise(seen)):
        for name in before:
            assert same_bits(before[name], after[name]) == (step in ABSENT), f"{name} in step {step}"
    steps = [held["layers.1.weight"][-1].item() for held in seen[1:]]
    assert steps == [1, 2, 2, 2, 3]


def test_a_layer_that_was_never_used_has_no_state(subtests: pytest.Subtests) -> None:
    def of(way: str, stage: str) -> Training:
        rounds: Rounds = lambda step, rank: [{2}, {2, rank}]  # noqa: E731
        return Training(rounds, 2, bare=WAYS[way], weight_decay=0.5, options=STAGES[stage])

    runs = {f"{stage}, {way}": of(way, stage) for way, stage in zip(cycle(WAYS), STAGES)}
    for name, _, ran in trained(runs, train_and_watch, "layers.2", timeout=TIMEOUT):
        with subtests.test(name):
            for start, held in ((seen[0], held) for seen in ran.values() for held in seen):
                for key, tensors in held.items():
                    assert len(tensors) == 2, f"{key} has state"
                    assert same_bits(tensors, start[key]), f"{key} moved"


def test_a_layer_that_was_never_used_is_not_in_the_state_dict() -> None:
    def train(rank: int, world_size: int, run: Training) -> tuple[list[int], list[int]]:
        model = run.model()
        optimizer = run.wrap(model)
        run.backwards(model, optimizer, 0, rank)
        optimizer.step()
        order = [p for group in groups(model) for p in group["params"]]
        absent = [at for at, p in enumerate(order) if p is model.layers[2].weight or p is model.layers[2].bias]
        return sorted(optimizer.state_dict()["state"]), absent

    for present, absent in run_ranks(train, 2, Training(lambda step, rank: [{2}]), timeout=TIMEOUT):
        assert len(absent) == 2
        assert present
        assert not set(present) & set(absent)


def test_what_one_rank_used_moves_on_all(subtests: pytest.Subtests) -> None:
    run = Training(lambda step, rank: [set() if rank == 1 else {2}], 3, steps=2, kind=ADAMW)
    for name, _, ran in trained(in_all_stages(run), train_and_watch, "layers.2.weight", timeout=TIMEOUT):
        with subtests.test(name):
            for seen in ran.values():
                for before, after in pairwise(seen):
                    assert not torch.equal(before["layers.2.weight"][0], after["layers.2.weight"][0])
                assert seen[-1]["layers.2.weight"][-1].item() == 2


def test_nobody_used_anything(subtests: pytest.Subtests) -> None:
    run = Training(lambda step, rank: [None], 2, steps=3)
    for name, _, ran in trained(in_all_stages(run), train_and_watch, "", timeout=TIMEOUT):
        with subtests.test(name):
            for start, held in ((seen[0], held) for seen in ran.values() for held in seen):
                assert all(same_bits(tensors, start[key]) for key, tensors in held.items())


# The gradient of one parameter


def gradients_alone(run: Training) -> dict[str, Tensor | None]:
    model = run.model()
    backwards_alone(run, model, 0)
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def gradients_of(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> dict[str, Tensor | None]:
    return {name: optimizer.get_param_grad(p) for name, p in model.named_parameters() if p.requires_grad}


def sharded_gradients(rank: int, world_size: int, run: Training) -> list[dict[str, Tensor | None]]:
    """After the backwards, after the step, and after ``zero_grad``."""
    model = run.model()
    optimizer = run.wrap(model)
    run.backwards(model, optimizer, 0, rank)
    seen = [gradients_of(model, optimizer)]
    optimizer.step()
    seen.append(gradients_of(model, optimizer))
    optimizer.zero_grad()
    return [*seen, gradients_of(model, optimizer)]


def check_gradients(expected: dict[str, Tensor | None], got: dict[str, Tensor | None], tolerance: float) -> None:
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert got[name] is None, f"{name}: nobody had a gradient"
        else:
            torch.testing.assert_close(got[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


PARTLY: Rounds = lambda step, rank: [{1, 2} if rank else {1}, {1, 3}]  # noqa: E731


def test_gradient_of_a_parameter_is_the_oracle_s_or_none(subtests: pytest.Subtests) -> None:
    def of(world_size: int, stage: str, way: str) -> Training:
        return Training(PARTLY, world_size, bare=WAYS[way], options=STAGES[stage])

    cases = covering((2, 3), STAGES, WAYS)
    runs = {f"{size} ranks, {stage}, {way}": of(size, stage, way) for size, stage, way in cases}
    for name, run, ran in trained(runs, sharded_gradients, timeout=TIMEOUT):
        with subtests.test(name):
            expected = gradients_alone(run)
            nobodys = {key for key, gradient in expected.items() if gradient is None}
            assert nobodys == {"empty", "layers.1.weight", "layers.1.bias"}
            for after_backward, after_step, after_zero in ran.values():
                check_gradients(expected, after_backward, 1e-6)
                check_gradients(expected, after_step, 1e-6)
                assert set(after_zero.values()) == {None}


def test_gradient_of_a_sixteen_bit_parameter_is_unscaled_and_in_its_dtype(subtests: pytest.Subtests) -> None:
    def of(stage: str, dtype: torch.dtype) -> Training:
        return Training(PARTLY, 2, dtype=dtype, options={**STAGES[stage], "initial_scale": 256.0})

    cases = product(STAGES, (torch.bfloat16, torch.float16))
    for name, run, ran in trained(
        {f"{stage}, {dtype}": of(stage, dtype) for stage, dtype in cases}, sharded_gradients, timeout=TIMEOUT
    ):
        with subtests.test(name):
            expected = gradients_alone(run)
            for after_backward, _, _ in ran.values():
                assert {g.dtype for g in after_backward.values() if g is not None} == {run.dtype}
                check_gradients(expected, after_backward, 4 * torch.finfo(run.dtype).eps)


def test_gradient_when_one_rank_alone_has_any(subtests: pytest.Subtests) -> None:
    run = Training(lambda step, rank: [{1}] if rank == 1 else [None], 2, bare=True)
    expected = gradients_alone(run)
    for name, _, ran in trained(in_all_stages(run), sharded_gradients, timeout=TIMEOUT):
        with subtests.test(name):
            for after_backward, _, _ in ran.values():
                check_gradients(expected, after_backward, 1e-6)
