"""The judge of all numbers: one process, plain torch, the concatenated batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer

Drop = Callable[[int, int], set[int]]
"""The layers that a rank leaves out in a step: ``drop(step, rank)``."""


def nothing(step: int, rank: int) -> set[int]:
    return set()


class Odd(nn.Module):
    """Layers that can be dropped, over parameters of every awkward kind.

    Sizes below, at and off multiples of the world size; 0-d, one-element and empty ones; transposed storage; a
    channels_last convolution; a weight that two layers share.
    """

    def __init__(self, width: int = 5, layers: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.inward = nn.Parameter(torch.randn(4, width).t() * 0.5)
        self.conv = nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.layers.append(nn.Linear(width, width))
        self.layers[-1].weight = self.layers[0].weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.outward = nn.Linear(width, 3)

    def forward(self, x: Tensor, drop: set[int]) -> Tensor:
        hidden = x @ self.inward.t() * self.scale + self.one
        image = hidden[:, :4].reshape(-1, 1, 2, 2)
        hidden = hidden + self.conv(image).sum((1, 2, 3))[:, None]
        for place, layer in enumerate(self.layers):
            if place not in drop:
                hidden = hidden + torch.tanh(layer(hidden))
        return self.outward(self.frozen(hidden))


@dataclass(frozen=True)
class Run:
    """One training run, to be done by one process or by several."""

    world_size: int = 2
    steps: int = 5
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    drop: Drop = nothing
    no_sync: bool = False
    bare: bool = False
    clip: float = 0.0
    seed: int = 0
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=1e-2)
    model: Callable[[], nn.Module] = Odd
    options: dict[str, Any] = field(default_factory=dict)

    def with_options(self, **options: Any) -> Run:
        return replace(self, options={**self.options, **options})


def build(run: Run) -> nn.Module:
    torch.manual_seed(run.seed)
    return run.model().to(run.dtype)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decayed, not decayed and empty groups, with frozen parameters among them."""
    flat = [p for p in model.parameters() if p.dim() < 2]
    deep = [p for p in model.parameters() if p.dim() >= 2]
    return [{"params": deep}, {"params": flat, "weight_decay": 0.0}, {"params": []}]


def batch(run: Run, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + rank + 100 * micro + 10_000 * step)
    x = torch.randn(3, 4, generator=generator).to(run.dtype)
    y = torch.randn(3, 3, generator=generator).to(run.dtype)
    return x, y


def loss_of(model: nn.Module, run: Run, step: int, micro: int, rank: int) -> Tensor:
    x, y = batch(run, step, micro, rank)
    loss: Tensor = (model(x, run.drop(step, rank)) - y).square().mean()
    return loss / run.micro_batches


def train_alone(run: Run) -> tuple[dict[str, Tensor], list[float]]:
    """The oracle: every rank's share of the batch in one process; parameters and gradient norms."""
    model = build(run)
    optimizer = run.optimizer(groups(model))
    norms = []
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            shares = [loss_of(model, run, step, micro, rank) for rank in range(run.world_size)]
            (torch.stack(shares).sum() / run.world_size).backward()
        max_norm = run.clip if run.clip > 0 else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms


def train_sharded(rank: int, world_size: int, run: Run) -> tuple[dict[str, Tensor], list[float]]:
    """The same run as one rank of several."""
    model = build(replace(run, seed=run.seed + rank))  # rank 0's values are broadcast
    optimizer = LowLevelZeroOptimizer(run.optimizer(groups(model)), model=model, clip_grad_norm=run.clip, **run.options)
    norms = []
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            if run.no_sync and micro < run.micro_batches - 1:
                with optimizer.no_sync():
                    _backward(optimizer, loss_of(model, run, step, micro, rank), run.bare)
            else:
                _backward(optimizer, loss_of(model, run, step, micro, rank), run.bare)
        optimizer.step()
        norms.append(optimizer.get_grad_norm())
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms


def _backward(optimizer: LowLevelZeroOptimizer, loss: Tensor, bare: bool) -> None:
    if bare:
        loss.backward()
    else:
        optimizer.backward(loss)


def worst(expected: dict[str, Tensor], got: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of any element, and the parameter that has it."""
    assert expected.keys() == got.keys()
    return max(((e.float() - got[n].float()).abs().max().item(), n) for n, e in expected.items() if e.numel())


def check_close(expected: dict[str, Tensor], ranks: Sequence[dict[str, Tensor]], tolerance: float) -> None:
    """Every rank has the same values, bit for bit, and they are the oracle's to ``tolerance``."""
    for got in ranks[1:]:
        for name, value in ranks[0].items():
            assert torch.equal(value, got[name]), f"ranks differ in {name}"
    difference, name = worst(expected, ranks[0])
    assert difference <= tolerance, f"{name} differs from the oracle by {difference:.3g}, more than {tolerance:.3g}"
