"""Calls in any order, on ranks that drop different layers, do what plain torch does with the joined batch."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowlevel_zero import LowLevelZeroOptimizer
from ranks import run_ranks


class Call(NamedTuple):
    """One call of a sequence; ``seed`` draws the batch and what each rank drops."""

    name: str
    seed: int = 0
    checkpointing: str = "none"
    max_norm: float = 0.0


class Case(NamedTuple):
    """A sequence, and how it is run; ``bare`` None: each rank draws for each call whether its backward is bare."""

    calls: list[Call]
    world_size: int
    bare: bool | None
    momentum: bool
    options: dict[str, Any]


class Net(nn.Module):
    """Residual layers that share a scale; checkpointing, each is a segment of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5) * 0.1)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, drop: set[int], checkpointing: str) -> Tensor:
        hidden = x + self.first
        for place, layer in enumerate(self.layers):
            if place not in drop:
                hidden = self._segment(layer, hidden, checkpointing)
        return self.last(hidden)

    def _segment(self, layer: nn.Module, hidden: Tensor, checkpointing: str) -> Tensor:
        def run(hidden: Tensor) -> Tensor:
            return hidden + torch.tanh(layer(hidden)) * self.scale

        if checkpointing == "none":
            return run(hidden)
        return checkpoint(run, hidden, use_reentrant=checkpointing == "reentrant")


NAMES = ["backward"] * 3 + ["no_sync", "zero_grad", "zero_grad to zeros", "step", "step", "gradients", "clip", "edit"]


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    calls = [
        Call(
            rng.choice(NAMES),
            rng.randrange(10**6),
            rng.choice(["none", "none", "reentrant", "non-reentrant"]),
            rng.choice([0.05, 0.5, 5.0]),
        )
        for _ in range(rng.randint(6, 16))
    ]
    options = {
        "partition_grad": rng.random() < 0.5,
        "reduce_bucket_size": rng.choice([1, 20, 60, 1000]),
        "overlap_communication": rng.random() < 0.8,
    }
    calls += [Call("backward", seed), Call("step")]
    return Case(calls, rng.choice([1, 2, 2, 3]), rng.random() < 0.5, rng.random() < 0.5, options)


def dropped(seed: int, rank: int) -> set[int] | None:
    """The layers that a rank drops, or None: its loss touches nothing at all."""
    rng = random.Random(seed * 31 + rank)
    kind = rng.random()
    if kind < 0.1:
        return None
    return {place for place in range(4) if kind < 0.2 or rng.random() < 0.4}


def loss_of(model: nn.Module, call: Call, rank: int) -> Tensor:
    drop = dropped(call.seed, rank)
    if drop is None:
        return torch.zeros(())
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(call.seed * 7 + rank))
    return model(x, drop, call.checkpointing).square().mean()


def optimizer_of(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    if case.momentum:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    return torch.optim.Adagrad(model.parameters(), lr=0.05, weight_decay=0.1)


Seen = tuple[list[Tensor], list[list[Tensor | None]]]


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def alone(case: Case) -> Seen:
    torch.manual_seed(0)
    model = Net()
    optimizer = optimizer_of(model, case)
    seen: list[list[Tensor | None]] = []
    for call in case.calls:
        if call.name in ("backward", "no_sync"):
            loss = torch.stack([loss_of(model, call, rank) for rank in range(case.world_size)]).mean()
            if loss.requires_grad:
                loss.backward()
        elif call.name == "step":
            optimizer.step()
        elif call.name == "gradients":
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        elif call.name == "clip":
            seen.append([torch.nn.utils.clip_grad_norm_(model.parameters(), call.max_norm)])
        else:
            edit_or_clear(call, model, optimizer)
    return values(model), seen


def sharded(rank: int, world_size: int, case: Case) -> Seen:
    torch.manual_seed(rank)
    model = Net()
    optimizer = LowLevelZeroOptimizer(optimizer_of(model, case), model=model, **case.options)
    seen: list[list[Tensor | None]] = []
    for call in case.calls:
        if call.name == "backward":
            backward(optimizer, loss_of(model, call, rank), is_bare(case, call, rank))
        elif call.name == "no_sync":
            with optimizer.no_sync():
                backward(optimizer, loss_of(model, call, rank), is_bare(case, call, rank))
        elif call.name == "step":
            optimizer.step()
        elif call.name == "gradients":
            seen.append([optimizer.get_param_grad(p) for p in model.parameters()])
        elif call.name == "clip":
            seen.append([optimizer.clip_grad_norm_(call.max_norm)])
        else:
            edit_or_clear(call, model, optimizer)
    return values(model), seen


def is_bare(case: Case, call: Call, rank: int) -> bool:
    return case.bare if case.bare is not None else random.Random(call.seed * 17 + rank).random() < 0.5


def edit_or_clear(call: Call, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if call.name == "edit":
        with torch.no_grad():
            model.last.weight.mul_(1.01)
    else:
        optimizer.zero_grad(set_to_none=call.name == "zero_grad")


def backward(optimizer: LowLevelZeroOptimizer, loss: Tensor, bare: bool) -> None:
    if not bare:
        optimizer.backward(loss)
    elif loss.requires_grad:
        loss.backward()


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_ten_random_sequences(first: int) -> None:
    for seed in range(first, first + 10):
        check(draw(seed), f"seed {seed}")


@pytest.mark.parametrize("first", range(100, 140, 10))
def test_ten_random_sequences_by_the_optimizer_s_own_backward(first: int) -> None:
    """Long enough for forecasts to begin in their midst."""
    for seed in range(first, first + 10):
        case = draw(seed)
        check(case._replace(calls=case.calls * 3, bare=False), f"seed {seed}")


@pytest.mark.parametrize("first", range(200, 240, 10))
def test_ten_random_sequences_in_which_each_rank_goes_its_own_way(first: int, forecasting: None) -> None:
    for seed in range(first, first + 10):
        check(draw(seed)._replace(bare=None), f"seed {seed}")


def check(case: Case, what: str) -> None:
    expected, expected_seen = alone(case)
    for got, seen in run_ranks(sharded, case.world_size, case, timeout=30):
        for one, other in zip(expected, got, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=3e-5, msg=f"{what}: {case}")
        for ones, others in zip(expected_seen, seen, strict=True):
            check_seen(ones, others, f"{what}: {case}")


def check_seen(expected: list[Tensor | None], got: list[Tensor | None], what: str) -> None:
    for one, other in zip(expected, got, strict=True):
        assert (one is None) == (other is None), what
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=3e-5, msg=what)
