"""A backward that somebody else runs, as trainers do: ``with optimizer.backward_pass(loss) as scaled``."""

from __future__ import annotations

from collections.abc import Callable
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
