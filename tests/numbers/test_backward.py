"""Whatever may happen between two steps: the same script in plain torch and on ranks must end alike."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.gradients.sharded_gradient import ShardedGradient
from tests.support.covering import covering
from tests.support.internals import with_and_without_detection
from tests.support.numbers import trained
from tests.support.oracle import check_close, worst
from tests.support.ranks import run_cases, run_cases_expecting, run_ranks, run_ranks_expecting

STAGES: dict[str, dict[str, Any]] = {"stage1": {}, "stage2": {"partition_grad": True}}
WAYS: dict[str, dict[str, Any]] = {"bare": {"bare": True}, "driven": {"bare": False}}
BOTH: dict[str, dict[str, Any]] = {
    f"{stage}, {way}": {**STAGES[stage], **WAYS[way]} for stage, way in product(STAGES, WAYS)
}


def in_both(names: Iterable[Any]) -> list[tuple[Any, str]]:
    """Each with both stages, and with both ways to run backwards."""
    return [(name, f"{stage}, {way}") for name, stage, way in covering(names, STAGES, WAYS)]


TIMEOUT = 20.0


class Alone:
    """One process that does every rank's share, with plain torch."""

    def __init__(self, world_size: int, clip: float = 0.0) -> None:
        self.ranks = range(world_size)
        self.clip = clip

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        return optimizer

    def mean(self, of: Callable[[int], Any]) -> Any:
        """A loss, or a tuple of losses, averaged over the ranks."""
        shares = [of(rank) for rank in self.ranks]
        if isinstance(shares[0], tuple):
            return tuple(torch.stack(each).mean(0) for each in zip(*shares, strict=True))
        return torch.stack(shares).mean(0)

    def backward(self, optimizer: Any, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def step(self, optimizer: Any) -> None:
        if self.clip > 0:
            members = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(members, self.clip)
        optimizer.step()

    def no_sync(self, optimizer: Any) -> Any:
        return nullcontext()


class Mistaken(Alone):
    """Leaves the last rank out of every sum; where there is only one, counts it twice."""

    def mean(self, of: Callable[[int], Any]) -> Any:
        shares = [of(rank) for rank in self.ranks]
        counted = shares[:-1] or shares * 2
        if isinstance(shares[0], tuple):
            return tuple(torch.stack(each).sum(0) / len(shares) for each in zip(*counted, strict=True))
        return torch.stack(counted).sum(0) / len(shares)


class Together(Alone):
    """One rank of several."""

    def __init__(self, rank: int, clip: float = 0.0, bare: bool = False, **options: Any) -> None:
        self.rank = rank
        self.bare = bare
        self.options = {"reduce_bucket_size": 1, "clip_grad_norm": clip, **options}

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        return LowLevelZeroOptimizer(optimizer, model=model, **self.options)

    def mean(self, of: Callable[[int], Any]) -> Any:
        return of(self.rank)

    def backward(self, optimizer: Any, loss: Tensor, **options: Any) -> None:
        if self.bare:
            loss.backward(**options)
        else:
            optimizer.backward(loss, **options)

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def no_sync(self, optimizer: Any) -> Any:
        return optimizer.no_sync()


Script = Callable[[Alone], nn.Module]
"""Trains with whichever side it is given, and returns the model."""


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Case(NamedTuple):
    """A script for so many ranks, with options of ``Together``."""

    script: Script
    options: dict[str, Any]
    world_size: int = 2


def check_each(cases: Mapping[str, Case], subtests: pytest.Subtests) -> None:
    """``check`` of each."""
    for name, case, ran in trained(cases, train_both, timeout=TIMEOUT):
        with subtests.test(name):
            judge(case, ran.values())


def check(script: Script, world_size: int = 2, **options: Any) -> None:
    """The numbers of one process, whether the ranks find out beforehand what a backward will use or not."""
    case = Case(script, options, world_size)
    judge(case, run_ranks(train_both, world_size, case, timeout=TIMEOUT))


@with_and_without_detection
def train_both(rank: int, world_size: int, case: Case) -> dict[str, Tensor]:
    return parameters_of(case.script(Together(rank, **case.options)))


def judge(case: Case, got: list[tuple[dict[str, Tensor], ...]], tolerance: float = 2e-6) -> None:
    clip = case.options.get("clip", 0.0)
    expected = parameters_of(case.script(Alone(case.world_size, clip)))
    for ranks in zip(*got, strict=True):
        check_close(expected, ranks, tolerance)
    mistaken = parameters_of(case.script(Mistaken(case.world_size, clip)))
    assert worst(expected, mistaken)[0] > 100 * tolerance, "a mistake would pass"


def net(seed: int = 0, layers: int = 4, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def data(step: int, rank: int, width: int = 5) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_at(model: nn.Module, step: int) -> Callable[[int], Tensor]:
    def loss(rank: int) -> Tensor:
        out: Tensor = model(data(step, rank)).square().mean()
        return out

    return loss


# Activation checkpointing

# Of a reentrant segment in another: the outer one's forward runs without gradients.
nested_warns = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


class Recomputed(nn.Module):
    """Two recomputed segments that share a weight, a plain layer between them, and one at each end."""

    def __init__(self, reentrant: bool, nested: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.nested = reentrant, nested
        self.first, self.shared, self.middle, self.other, self.last = (nn.Linear(5, 5) for _ in range(5))

    def segment(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.shared(x))
        if self.nested:
            return x + self.recompute(lambda y: torch.tanh(self.other(y)), hidden)
        return x + torch.tanh(self.other(hidden))

    def recompute(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out: Tensor = checkpoint(run, x, use_reentrant=self.reentrant)
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.recompute(self.segment, self.first(x))
        x = self.recompute(self.segment, self.middle(x))
        out: Tensor = self.last(x)
        return out


class AllRecomputed(Recomputed):
    """The whole model is one segment: the outer graph holds none of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return self.recompute(super().forward, x.requires_grad_())


def train_recomputed(kind: type[Recomputed], reentrant: bool, nested: bool = False, micro_batches: int = 1) -> Script:
    def script(side: Alone) -> nn.Module:
        model = kind(reentrant, nested)
        optimizer = side.wrap(momentum(model), model)
        for step in range(4):
            for micro in range(micro_batches):
                side.backward(optimizer, side.mean(loss_at(model, 7 * step + micro)))
            side.step(optimizer)
            optimizer.zero_grad()
        return model

    return script


SEGMENTS = {
    "reentrant, flat": train_recomputed(Recomputed, True),
    "reentrant, nested": train_recomputed(Recomputed, True, nested=True),
    "non-reentrant, flat": train_recomputed(Recomputed, False),
    "non-reentrant, nested": train_recomputed(Recomputed, False, nested=True),
}


@nested_warns
def test_checkpointing_with_a_weight_shared_by_segments(subtests: pytest.Subtests) -> None:
    check_each({f"{kind}, {way}": Case(SEGMENTS[kind], BOTH[way]) for kind, way in in_both(SEGMENTS)}, subtests)


def test_checkpointing_on_other_world_sizes(subtests: pytest.Subtests) -> None:
    def of(way: str, world_size: int) -> Case:
        return Case(train_recomputed(Recomputed, True), {"partition_grad": True, **WAYS[way]}, world_size)

    check_each({f"{size} ranks, {way}": of(way, size) for size, way in product((1, 3), WAYS)}, subtests)


@nested_warns
def test_checkpointing_over_several_micro_batches(subtests: pytest.Subtests) -> None:
    def of(kind: type[Recomputed], way: str) -> Case:
        return Case(train_recomputed(kind, True, micro_batches=2), BOTH[way])

    kinds = (Recomputed, AllRecomputed)
    check_each({f"{kind.__name__}, {way}": of(kind, way) for kind, way in in_both(kinds)}, subtests)


def test_checkpointing_without_overlap() -> None:
    check(train_recomputed(Recomputed, True), 2, overlap_communication=False)


def test_a_shared_weight_does_arrive_late_once_and_is_waited_for_from_then_on() -> None:
    """What the tests above are about: without a further round its second gradient would have been lost."""

    def count(rank: int, world_size: int) -> tuple[int, list[int]]:
        model = Recomputed(reentrant=True, nested=False)
        arrivals = 0

        def arrive(p: Tensor) -> None:
            nonlocal arrivals
            arrivals += 1

        model.shared.weight.register_post_accumulate_grad_hook(arrive)
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model, reduce_bucket_size=1)
        reductions = []
        for step in range(3):
            with counted("all_reduce") as calls:
                optimizer.backward(loss_at(model, step)(rank))
                optimizer.step()
            reductions.append(len(calls))
            optimizer.zero_grad()
        return arrivals, reductions

    for arrivals, (first, *later) in run_ranks(count, 2):
        assert arrivals == 2 * 3
        assert later[0] == later[1] < first


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_come_with_a_graph_are_reduced_without_it(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, stage: str, bucket_size: int) -> tuple[list[bool], list[float]]:
        bias, weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))
        optimizer = LowLevelZeroOptimizer(
            torch.optim.SGD([bias, weight], lr=1.0), reduce_bucket_size=bucket_size, **STAGES[stage]
        )
        (((bias**3).sum() + (weight**3).sum()) * (rank + 1)).backward(create_graph=True)
        (group,) = optimizer.sharded_groups
        hangs = [held.requires_grad for held in (*group.gradients.held(), *group.reducer.held())]
        optimizer.step()
        return hangs, [*bias.tolist(), *weight.flatten().tolist()]

    in_place, packed = 1, 100
    for (stage, bucket_size), ran in run_cases(train, 2, product(STAGES, (in_place, packed)), one_group=True):
        with subtests.test(stage=stage, bucket_size=bucket_size):
            for hangs, values in ran.values():
                assert hangs
                assert not any(hangs)
                assert values == [1 - 3 * 1.5] * 8


@nested_warns
def test_a_late_gradient_of_one_rank_is_reduced(subtests: pytest.Subtests) -> None:
    """The other takes no segment."""

    def train(rank: int, world_size: int, stage: str, nested: bool) -> dict[str, Tensor]:
        model = Recomputed(True, nested)
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model, reduce_bucket_size=1, **STAGES[stage])
        for step in range(4):
            model.reentrant = rank == 0
            optimizer.backward(loss_at(model, 7 * step)(rank))
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    for (stage, nested), ran in run_cases(train, 2, product(STAGES, (False, True)), timeout=TIMEOUT, one_group=True):
        with subtests.test(stage=stage, nested=nested):
            expected = parameters_of(train_recomputed(Recomputed, True, nested)(Alone(2)))
            check_close(expected, ran.values(), 2e-6)


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """The sizes of the wires that go through one of the group's collectives."""
    calls: list[int] = []
    collective = getattr(ShardGroup, name)

    def counting(group: ShardGroup, wire: Tensor, *how: Any) -> Any:
        calls.append(wire.numel())
        return collective(group, wire, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardGroup, name, counting)
        yield calls


# Several backwards, and their options


def two_losses(side: Alone) -> nn.Module:
    """They share a trunk, and one of the heads each."""
    model = net()
    optimizer = side.wrap(momentum(model), model)

    def losses(step: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        def both(rank: int) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(model[0](data(step, rank)))
            return model[1](hidden).square().mean(), model[2](hidden).abs().mean()

        return both

    for step in range(4):
        one, other = side.mean(losses(step))
        side.backward(optimizer, one, retain_graph=True)
        side.backward(optimizer, other)
        side.step(optimizer)
        optimizer.zero_grad()
    return model


def same_loss_twice(side: Alone) -> nn.Module:
    model = net()
    optimizer = side.wrap(momentum(model), model)
    for step in range(3):
        loss = side.mean(loss_at(model, step))
        side.backward(optimizer, loss, retain_graph=True)
        side.backward(optimizer, loss)
        side.step(optimizer)
        optimizer.zero_grad()
    return model


def some_inputs(side: Alone) -> nn.Module:
    model = net()
    optimizer = side.wrap(momentum(model), model)
    for step in range(3):
        side.backward(optimizer, side.mean(loss_at(model, step)), inputs=[model[1].weight, model[3].bias])
        side.backward(optimizer, side.mean(loss_at(model, step + 10)), inputs=[model[0].weight])
        side.step(optimizer)
        optimizer.zero_grad()
    return model


def test_several_backwards_before_a_step(subtests: pytest.Subtests) -> None:
    scripts = {"two losses": two_losses, "same loss twice": same_loss_twice, "some inputs": some_inputs}
    check_each({f"{name}, {way}": Case(scripts[name], BOTH[way], 3) for name, way in in_both(scripts)}, subtests)


def test_backward_by_grad(subtests: pytest.Subtests) -> None:
    """Two stages of a pipeline: the second sends its input's gradient back to the first."""

    def script(side: Alone) -> nn.Module:
        model = net(layers=2)
        if not isinstance(side, Together):
            optimizer = momentum(model)
            for step in range(3):
                side.mean(loss_at(model, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return model
        front = side.wrap(momentum(model[0]), model)
        back = side.wrap(momentum(model[1]), model)
        for step in range(3):
            sent = model[0](data(step, side.rank))
            received = sent.detach().requires_grad_()
            back.backward(model[1](received).square().mean())
            front.backward_by_grad(sent, received.grad)
            for optimizer in (front, back):
                optimizer.step()
                optimizer.zero_grad()
        return model

    check_each({stage: Case(script, options) for stage, options in STAGES.items()}, subtests)


def test_backward_by_grad_of_a_scaled_model() -> None:
    def train(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        results = []
        for by_grad in (True, False):
            model = net(layers=1).half()
            optimizer = LowLevelZeroOptimizer(momentum(model), model=model, initial_scale=64.0)
            out = model(data(0, rank).half()).float().sum()
            if by_grad:
                optimizer.backward_by_grad(out, torch.tensor(optimizer.loss_scale))
            else:
                optimizer.backward(out)
            optimizer.step()
            results.append(model[0].weight.detach().clone())
        return results[0], results[1]

    for by_grad, by_loss in run_ranks(train, 2):
        assert torch.equal(by_grad, by_loss)
        assert not torch.equal(by_loss, net(layers=1).half()[0].weight)


def test_backward_context_surrounds_backward() -> None:
    def train(rank: int, world_size: int) -> list[str]:
        seen: list[str] = []

        @contextmanager
        def context() -> Iterator[None]:
            seen.append("in")
            yield
            seen.append("out")

        model = net()
        model[0].weight.register_hook(lambda grad: seen.append("backward"))
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model, backward_context=context)
        optimizer.backward(loss_at(model, 0)(rank))
        return seen

    assert run_ranks(train, 1) == [["in", "backward", "out"]]


def test_a_loss_of_nothing_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def train(rank: int, world_size: int) -> list[str]:
        logger, messages = logging.getLogger("lowlevel_zero"), []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        model = net()
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
        for _ in range(3):
            optimizer.backward(torch.zeros(()))
            optimizer.step()
        return messages

    (messages,) = run_ranks(train, 1)
    assert len(messages) == 1
    assert "doesn't require grad" in messages[0]


class Summed(nn.Module):
    """Two parameters whose gradients autograd keeps in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.one.view(-1) + self.other.view(-1)) * x


def test_gradients_that_share_memory_are_each_reduced_once(subtests: pytest.Subtests) -> None:
    def script(side: Alone) -> nn.Module:
        model = Summed()
        optimizer = side.wrap(momentum(model), model)
        for _ in range(3):
            side.backward(optimizer, side.mean(lambda rank: model(torch.arange(24.0) * (rank + 1)).sum()))
            side.step(optimizer)
            optimizer.zero_grad()
        return model

    model = Summed()
    model(torch.arange(24.0)).sum().backward()
    assert model.one.grad is not None
    assert model.other.grad is not None
    assert model.one.grad.data_ptr() == model.other.grad.data_ptr()  # else the test is none
    check_each({f"{size} ranks, {way}": Case(script, BOTH[way], size) for size, way in in_both((2, 3))}, subtests)


# Where gradients are


def test_gradients_leave_with_backward_and_stay_under_no_sync(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, way: str) -> tuple[list[bool], bool]:
        model = net()
        side = Together(rank, **BOTH[way])
        optimizer = side.wrap(momentum(model), model)
        with optimizer.no_sync():
            for step in range(2):
                side.backward(optimizer, loss_at(model, step)(rank))
        kept = {name: p.grad for name, p in model.named_parameters()}
        twin = net()
        for step in range(2):
            loss_at(twin, step)(rank).backward()
        intact = all(torch.equal(p.grad, kept[name]) for name, p in twin.named_parameters())  # type: ignore[arg-type]
        side.backward(optimizer, loss_at(model, 2)(rank))
        gone = [isinstance(p.grad, ShardedGradient) for p in model.parameters()]
        optimizer.zero_grad()
        return gone, intact

    for (way,), ran in run_cases(train, 2, [(way,) for way in BOTH]):
        with subtests.test(way):
            assert ran.values() == [([True] * 8, True)] * 2


def test_a_step_under_no_sync_does_nothing() -> None:
    def train(rank: int, world_size: int) -> bool:
        model = net()
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
        with optimizer.no_sync():
            optimizer.backward(loss_at(model, 0)(rank))
            optimizer.step()
        return all(torch.equal(p, q) for p, q in zip(model.parameters(), net().parameters(), strict=True))

    assert run_ranks(train, 2) == [True, True]


def test_gradients_left_by_no_sync_count_in_the_step(subtests: pytest.Subtests) -> None:
    """Also where no synchronising backward follows, or one that doesn't touch them."""

    def script(side: Alone) -> nn.Module:
        model = net()
        optimizer = side.wrap(momentum(model), model)
        for step in range(3):
            with side.no_sync(optimizer):
                side.backward(optimizer, side.mean(loss_at(model, step)))
            if step == 1:
                side.backward(optimizer, side.mean(loss_at(model[:2], step + 10)))
            side.step(optimizer)
            optimizer.zero_grad()
        return model

    check_each({way: Case(script, options, 3) for way, options in BOTH.items()}, subtests)


# A GAN


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = net(1, layers=2), net(2, layers=2)

    def critic_loss(self, step: int) -> Callable[[int], Tensor]:
        def loss(rank: int) -> Tensor:
            fake = self.generator(data(step, rank)).detach()
            return (self.critic(fake).square() - self.critic(data(step + 5, rank)).tanh()).mean()

        return loss

    def generator_loss(self, step: int) -> Callable[[int], Tensor]:
        def loss(rank: int) -> Tensor:
            return -self.critic(self.generator(data(step, rank))).square().mean()

        return loss


class Gan:
    """The moves of both players, on either side."""

    def __init__(self, side: Alone) -> None:
        self.side = side
        self.model = Adversaries()
        self.g = side.wrap(adamw(self.model.generator), self.model)
        self.d = side.wrap(momentum(self.model.critic), self.model)

    def d_backward(self, step: int) -> None:
        self.side.backward(self.d, self.side.mean(self.model.critic_loss(step)))

    def g_backward(self, step: int) -> None:
        self.side.backward(self.g, self.side.mean(self.model.generator_loss(step)))


def gan_classic(gan: Gan, step: int) -> None:
    gan.d.zero_grad()
    gan.d_backward(step)
    gan.d.step()
    gan.g.zero_grad()
    gan.g_backward(step)
    gan.g.step()


def gan_zero_after_steps(gan: Gan, step: int) -> None:
    gan.d_backward(step)
    gan.d.step()
    gan.d.zero_grad()
    gan.g_backward(step)
    gan.g.step()
    gan.g.zero_grad()
    gan.d.zero_grad()


def gan_generator_between(gan: Gan, step: int) -> None:
    """The critic steps with what the generator's loss has left in it, too."""
    gan.d.zero_grad()
    gan.g.zero_grad()
    gan.d_backward(step)
    gan.g_backward(step)
    gan.d.step()
    gan.g.step()


def gan_generator_first(gan: Gan, step: int) -> None:
    gan.g.zero_grad()
    gan.g_backward(step)
    gan.g.step()
    gan.d.zero_grad()
    gan.d_backward(step)
    gan.d.step()


def gan_zero_late(gan: Gan, step: int) -> None:
    """What the generator's loss left in the critic meets the critic's own, after the generator's zero_grad."""
    gan.g_backward(step)
    gan.g.step()
    gan.g.zero_grad()
    gan.d_backward(step)
    gan.d.step()
    gan.d.zero_grad()


def gan_zero_between_backward_and_step(gan: Gan, step: int) -> None:
    gan.d_backward(step)
    gan.g.zero_grad()
    gan.g_backward(step)
    gan.d.zero_grad()
    gan.d_backward(step + 1)
    gan.d.step()
    gan.g.step()
    gan.d.zero_grad()
    gan.g.zero_grad()


def gan_never_zero(gan: Gan, step: int) -> None:
    gan.d_backward(step)
    gan.d.step()
    gan.g_backward(step)
    gan.g.step()


GANS = [
    gan_classic,
    gan_zero_after_steps,
    gan_generator_between,
    gan_generator_first,
    gan_zero_late,
    gan_zero_between_backward_and_step,
    gan_never_zero,
]


def test_gan(subtests: pytest.Subtests) -> None:
    def script_of(moves: Callable[[Gan, int], None]) -> Script:
        def script(side: Alone) -> nn.Module:
            gan = Gan(side)
            for step in range(3):
                moves(gan, step)
            gan.g.zero_grad()
            gan.d.zero_grad()
            return gan.model

        return script

    check_each(
        {f"{moves.__name__}, {way}": Case(script_of(moves), BOTH[way]) for moves, way in in_both(GANS)}, subtests
    )


# Two optimizers over halves of one model


def halves(drop: Callable[[int], Sequence[int]], drive: str = "first") -> Script:
    """One loss for both; each rank may leave layers out."""

    def script(side: Alone) -> nn.Module:
        model = net(layers=6)
        low, high = side.wrap(momentum(model[:3]), model), side.wrap(adamw(model[3:]), model)

        def loss(step: int) -> Callable[[int], Tensor]:
            def of(rank: int) -> Tensor:
                hidden = data(step, rank).requires_grad_()
                for place, layer in enumerate(model):
                    hidden = hidden if place in drop(rank) else torch.tanh(layer(hidden))
                return hidden.square().mean()

            return of

        for step in range(3):
            side.backward(low if drive == "first" else high, side.mean(loss(step)))
            for optimizer in (low, high):
                side.step(optimizer)
                optimizer.zero_grad()
        return model

    return script


HALVES: dict[str, Callable[[int], Sequence[int]]] = {
    "nothing": lambda rank: (),
    "same": lambda rank: (1, 4),
    "different": lambda rank: (rank, 5 - rank),
    "upper-half-on-one": lambda rank: (3, 4, 5) if rank == 1 else (),
    "lower-half-on-one": lambda rank: (0, 1, 2) if rank == 0 else (),
    "either-half": lambda rank: (0, 1, 2) if rank == 0 else (3, 4, 5),
}


def test_two_optimizers_over_halves_of_a_model(subtests: pytest.Subtests) -> None:
    def of(drop: str, drive: str) -> Case:
        return Case(halves(HALVES[drop], drive), {"bare": drive == "bare", "partition_grad": True})

    drives = ("first", "second", "bare")
    check_each({f"{drop}, {drive}": of(drop, drive) for drop, drive in product(HALVES, drives)}, subtests)


def test_two_optimizers_in_stage_1_on_three_ranks(subtests: pytest.Subtests) -> None:
    drops = ("nothing", "upper-half-on-one")
    check_each({drop: Case(halves(HALVES[drop]), {"bare": True}, 3) for drop in drops}, subtests)


# zero_grad and step, anywhere


def zero_first(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    optimizer.zero_grad(to_none)
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    side.step(optimizer)


def zero_between_backward_and_step(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    side.step(optimizer)
    optimizer.zero_grad(to_none)
    side.backward(optimizer, side.mean(loss_at(model, 1)))
    optimizer.zero_grad(to_none)
    side.step(optimizer)  # to zeros: momentum and decay still move what had a gradient
    side.backward(optimizer, side.mean(loss_at(model, 2)))
    side.step(optimizer)


def zero_amid_accumulation(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    optimizer.zero_grad(to_none)
    side.backward(optimizer, side.mean(loss_at(model, 1)))
    side.backward(optimizer, side.mean(loss_at(model, 2)))
    side.step(optimizer)


def zero_amid_no_sync(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    with side.no_sync(optimizer):
        side.backward(optimizer, side.mean(loss_at(model, 0)))
    optimizer.zero_grad(to_none)
    with side.no_sync(optimizer):
        side.backward(optimizer, side.mean(loss_at(model, 1)))
    side.backward(optimizer, side.mean(loss_at(model, 2)))
    side.step(optimizer)


def zero_after_part_was_used(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    """What never had a gradient isn't stepped, whatever became of the others'."""
    for step in range(3):
        side.backward(optimizer, side.mean(loss_at(model[:2], step)))  # type: ignore[index]
        side.step(optimizer)
        optimizer.zero_grad(to_none)
        side.step(optimizer)


def zero_twice(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    optimizer.zero_grad(not to_none)
    optimizer.zero_grad(to_none)
    side.backward(optimizer, side.mean(loss_at(model, 1)))
    side.step(optimizer)


def step_without_gradients(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    side.step(optimizer)
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    side.step(optimizer)
    optimizer.zero_grad(to_none)
    side.step(optimizer)
    side.step(optimizer)


def step_twice(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    side.backward(optimizer, side.mean(loss_at(model, 0)))
    side.step(optimizer)
    side.step(optimizer)
    optimizer.zero_grad(to_none)
    side.backward(optimizer, side.mean(loss_at(model, 1)))
    side.step(optimizer)


def gradients_stay_over_steps(side: Alone, model: nn.Module, optimizer: Any, to_none: bool) -> None:
    for step in range(4):
        side.backward(optimizer, side.mean(loss_at(model if step % 2 else model[:2], step)))  # type: ignore[index]
        side.step(optimizer)
        if step == 2:
            optimizer.zero_grad(to_none)


Moves = Callable[[Alone, nn.Module, Any, bool], None]

ANYWHERE: list[Moves] = [
    zero_first,
    zero_between_backward_and_step,
    zero_amid_accumulation,
    zero_amid_no_sync,
    zero_after_part_was_used,
    zero_twice,
    step_without_gradients,
    step_twice,
    gradients_stay_over_steps,
]


def test_zero_grad_and_step_anywhere(subtests: pytest.Subtests) -> None:
    def script_of(moves: Moves, to_none: bool) -> Script:
        def script(side: Alone) -> nn.Module:
            model = net()
            optimizer = side.wrap(momentum(model), model)
            moves(side, model, optimizer, to_none)
            optimizer.zero_grad()
            side.backward(optimizer, side.mean(loss_at(model, 9)))
            side.step(optimizer)
            return model

        return script

    cases = covering(ANYWHERE, STAGES, WAYS, (True, False))
    check_each(
        {
            f"{moves.__name__}, {stage}, {way}, {'to none' if to_none else 'to zeros'}": Case(
                script_of(moves, to_none), {**STAGES[stage], **WAYS[way]}
            )
            for moves, stage, way, to_none in cases
        },
        subtests,
    )


def test_gradients_stay_as_clipped(subtests: pytest.Subtests) -> None:
    """Clipping changes gradients in place, as torch's does; also those that no zero_grad has cleared since."""

    def script_of(moves: Moves) -> Script:
        def script(side: Alone) -> nn.Module:
            model = net()
            optimizer = side.wrap(momentum(model), model)
            moves(side, model, optimizer, True)
            return model

        return script

    def of(moves: Moves, stage: str) -> Case:
        return Case(script_of(moves), {"clip": 0.1, **STAGES[stage]}, 3)

    cases = product((step_twice, gradients_stay_over_steps), STAGES)
    check_each({f"{moves.__name__}, {stage}": of(moves, stage) for moves, stage in cases}, subtests)


# An exception in backward


class BackwardFailed(Exception):
    pass


def test_training_goes_on_after_an_exception_in_backward(subtests: pytest.Subtests) -> None:
    def script(side: Alone) -> nn.Module:
        model = net()
        optimizer = side.wrap(momentum(model), model)
        for step in range(4):
            if step == 1:
                broken = side.mean(lambda rank: model[2:](failing(model[:2](data(1, rank)))).square().mean())
                with pytest.raises(BackwardFailed):
                    side.backward(optimizer, broken)
                optimizer.zero_grad()
            side.backward(optimizer, side.mean(loss_at(model, step)))
            side.step(optimizer)
            optimizer.zero_grad()
        return model

    check_each({way: Case(script, options) for way, options in BOTH.items()}, subtests)


def failing(x: Tensor) -> Tensor:
    """``x``, whose gradient can't be computed: some of the model's are there by then."""

    def fail(grad: Tensor) -> None:
        raise BackwardFailed

    x.register_hook(fail)
    return x


# Optimizer manners


def test_a_closure_is_run_with_gradients_and_its_loss_returned(subtests: pytest.Subtests) -> None:
    def script(side: Alone) -> nn.Module:
        model = net()
        optimizer = side.wrap(momentum(model), model)
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = side.mean(loss_at(model, step))
                side.backward(optimizer, loss)
                return loss.detach()

            with torch.no_grad():
                before = side.mean(loss_at(model, step))
                assert torch.equal(optimizer.step(closure), before)
        return model

    check_each({way: Case(script, options) for way, options in WAYS.items()}, subtests)


EITHER = ("wrapper", "inner")


def test_step_hooks_run_once_a_step(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, on: str) -> list[str]:
        model = net()
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
        hooked = optimizer if on == "wrapper" else optimizer.optim
        seen: list[str] = []
        hooked.register_step_pre_hook(lambda *_: seen.append("pre"))
        hooked.register_step_post_hook(lambda *_: seen.append("post"))
        for step in range(3):
            optimizer.backward(loss_at(model, step)(rank))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    for (on,), ran in run_cases(train, 2, [(on,) for on in EITHER], one_group=True):
        with subtests.test(on):
            assert ran.values() == [["pre", "post"] * 3] * 2


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "warmup": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
}


def test_a_scheduler_works_on_either(subtests: pytest.Subtests) -> None:
    def script_of(schedule: Callable[[Any], Any], on: str) -> Script:
        def script(side: Alone) -> nn.Module:
            model = net()
            optimizer = side.wrap(momentum(model), model)
            scheduler = schedule(optimizer.optim if on == "inner" and isinstance(side, Together) else optimizer)
            for step in range(5):
                side.backward(optimizer, side.mean(loss_at(model, step)))
                side.step(optimizer)
                optimizer.zero_grad()
                scheduler.step()
            return model

        return script

    cases = product(SCHEDULERS, EITHER)
    check_each({f"{name}, {on}": Case(script_of(SCHEDULERS[name], on), {}) for name, on in cases}, subtests)


def test_plateau_scheduler_lowers_the_rate() -> None:
    def train(rank: int, world_size: int) -> list[float]:
        model = net()
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        for _ in range(3):
            scheduler.step(1.0)
        return [group["lr"] for group in optimizer.optim.param_groups]

    assert run_ranks(train, 1) == [[pytest.approx(5e-4)]]


def test_groups_state_and_defaults_stay_those_of_the_wrapped_optimizer(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, load_on: str) -> list[bool]:
        model = net()
        optimizer = LowLevelZeroOptimizer(adamw(model), model=model)
        optimizer.backward(loss_at(model, 0)(rank))
        optimizer.step()
        loader = optimizer if load_on == "wrapper" else optimizer.optim
        loader.load_state_dict(loader.state_dict())
        optimizer.param_groups[0]["lr"] = 0.125
        return [
            optimizer.param_groups is optimizer.optim.param_groups,
            optimizer.state is optimizer.optim.state,
            optimizer.defaults is optimizer.optim.defaults,
            optimizer.optim.param_groups[0]["lr"] == 0.125,
            isinstance(optimizer, torch.optim.Optimizer),
        ]

    for (load_on,), ran in run_cases(train, 2, [(on,) for on in EITHER], one_group=True):
        with subtests.test(load_on):
            assert ran.values() == [[True] * 5] * 2


def test_training_goes_on_after_loading_the_own_state(subtests: pytest.Subtests) -> None:
    def script_of(load_on: str) -> Script:
        def script(side: Alone) -> nn.Module:
            model = net()
            optimizer = side.wrap(adamw(model), model)
            for step in range(4):
                if step == 2:
                    loader = optimizer.optim if load_on == "inner" and isinstance(side, Together) else optimizer
                    loader.load_state_dict(loader.state_dict())
                side.backward(optimizer, side.mean(loss_at(model, step)))
                side.step(optimizer)
                optimizer.zero_grad()
            return model

        return script

    check_each(
        {f"{on}, {stage}": Case(script_of(on), STAGES[stage]) for on, stage in product(EITHER, STAGES)}, subtests
    )


def test_an_optimizer_dies_by_reference_counting_alone_and_takes_its_hooks_along(subtests: pytest.Subtests) -> None:
    def live(rank: int, world_size: int, way: str, used: bool) -> tuple[bool, bool, bool]:
        model = net()
        side = Together(rank, **WAYS[way])
        optimizer = side.wrap(momentum(model), model)
        if used:
            side.backward(optimizer, loss_at(model, 0)(rank))
            optimizer.step()
        gc.collect()
        gc.disable()
        died = weakref.ref(optimizer)
        inner = weakref.ref(optimizer.optim)
        del optimizer
        hooks = any(p._post_accumulate_grad_hooks for p in model.parameters())
        gone = died() is None, inner() is None, not hooks
        gc.enable()
        loss_at(model, 1)(rank).backward()
        assert all(p.grad is not None for p in model.parameters())
        return gone

    for (way, used), ran in run_cases(live, 2, product(WAYS, (True, False))):
        with subtests.test(way=way, used=used):
            assert ran.values() == [(True, True, True)] * 2


def test_optimizers_one_after_another_leave_no_process_groups_behind() -> None:
    """Each group holds threads and sockets."""

    def live(rank: int, world_size: int) -> list[int]:
        groups = []
        for step in range(4):
            model = net()
            optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
            optimizer.backward(loss_at(model, step)(rank))
            optimizer.step()
            del optimizer
            groups.append(len(dist.distributed_c10d._world.pg_map))
        return groups

    for first, *later in run_ranks(live, 2):
        assert later == [first] * 3


def test_a_grad_scaler_is_refused_with_the_remedy() -> None:
    def train(rank: int, world_size: int) -> None:
        model = net()
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_at(model, 0)(rank)).backward()
        scaler.step(optimizer)

    for error in run_ranks_expecting(train, 2):
        assert error.type == "RuntimeError"
        assert "GradScaler" in error.message
        assert "optimizer.backward(loss)" in error.message


def test_a_disabled_grad_scaler_is_none() -> None:
    def script(side: Alone) -> nn.Module:
        model = net()
        optimizer = side.wrap(momentum(model), model)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        side.backward(optimizer, scaler.scale(side.mean(loss_at(model, 0))))
        scaler.step(optimizer)
        scaler.update()
        return model

    check(script)


def test_a_bare_backward_of_an_fp16_model_is_refused() -> None:
    def train(rank: int, world_size: int) -> None:
        model = net().half()
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
        model(data(0, rank).half()).float().sum().backward()
        optimizer.step()

    for error in run_ranks_expecting(train, 2):
        assert error.type == "RuntimeError"
        assert "optimizer.backward(loss)" in error.message


# A step between a forward and its backward


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_between_forward_and_backward_is_noticed(world_size: int, subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, way: str, dtype: torch.dtype, bucket: int) -> None:
        model = net().to(dtype)
        side = Together(rank, reduce_bucket_size=bucket, **WAYS[way])
        optimizer = side.wrap(momentum(model), model)
        early = model(data(0, rank).to(dtype)).sum()
        side.backward(optimizer, model(data(1, rank).to(dtype)).sum())
        optimizer.step()
        optimizer.zero_grad()
        side.backward(optimizer, early)

    cases = covering(WAYS, (torch.float32, torch.bfloat16), (1, 2**20))
    for (way, dtype, bucket), ran in run_cases_expecting(train, world_size, cases):
        with subtests.test(way=way, dtype=dtype, bucket=bucket):
            for error in ran.raised():
                assert error.type == "RuntimeError"
                assert "modified by an inplace operation" in error.message


# What is held


def test_the_slices_keep_no_gradients_of_their_own(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, stage: str) -> list[bool]:
        model = net().bfloat16()
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model, **STAGES[stage])
        optimizer.backward(model(data(0, rank).bfloat16()).float().sum())
        optimizer.step()
        return [p32.grad is None for p32 in optimizer.get_working_to_master_map().values()]

    for (stage,), ran in run_cases(train, 2, [(stage,) for stage in STAGES], one_group=True):
        with subtests.test(stage):
            assert ran.values() == [[True] * 8] * 2


WIDE = {"layers": 3, "width": 64}
ELEMENTS = 3 * (64 * 64 + 64)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_held(world_size: int, subtests: pytest.Subtests) -> None:
    """Every size here divides by the world size, so the numbers are the formulas', but for ends of rows and steps."""

    def look(rank: int, world_size: int, stage: str, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
        model = net(**WIDE).to(dtype)
        optimizer = LowLevelZeroOptimizer(adamw(model), model=model, reduce_bucket_size=8192, **STAGES[stage])
        optimizer.backward(model(data(0, rank, 64).to(dtype)).float().square().mean())
        optimizer.get_working_grads_by_group_id(0)  # finishes what is in flight
        after_backward = optimizer.memory_held()
        optimizer.step()
        optimizer.zero_grad()
        return after_backward, optimizer.memory_held()

    cases = product(STAGES, (torch.float32, torch.bfloat16))
    for (stage, dtype), ran in run_cases(look, world_size, cases, one_group=True):
        with subtests.test(stage=stage, dtype=dtype):
            size = dtype.itemsize
            rows = 1 if stage == "stage2" else world_size  # an all-reduced bucket is kept
            gradients = rows * ELEMENTS * size // world_size
            ends = rows * 3 * 128  # a bucket for each layer
            for after_backward, after_step in ran.values():
                assert after_backward["parameters"] == after_step["parameters"] == ELEMENTS * size
                assert gradients <= after_backward["gradients"] < gradients + ends
                assert after_step["gradients"] == 0
                assert after_step["masters"] == (0 if dtype == torch.float32 else 4 * ELEMENTS // world_size)
                assert after_backward["states"] == 0
                assert after_step["states"] == 2 * 4 * ELEMENTS // world_size + 6 * 4
