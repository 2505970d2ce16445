"""Unused parameters: they stay as they are, don't travel once they are detected, and none that is used is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowlevel_zero import LowLevelZeroOptimizer, unused_parameters
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.unused_parameters import UnusedParameters
from tests.support.covering import covering
from tests.support.internals import with_and_without_detection
from tests.support.numbers import trained
from tests.support.oracle import check_close
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks

STAGES: dict[str, dict[str, Any]] = {"stage1": {}, "stage2": {"partition_grad": True}}
over_stages = pytest.mark.parametrize("stage", STAGES)
CALLS = ("driven", "bare")
LAYERS = 6
TIMEOUT = 30.0


# What is trained


class Hidden(torch.autograd.Function):
    """Runs a layer, and its backward by hand: the outer graph shows none of the layer's parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(x), grad)
        assert x.grad is not None
        return x.grad, None


class Swallowing(torch.autograd.Function):
    """Adds a weight times nothing: it is in the graph, and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def run_layer(layer: nn.Module, x: Tensor, way: str) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return x + torch.tanh(layer(x))

    if way == "hidden":
        out: Tensor = Hidden.apply(x, run)
    elif way == "swallowed":
        out = Swallowing.apply(x, layer.weight)
    elif way == "plain":
        out = run(x)
    else:
        out = checkpoint(run, x, use_reentrant=way == "reentrant")
    return out


class Tower(nn.Module):
    """Residual layers between two others; each may be left out, or run in a way that the graph doesn't show."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor, kept: set[int], way: str = "plain") -> Tensor:
        hidden = self.first(x)
        for place in sorted(kept):
            hidden = run_layer(self.layers[place], hidden, way)
        out: Tensor = self.last(hidden)
        return out


Kept = Callable[[int, int, int], "set[int] | None"]
"""``kept(step, at, rank)``: the layers that a backward of a step goes through, or None: it touches nothing at all."""


