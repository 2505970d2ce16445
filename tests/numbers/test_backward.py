"""Backwards of all kinds before a step: to some inputs, by gradients, with a graph, and such as fail."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.gradients.sharded_gradient import ShardedGradient
from tests.support.covering import covering
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_cases, run_cases_expecting, run_ranks
from tests.support.scripts import (
    BOTH,
    STAGES,
    WAYS,
    Alone,
    Case,
    Together,
    check_each,
    data,
    loss_at,
    momentum,
    net,
)


def test_backwards_to_some_inputs(subtests: pytest.Subtests) -> None:
    def script(side: Alone) -> nn.Module:
        model = net()
        optimizer = side.wrap(momentum(model), model)
        for step in range(3):
            side.backward(optimizer, side.mean(loss_at(model, step)), inputs=[model[1].weight, model[3].bias])
            side.backward(optimizer, side.mean(loss_at(model, step + 10)), inputs=[model[0].weight])
            side.step(optimizer)
            optimizer.zero_grad()
        return model

    check_each({way: Case(script, BOTH[way], 3) for way in BOTH}, subtests)


def test_gradients_stay_as_clipped_until_they_are_cleared(subtests: pytest.Subtests) -> None:
    def script(side: Alone) -> nn.Module:
        model = net()
        optimizer = side.wrap(momentum(model), model)
        for step in range(3):
            side.backward(optimizer, side.mean(loss_at(model if step else model[:2], step)))
            side.step(optimizer)
            side.step(optimizer)
        return model

    check_each({stage: Case(script, {"clip": 0.1, **STAGES[stage]}, 3) for stage in STAGES}, subtests)


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


def test_a_pass_without_a_backward_adds_nothing_to_a_scaled_model() -> None:
    """As for a micro-batch whose loss isn't finite: gradients of others are no sign of a wrong backward."""

    def train(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        results = []
        for passes in (True, False):
            model = net(layers=1).half()
            optimizer = LowLevelZeroOptimizer(momentum(model), model=model, initial_scale=64.0)
            for step in range(2):
                with optimizer.no_sync():
                    optimizer.backward(model(data(step, rank).half()).float().sum())
                if passes:
                    with optimizer.backward_pass(model(data(9, rank).half()).float().sum()):
                        pass
                optimizer.step()
                optimizer.zero_grad()
                if passes:
                    with optimizer.no_sync(), optimizer.backward_pass(model(data(9, rank).half()).float().sum()):
                        pass
            results.append(model[0].weight.detach().clone())
        return results[0], results[1]

    for with_passes, without in run_ranks(train, 2, timeout=30):
        assert torch.equal(with_passes, without)
        assert not torch.equal(without, net(layers=1).half()[0].weight)


@on_ranks(1)
def test_backward_context_surrounds_backward(rank: int) -> None:
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
    assert seen == ["in", "backward", "out"]


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


# Where gradients are


@on_ranks(2, [(way,) for way in BOTH])
def test_gradients_leave_with_backward_and_stay_under_no_sync(rank: int, way: str) -> None:
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
    assert (gone, intact) == ([True] * 8, True)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_come_with_a_graph_are_reduced_without_it(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, stage: str, bucket_size: int) -> tuple[list[bool], list[float]]:
        bias, weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))
        optimizer = LowLevelZeroOptimizer(
            torch.optim.SGD([bias, weight], lr=1.0), reduce_bucket_size=bucket_size, **STAGES[stage]
        )
        (((bias**3).sum() + (weight**3).sum()) * (rank + 1)).backward(create_graph=True)
        (group,) = optimizer.sharded_groups
        in_flight = [tensor for each in group.reducer.syncs.buckets.in_flight for tensor in each.work.tensors]
        hangs = [held.requires_grad for held in (*group.gradients.held(), *in_flight)]
        optimizer.step()
        return hangs, [*bias.tolist(), *weight.flatten().tolist()]

    in_place, packed = 1, 100
    for (stage, bucket_size), ran in run_cases(train, 2, product(STAGES, (in_place, packed)), one_group=True):
        with subtests.test(stage=stage, bucket_size=bucket_size):
            for hangs, values in ran.values():
                assert hangs
                assert not any(hangs)
                assert values == [1 - 3 * 1.5] * 8


# A step between a forward and its backward


def test_a_step_between_forward_and_backward_is_noticed(subtests: pytest.Subtests) -> None:
    def train(rank: int, world_size: int, way: str, dtype: torch.dtype, overlap: bool) -> None:
        model = net().to(dtype)
        side = Together(rank, overlap_allgather=overlap, **WAYS[way])
        optimizer = side.wrap(momentum(model), model)
        early = model(data(0, rank).to(dtype)).sum()
        side.backward(optimizer, model(data(1, rank).to(dtype)).sum())
        optimizer.step()
        optimizer.zero_grad()
        side.backward(optimizer, early)

    cases = covering(WAYS, (torch.float32, torch.bfloat16), (False, True))
    for (way, dtype, overlap), ran in run_cases_expecting(train, 2, cases):
        with subtests.test(way=way, dtype=dtype, overlap=overlap):
            for error in ran.raised():
                assert error.type == "RuntimeError"
                assert "modified by an inplace operation" in error.message


@pytest.mark.parametrize("again", [False, True], ids=["a step", "another backward"])
@on_ranks(2, timeout=30)
def test_a_plain_backward_that_ends_by_an_error_loses_the_gradients(rank: int, again: bool) -> None:
    """As an ``optimizer.backward`` does: the gradients that had come before the error aren't stepped."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), reduce_bucket_size=4)
    before = [p.detach().clone() for p in model.parameters()]

    def fail(_: Tensor) -> None:
        if rank == 1:
            raise ZeroDivisionError("the moon is full")

    hook = model[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError) if rank == 1 else nullcontext():
        model(torch.ones(2, 3)).sum().backward()
    hook.remove()
    if again:
        model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"lost some on this rank to an error before .*loss.backward\(\) has ended"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.verify()
