"""A backward that can't even begin leaves nothing behind: this optimizer and others go on as if it had never been."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.gradients.sharded_gradient import ShardedGradient
from tests.support.ranks import run_ranks


class Refusing(logging.Handler):
    """A handler as of who wants no warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            raise ValueError(f"unwanted: {record.getMessage()}")


class Part(nn.Module):
    """Layers of which one may be left out."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 3, dtype=dtype)

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        return (self.second(x) if whole else x).float().square().mean()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, world_size: int, whole: bool) -> None:
    for step in steps:
        optimizer.zero_grad()
        for rank in range(world_size):
            (model(batch(step, rank), whole) / world_size).backward()
        optimizer.step()


def a_warning_is_refused(optimizer: LowLevelZeroOptimizer, model: nn.Module, rank: int) -> None:
    """Raised on rank 0 alone, which tells of old gradients."""
    handler = Refusing()
    logging.getLogger("lowlevel_zero").addHandler(handler)
    try:
        optimizer.backward(model(batch(0, rank)))
    finally:
        logging.getLogger("lowlevel_zero").removeHandler(handler)


def no_tensors_as_inputs(optimizer: LowLevelZeroOptimizer, model: nn.Module, rank: int) -> None:
    """Raised on the last rank alone, in the look for what will be reached."""
    last = rank == torch.distributed.get_world_size() - 1
    optimizer.backward(model(batch(0, rank)), inputs=[[model.first.weight]] if last else None)  # type: ignore[list-item]


@pytest.mark.parametrize(("fail", "drops"), [(a_warning_is_refused, False), (no_tensors_as_inputs, True)])
def test_training_goes_on(fail: Callable[..., None], drops: bool) -> None:
    """``drops``: ranks tell each other in every backward what it will reach."""

    def work(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        models = [Part(), Part(), Part(torch.float16)]
        torch.manual_seed(0)
        copies = [Part(), Part()]
        optimizer, other, half = (LowLevelZeroOptimizer(sgd(model), model=model) for model in models)
        model, beside, _ = models
        for step in range(2):
            optimizer.zero_grad()
            optimizer.backward(model(batch(step, rank), whole=not drops))
            optimizer.step()
        raising = rank == 0 if fail is a_warning_is_refused else rank == world_size - 1
        if raising:
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                fail(optimizer, model, rank)
        else:
            fail(optimizer, model, rank)

        beside(batch(0, rank)).backward()  # not driven by anybody: reduced as it comes
        assert all(isinstance(p.grad, ShardedGradient) for p in beside.parameters())
        other.step()
        other.zero_grad()
        with pytest.raises(RuntimeError, match="which scales the loss"):
            models[2](batch(0, rank)).backward()
        half.zero_grad()

        for step in range(2, 5):
            optimizer.zero_grad()
            if step == 3:
                model(batch(step, rank)).backward()
                assert all(isinstance(p.grad, ShardedGradient) for p in model.parameters())
            else:
                optimizer.backward(model(batch(step, rank)))
            optimizer.step()
        inner = sgd(copies[0])
        alone(copies[0], inner, range(2), world_size, whole=not drops)
        alone(copies[0], inner, range(2, 5), world_size, whole=True)
        alone(copies[1], sgd(copies[1]), range(1), world_size, whole=True)
        for trained, copied in zip(models, copies, strict=False):
            for p, q in zip(trained.parameters(), copied.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

    run_ranks(work, 2)