@dataclass(frozen=True)
class Training:
    """``backwards`` a step, of which ``call(step, at, rank)`` says how: driven, bare, or driven under no_sync.

    ``to_none``: how gradients are cleared behind each step; ``discarded``: also before the last backward of each.
    """

    kept: Kept
    world_size: int = 2
    steps: int = 5
    backwards: int = 1
    way: Callable[[int, int, int], str] = lambda step, at, rank: "plain"
    call: Callable[[int, int, int], str] = lambda step, at, rank: "driven"
    clip: float = 0.0
    width: int = 6
    to_none: bool = True
    discarded: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def model(self) -> Tower:
        return Tower(self.width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    def loss(self, model: nn.Module, step: int, at: int, rank: int) -> Tensor:
        kept = self.kept(step, at, rank)
        if kept is None:
            return torch.zeros(())
        x = torch.randn(3, self.width, generator=torch.Generator().manual_seed(100 * step + 10 * at + rank))
        loss: Tensor = model(x, kept, self.way(step, at, rank)).square().mean()
        return loss


def alone(run: Training) -> dict[str, Tensor]:
    model = run.model()
    optimizer = run.optimizer(model)
    for step in range(run.steps):
        for at in range(run.backwards):
            if run.discarded and at == run.backwards - 1:
                optimizer.zero_grad(run.to_none)
            for rank in range(run.world_size):
                loss = run.loss(model, step, at, rank) / run.world_size
                if loss.requires_grad:
                    loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(run.to_none)
    return parameters_of(model)


@dataclass
class Seen:
    """A run as one rank of several: parameters at the end, and by step what it did.

    ``reduced`` and ``gathered`` are the buckets' elements, ``messages`` the bytes of what hosts tell each other until
    the step is over, ``detecting`` whether the next step leaves out what nobody uses.
    """

    parameters: dict[str, Tensor]
    reduced: list[list[int]]
    gathered: list[list[int]]
    messages: list[list[int]]
    detecting: list[bool]


def sharded(rank: int, world_size: int, run: Training) -> Seen:
    model = run.model()
    optimizer = wrapped(run, model)
    seen = Seen({}, [], [], [], [])
    for step in range(run.steps):
        with (
            sizes_of("all_reduce", "reduce_scatter") as reduced,
            sizes_of("gather") as gathered,
            sizes_of("start_all_reduce_max") as messages,
        ):
            for at in range(run.backwards):
                if run.discarded and at == run.backwards - 1:
                    optimizer.zero_grad(run.to_none)
                backward(optimizer, run.loss(model, step, at, rank), run.call(step, at, rank))
            optimizer.step()
        optimizer.zero_grad(run.to_none)
        seen.reduced.append(reduced)
        seen.gathered.append(gathered)
        seen.messages.append(messages)
        seen.detecting.append(detection_of(optimizer).detecting)
    seen.parameters = parameters_of(model)
    return seen


def wrapped(run: Training, model: nn.Module) -> LowLevelZeroOptimizer:
    options = {"reduce_bucket_size": 1, "clip_grad_norm": run.clip, **run.options}
    optimizer = LowLevelZeroOptimizer(run.optimizer(model), model=model, **options)
    return optimizer


def backward(optimizer: LowLevelZeroOptimizer, loss: Tensor, call: str) -> None:
    if call == "driven":
        optimizer.backward(loss)
    elif call == "no_sync":
        with optimizer.no_sync():
            optimizer.backward(loss)
    elif loss.requires_grad:
        loss.backward()


def detection_of(optimizer: LowLevelZeroOptimizer) -> UnusedParameters:
    return optimizer.sharded_groups[0].reducer._unused


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@contextmanager
def sizes_of(*names: str) -> Iterator[list[int]]:
    """The elements of all that goes through one of the group's collectives."""
    sizes: list[int] = []

    def counting(collective: Any) -> Any:
        def count(group: ShardGroup, *args: Any) -> Any:
            rows = args[0] if isinstance(args[0], Tensor) else args[1]  # of a buffer, or those to be gathered
            sizes.append(sum(part.numel() for part in rows))
            return collective(group, *args)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(ShardGroup, name, counting(getattr(ShardGroup, name)))
        yield sizes


def check(run: Training, tolerance: float = 2e-6) -> list[Seen]:
    """The oracle's numbers on all ranks, which detect unused parameters at the same steps."""
    return judge(run, run_ranks(sharded, run.world_size, run, timeout=TIMEOUT), tolerance)


def judge(run: Training, ranks: list[Seen], tolerance: float = 2e-6) -> list[Seen]:
    check_close(alone(run), [seen.parameters for seen in ranks], tolerance)
    assert all(seen.detecting == ranks[0].detecting for seen in ranks)
    return ranks


def check_each(runs: Mapping[str, Training], subtests: pytest.Subtests, tolerance: float = 2e-6) -> None:
    for name, run, ran in trained(runs, sharded, timeout=TIMEOUT):
        with subtests.test(name):
            judge(run, ran.values(), tolerance)


def everything(step: int, at: int, rank: int) -> set[int]:
    return set(range(LAYERS))


def draw(*numbers: int) -> random.Random:
    return random.Random(" ".join(map(str, numbers)))


def random_kept(seed: int, nothing: float = 0.0) -> Kept:
    def kept(step: int, at: int, rank: int) -> set[int] | None:
        rng = draw(seed, step, at, rank)
        return None if rng.random() < nothing else {place for place in range(LAYERS) if rng.random() < 0.5}

    return kept


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


@over_stages
def test_buckets_behind_a_dropped_layer_start_in_the_midst_of_backward(stage: str) -> None:
    def train(rank: int, world_size: int, always_whole: bool) -> list[list[str]]:
        model = Tower()
        events: list[str] = []
        model.first.weight.register_post_accumulate_grad_hook(lambda p: events.append("the last gradient"))
        optimizer = LowLevelZeroOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model=model, reduce_bucket_size=1, **STAGES[stage]
        )
        by_step = []
        for _ in range(3):
            events.clear()
            if always_whole:
                patch_rank(detection_of(optimizer), "detecting", False)
            with pytest.MonkeyPatch.context() as patch:
                for name in ("all_reduce", "reduce_scatter"):
                    patch.setattr(ShardGroup, name, telling(getattr(ShardGroup, name), events))
                optimizer.backward(model(torch.ones(2, 6), {0, 1, 4}).square().mean())
            by_step.append(list(events))
            optimizer.step()
            optimizer.zero_grad()
        return by_step

    def telling(collective: Any, events: list[str]) -> Any:
        return lambda group, *args: events.append("bucket") or collective(group, *args)

    early = {
        whole: [events.index("the last gradient") for events in run_ranks(train, 1, whole)[0]]
        for whole in (True, False)
    }
    all_but_one = 2 * (2 + 3) - 1  # weights and biases of the first, the last and three layers
    assert early[False][1:] == [all_but_one, all_but_one]
    assert max(early[True]) < all_but_one


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


