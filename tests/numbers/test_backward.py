"""Backwards of all kinds before a step: scaled, with a graph, of recomputed segments, and such as fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.covering import covering
from tests.support.on_ranks import on_ranks
from tests.support.scripts import (
    BOTH,
    STAGES,
    WAYS,
    Alone,
    Case,
    Script,
    Together,
    check_each,
    data,
    loss_at,
    momentum,
    net,
)
from tests.support.tower import sizes_of


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


Way = Callable[[LowLevelZeroOptimizer, nn.Module, int, int], None]
"""What a rank does in a step: ``way(optimizer, model, step, rank)``."""


def scaled_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(data(step, rank).half()).float().sum()


def by_loss(optimizer: LowLevelZeroOptimizer, model: nn.Module, step: int, rank: int) -> None:
    optimizer.backward(scaled_loss(model, step, rank))
    optimizer.step()
    optimizer.zero_grad()


def by_grad(optimizer: LowLevelZeroOptimizer, model: nn.Module, step: int, rank: int) -> None:
    optimizer.backward_by_grad(scaled_loss(model, step, rank), torch.tensor(optimizer.loss_scale))
    optimizer.step()
    optimizer.zero_grad()


def under_no_grad(optimizer: LowLevelZeroOptimizer, model: nn.Module, step: int, rank: int) -> None:
    loss = scaled_loss(model, step, rank)
    with torch.no_grad():
        optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def with_passes_without_a_backward(optimizer: LowLevelZeroOptimizer, model: nn.Module, step: int, rank: int) -> None:
    """As for a micro-batch whose loss isn't finite: gradients of others are no sign of a wrong backward."""
    with optimizer.no_sync():
        optimizer.backward(scaled_loss(model, step, rank))
    with optimizer.backward_pass(scaled_loss(model, 9, rank)):
        pass
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync(), optimizer.backward_pass(scaled_loss(model, 9, rank)):
        pass


@on_ranks(2, [by_grad, under_no_grad, with_passes_without_a_backward])
def test_a_scaled_model_trains_as_by_backward(rank: int, way: Way) -> None:
    weights = []
    for each in (way, by_loss):
        model = net(layers=1).half()
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model, initial_scale=64.0)
        for step in range(2):
            each(optimizer, model, step, rank)
        weights.append(model[0].weight)
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], net(layers=1).half()[0].weight)


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


@on_ranks(1)
def test_a_loss_of_nothing_is_told_of_once(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = LowLevelZeroOptimizer(momentum(model), model=model, verbose=False)
    caplog.clear()
    for _ in range(3):
        optimizer.backward(torch.zeros(()))
        optimizer.step()
    (record,) = caplog.records
    assert "doesn't require grad" in record.getMessage()


@pytest.mark.filterwarnings("ignore:Using backward")
@on_ranks(2, product(STAGES, (1, 100)))
def test_gradients_that_come_with_a_graph_are_reduced_without_it(rank: int, stage: str, bucket_size: int) -> None:
    """In place, and packed."""
    bias, weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))
    sgd = torch.optim.SGD([bias, weight], lr=1.0)
    optimizer = LowLevelZeroOptimizer(sgd, reduce_bucket_size=bucket_size, **STAGES[stage])
    (((bias**3).sum() + (weight**3).sum()) * (rank + 1)).backward(create_graph=True)
    (group,) = optimizer.sharded_groups
    in_flight = [tensor for each in group.reducer.syncs.buckets.in_flight for tensor in each.work.tensors]
    hangs = [held.requires_grad for held in (*group.gradients.held(), *in_flight)]
    assert hangs
    assert not any(hangs)
    optimizer.step()
    assert [*bias.tolist(), *weight.flatten().tolist()] == [1 - 3 * 1.5] * 8


@pytest.mark.filterwarnings("ignore:Using backward")
@on_ranks(2, STAGES)
def test_a_gradient_that_comes_with_a_graph_is_added_to_the_sum_before(rank: int, stage: str) -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD([p], lr=1.0), **STAGES[stage])
    for _ in range(3):
        ((p**3).sum() * (rank + 1)).backward(create_graph=True)
    optimizer.step()
    assert p.tolist() == [1 - 3 * 3 * 1.5] * 4


# A step between a forward and its backward


@on_ranks(2, covering(WAYS, (torch.float32, torch.bfloat16), (False, True)), one_group=False)
def test_a_step_between_forward_and_backward_is_noticed(rank: int, way: str, dtype: torch.dtype, overlap: bool) -> None:
    model = net().to(dtype)
    side = Together(rank, overlap_allgather=overlap, **WAYS[way])
    optimizer = side.wrap(momentum(model), model)
    early = model(data(0, rank).to(dtype)).sum()
    side.backward(optimizer, model(data(1, rank).to(dtype)).sum())
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        side.backward(optimizer, early)


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


