"""A small model after a backward, whose ``p.grad`` is sharded, and what must hold when it has been used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.gradients.sharded_gradient import ShardedGradient

Trained = tuple[nn.Sequential, LowLevelZeroOptimizer]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_at(model: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = model(batch(step, rank)).square().mean()
    return loss


def backward_alone(model: nn.Module, step: int, world_size: int) -> None:
    """One process does every rank's share."""
    torch.stack([loss_at(model, step, rank) for rank in range(world_size)]).mean().backward()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


def sharded(rank: int, **options: Any) -> Trained:
    """Return a model and its optimizer after a backward."""
    model = net()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), model=model, **options)
    optimizer.backward(loss_at(model, 0, rank))
    return model, optimizer


def steps_on(model: nn.Module, optimizer: LowLevelZeroOptimizer, rank: int, world_size: int) -> None:
    """Training from cleared gradients, and from where the model stands, goes on as in plain torch."""
    optimizer.zero_grad()
    plain = net()
    plain.load_state_dict(model.state_dict())
    optimizer.backward(loss_at(model, 7, rank))
    backward_alone(plain, 7, world_size)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(p.grad, ShardedGradient)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    optimizer.step()
    optimizer.verify()
