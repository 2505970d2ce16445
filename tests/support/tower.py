"""A tower of layers that may be left out, or run in ways that the graph doesn't show, trained by both sides."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.unused_parameters import UnusedParameters
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.numbers import trained
from tests.support.oracle import check_close, parameters_of
from tests.support.ranks import run_ranks

CALLS = ("driven", "bare")
LAYERS = 6
TIMEOUT = 30.0


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
    """A run with some ``backwards`` a step; ``call(step, at, rank)`` names one way of each: driven, bare or no_sync."""

    kept: Kept
    world_size: int = 2
    steps: int = 5
    backwards: int = 1
    way: Callable[[int, int, int], str] = lambda step, at, rank: "plain"
    call: Callable[[int, int, int], str] = lambda step, at, rank: "driven"
    width: int = 6
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
            for rank in range(run.world_size):
                loss = run.loss(model, step, at, rank) / run.world_size
                if loss.requires_grad:
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
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
                backward(optimizer, run.loss(model, step, at, rank), run.call(step, at, rank))
            optimizer.step()
        optimizer.zero_grad()
        seen.reduced.append(reduced)
        seen.gathered.append(gathered)
        seen.messages.append(messages)
        seen.detecting.append(detection_of(optimizer).detecting)
    seen.parameters = parameters_of(model)
    return seen


def wrapped(run: Training, model: nn.Module) -> LowLevelZeroOptimizer:
    return LowLevelZeroOptimizer(run.optimizer(model), model=model, **{"reduce_bucket_size": 1, **run.options})


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
