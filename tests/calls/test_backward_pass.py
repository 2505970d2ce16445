"""A backward that somebody else runs, as trainers do: ``with optimizer.backward_pass(loss) as scaled``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases


class Net(nn.Module):
    """Three layers, of which each rank and step leaves another out."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.to(dtype)

    def forward(self, x: Tensor, drop: int) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = x if at == drop else layer(x.to(layer.weight.dtype))
        return x.float().square().mean()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = model(x, (step + rank) % 4)
    return loss


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def by_method(optimizers: list[LowLevelZeroOptimizer], loss: Tensor) -> None:
    for at, optimizer in enumerate(optimizers):
        optimizer.backward(loss, retain_graph=at == 0)


def by_context(optimizers: list[LowLevelZeroOptimizer], loss: Tensor) -> None:
    for at, optimizer in enumerate(optimizers):
        with optimizer.backward_pass(loss) as scaled:
            scaled.backward(retain_graph=at == 0)


def nested(optimizers: list[LowLevelZeroOptimizer], loss: Tensor) -> None:
    """One backward for all."""
    with ExitStack() as contexts:
        for optimizer in optimizers:
            contexts.enter_context(optimizer.backward_pass(loss))
        loss.backward()


def train(
    rank: int, world_size: int, run: Callable[..., None], dtype: torch.dtype, options: dict[str, Any]
) -> list[Tensor]:
    model = Net(dtype)
    optimizer = LowLevelZeroOptimizer(sgd(model.parameters()), model=model, reduce_bucket_size=1, **options)
    for step in range(5):
        run([optimizer], loss_of(model, step, rank))
        assert all(each.reducer.buckets.is_open is False for each in optimizer.sharded_groups)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_trains_as_backward_does(world_size: int, subtests: pytest.Subtests) -> None:
    kinds: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float32, {}),
        (torch.float16, {"partition_grad": True, "initial_scale": 1024.0}),
    ]
    cases = [(run, *kind) for kind in kinds for run in (by_method, by_context)]
    ran = [each.values() for _, each in run_cases(train, world_size, cases)]
    for (dtype, _), expected, got in zip(kinds, ran[::2], ran[1::2], strict=True):
        with subtests.test(str(dtype)):
            for one, other in zip(expected, got, strict=True):
                assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def train_parts(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Two optimizers of one model, beside plain torch."""
    model, plain = Net(), Net()
    parts: list[Any] = [list(layer.parameters()) for layer in (model.layers[0], model.layers[1:])]
    optimizers = [LowLevelZeroOptimizer(sgd(part), model=model, reduce_bucket_size=1) for part in parts]
    alone = sgd(plain.parameters())
    for step in range(5):
        nested(optimizers, loss_of(model, step, rank))
        torch.stack([loss_of(plain, step, each) for each in range(world_size)]).mean().backward()
        for optimizer in (*optimizers, alone):
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], [p.detach().clone() for p in plain.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_backward_for_two_optimizers(world_size: int) -> None:
    ((_, ran),) = run_cases(train_parts, world_size, [()])
    for got, expected in ran.values():
        for p, q in zip(got, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def from_the_loss_itself(optimizer: LowLevelZeroOptimizer, loss: Tensor) -> None:
    with optimizer.backward_pass(loss):
        loss.backward()


def within_another(optimizer: LowLevelZeroOptimizer, loss: Tensor) -> None:
    with optimizer.backward_pass(loss):
        optimizer.backward(loss)


def step_within(optimizer: LowLevelZeroOptimizer, loss: Tensor) -> None:
    with optimizer.backward_pass(loss) as scaled:
        scaled.backward()
        optimizer.step()


def of_a_number(optimizer: LowLevelZeroOptimizer, loss: Tensor) -> None:
    with optimizer.backward_pass(1.0):  # type: ignore[arg-type]
        pass


WRONG: dict[str, tuple[Callable[..., None], torch.dtype, str]] = {
    "fp16 from the loss itself": (from_the_loss_itself, torch.float16, "as scaled: scaled.backward"),
    "backward within": (within_another, torch.float32, r"backward: .* outside of optimizer.backward_pass"),
    "step within": (step_within, torch.float32, r"step: .* outside of optimizer.backward_pass"),
    "no tensor": (of_a_number, torch.float16, "loss: expected a tensor, got float"),
}


def mistaken(rank: int, world_size: int, what: str) -> None:
    """It is refused, and the same steps follow as without it."""
    wrong, dtype, says = WRONG[what]
    models = [Net(dtype), Net(dtype)]
    pair = [LowLevelZeroOptimizer(sgd(model.parameters()), model=model) for model in models]
    with pytest.raises((RuntimeError, TypeError), match=says):
        wrong(pair[0], loss_of(models[0], 0, rank))
    pair[0].zero_grad()
    for model, optimizer in zip(models, pair, strict=True):
        for step in range(2):
            optimizer.backward(loss_of(model, step, rank))
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)


def test_mistakes_are_refused(subtests: pytest.Subtests) -> None:
    for (what,), ran in run_cases(mistaken, 2, [(what,) for what in WRONG]):
        with subtests.test(what):
            ran.values()