@on_ranks(2, product((False, True), (False, True)))
def test_zero_grad_begins_anew_after_a_backward_that_failed_in_two_ways(rank: int, plain: bool, to_none: bool) -> None:
    """By an error of the caller's, behind a gradient that can't be reduced on one rank."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3))
    optimizer = LowLevelZeroOptimizer(momentum(model), model=model, reduce_bucket_size=1)

    def fail(_: Tensor) -> None:
        raise ValueError("as of a caller's hook")

    embedded = F.embedding(torch.arange(2), model[0].weight, sparse=rank == 1)
    hook = model[0].weight.register_post_accumulate_grad_hook(fail)  # the last of all
    with pytest.raises(ValueError, match="as of a caller's hook"):
        model[1](embedded).sum().backward() if plain else optimizer.backward(model[1](embedded).sum())
    hook.remove()
    optimizer.zero_grad(set_to_none=to_none)
    optimizer.backward(model(torch.arange(2)).sum())
    optimizer.step()
    optimizer.verify()


# ---- weights that recomputed segments share, whose gradients come twice, or late ----

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
    "non-reentrant, nested": train_recomputed(Recomputed, False, nested=True),
    "of the whole model, micro-batches": train_recomputed(AllRecomputed, True, micro_batches=2),
}


@nested_warns
def test_checkpointing_with_a_weight_shared_by_segments(subtests: pytest.Subtests) -> None:
    check_each({kind: Case(SEGMENTS[kind], BOTH[way], 3) for kind, way in zip(SEGMENTS, BOTH, strict=True)}, subtests)


@on_ranks(2)
def test_a_shared_weight_does_arrive_late_once_and_is_waited_for_from_then_on(rank: int) -> None:
    """Without a further round its second gradient would have been lost."""
    model = Recomputed(reentrant=True, nested=False)
    arrivals: list[Tensor] = []
    model.shared.weight.register_post_accumulate_grad_hook(arrivals.append)
    optimizer = LowLevelZeroOptimizer(momentum(model), model=model, reduce_bucket_size=1)
    reductions = []
    for step in range(3):
        with sizes_of("all_reduce") as sizes:
            optimizer.backward(loss_at(model, step)(rank))
            optimizer.step()
        reductions.append(len(sizes))
        optimizer.zero_grad()
    first, *later = reductions
    assert len(arrivals) == 2 * 3
    assert later[0] == later[1] < first


@on_ranks(1)
def test_what_a_loaded_state_tells_of_gradients_takes_the_place_of_what_was_learnt(rank: int) -> None:
    """One optimizer has had a shared weight's gradient twice in a backward, the other hasn't."""
    states = []
    for reentrant in (False, True):
        model = Recomputed(reentrant, nested=False)
        optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
        optimizer.backward(loss_at(model, 0)(rank))
        optimizer.step()
        states.append(optimizer.state_dict())
    without, twice = (state["lowlevel_zero"] for state in states)
    assert without != twice
    optimizer.load_state_dict(states[0])
    assert optimizer.state_dict()["lowlevel_zero"] == without
    optimizer.load_state_dict(states[1])
    assert optimizer.state_dict()["lowlevel_zero"] == twice


def backward(model: Any, x: Tensor, shared: bool, again: bool) -> None:
    x = x.clone().requires_grad_()
    loss = checkpoint(model, x, use_reentrant=True).square().mean()
    if shared:
        loss = loss + checkpoint(model[0], x, use_reentrant=True).mean()
    if again:
        loss.backward(retain_graph=True)
    loss.backward()


@on_ranks(2, [(2, False, 1, False), (1, True, 2, False), (1, True, 1, True)])
def test_plain_backwards_that_nest_others_end_with_sharded_gradients(
    rank: int, micro_batches: int, shared: bool, stage: int, again: bool
) -> None:
    """All gradients come in nested backwards; torch's clipping then reads the norm of the sum."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    model, alone = net(layers=2), net(layers=2)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    of_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(micro_batches):
            backward(model, x[3 * rank :][:3], shared, again)
            backward(alone, x, shared, again)
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.4) for each in (model, alone)]
        torch.testing.assert_close(*norms)
        for each in (optimizer, of_alone):
            each.step()
            each.zero_grad()
    torch.testing.assert_close([*model.parameters()], [*alone.parameters()], rtol=0, atol=1e-6)


@on_ranks(2)
def test_ranks_that_run_different_numbers_of_backwards_wait_less_and_less_for_each_other(rank: int) -> None:
    """A backward that other ranks don't run has nobody to wait for, and can't know."""
    model = net(layers=2)
    optimizer = LowLevelZeroOptimizer(momentum(model), model=model)
    began = time.monotonic()
    for step in range(12):
        for _ in range(3 if rank == 0 else 1):
            optimizer.backward(loss_at(model, step)(rank))
        optimizer.step()
        optimizer.zero_grad()
    assert time.monotonic() - began < 6  # two seconds of waiting; one in each step would be twelve