def in_stages(run: Training) -> dict[str, Training]:
    return {stage: replace(run, options=own) for stage, own in STAGES.items()}


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


# What the graph doesn't show


WAYS = ["reentrant", "non-reentrant", "hidden", "swallowed"]


def test_what_the_graph_hides_or_shows_in_vain(forecasting: None, subtests: pytest.Subtests) -> None:
    def of(way: str) -> Training:
        return Training(random_kept(1), 2, way=lambda *_: way)

    runs = {f"{way}, {where}": run for way in WAYS for where, run in in_stages(of(way)).items()}
    check_each(runs, subtests)


def test_ways_that_change_by_rank_and_step(subtests: pytest.Subtests) -> None:
    def way(step: int, at: int, rank: int) -> str:
        return draw(7, step, at, rank).choice([*WAYS, "plain"])

    def of(stage: str, world_size: int, backwards: int) -> Training:
        return Training(random_kept(2), world_size, backwards=backwards, way=way, options=STAGES[stage])

    cases = covering(STAGES, (2, 3), (1, 3))
    runs = {
        f"{stage}, {size} ranks, {backwards} backwards": of(stage, size, backwards) for stage, size, backwards in cases
    }
    check_each(runs, subtests, 5e-6)


@pytest.mark.parametrize("way", ["reentrant", "hidden"])
def test_what_came_unforeseen_is_foreseen_from_then_on(way: str, forecasting: None) -> None:
    """The first step needs one more sync, of what had been left out alone; the others don't."""
    seen, _ = check(Training(lambda *_: {1, 3}, steps=3, way=lambda *_: way))
    assert [len(messages) for messages in seen.messages] == [3, 2, 2]
    first, *others = seen.reduced
    assert others[0] == others[1]
    assert sorted(first) == sorted(others[0])


def test_a_gradient_that_only_one_rank_has_unforeseen_is_reduced_on_all(forecasting: None) -> None:
    check(Training(lambda *_: {1, 3}, 3, steps=4, way=lambda step, at, rank: "hidden" if rank == 1 else "plain"))


def test_what_is_shown_in_vain_stays_bit_for_bit(forecasting: None) -> None:
    seen, _ = check(Training(lambda *_: {1, 3}, steps=3, way=lambda *_: "swallowed"))
    start = Tower().state_dict()
    for place in (1, 3):
        assert torch.equal(seen.parameters[f"layers.{place}.weight"], start[f"layers.{place}.weight"])
    assert not torch.equal(seen.parameters["first.weight"], start["first.weight"])


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


# The walk


def reached(loss: Tensor, model: nn.Module, inputs: Any = None) -> set[str]:
    """Names of what a walk through the graph finds."""
    found: set[str] = set()

    def look(rank: int, world_size: int) -> set[str]:
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        indices = detection_of(optimizer).reached(loss, inputs)
        return {record.name for record in optimizer.sharded_parameters if record.index in indices}

    (found,) = run_ranks(look, 1)
    return found


def test_the_walk_finds_what_backward_would_give_a_gradient() -> None:
    model = Tower()
    loss = model(torch.ones(2, 6), {1, 4}, "non-reentrant").square().mean() + model.layers[2].bias[0]
    used = {f"{name}.{kind}" for name in ("first", "layers.1", "layers.4", "last") for kind in ("weight", "bias")}
    assert reached(loss, model) == used | {"layers.2.bias"}
    assert reached(loss, model, model.first.bias) == {"first.bias"}
    assert reached(loss, model, [model.layers[2].bias, model.layers[3].bias]) == {"layers.2.bias"}


def test_a_loss_that_is_a_parameter_and_one_that_is_nothing() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    assert reached(model.scale, model) == {"scale"}
    assert reached(torch.zeros(()), model) == set()
