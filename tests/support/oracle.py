"""The judge of all numbers: one process, plain torch, the concatenated batch.

Runs are SGD's with momentum: Adam hides gradients that are wrong by a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer

Drop = Callable[[int, int], set[int]]
"""The layers that a rank leaves out in a step: ``drop(step, rank)``."""


Weight = Callable[[int, int, int], float]
"""What the gradients of a loss are multiplied with: ``weight(step, micro, rank)``."""

Result = tuple[dict[str, Tensor], list[float]]
"""Parameters, or masters, and the norm of each step's gradients."""


def nothing(step: int, rank: int) -> set[int]:
    return set()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Unlike Adam, it feels a gradient that is wrong by a factor.

    In three steps of ``Odd`` every parameter goes 0.004 or more, and gradients that are off by 1e-5 of their size move
    none by more than 2e-6.
    """
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


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
    """One training run, to be done by one process or by several.

    ``weight`` is the oracle's alone: see ``mistakes``.
    """

    world_size: int = 2
    steps: int = 3
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    drop: Drop = nothing
    no_sync: bool = False
    bare: bool = False
    clip: float = 0.0
    clip_by_hand: bool = False
    seed: int = 0
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum
    model: Callable[[], nn.Module] = Odd
    options: dict[str, Any] = field(default_factory=dict)
    weight: Weight = lambda step, micro, rank: 1.0

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


def weighted_loss(model: nn.Module, run: Run, step: int, micro: int, rank: int) -> Tensor:
    """A loss as the oracle has it, who may play a mistaken run."""
    return loss_of(model, run, step, micro, rank) * run.weight(step, micro, rank)


def train_alone(run: Run) -> Result:
    """The oracle: every rank's share of the batch in one process; parameters and gradient norms."""
    model = build(run)
    optimizer = run.optimizer(groups(model))
    norms = []
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            shares = [weighted_loss(model, run, step, micro, rank) for rank in range(run.world_size)]
            (torch.stack(shares).sum() / run.world_size).backward()
        max_norm = run.clip if run.clip > 0 else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model), norms


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def emulate(run: Run) -> Result:
    """The oracle of 16-bit runs: the masters of all trainable parameters, and gradient norms.

    The working copy computes in its dtype. Every synchronised gradient counts as it is; sums, averages and
    steps are those of the masters, fp32 at least.
    """
    model = build(run)
    masters = {p: nn.Parameter(_master(p, run)) for p in model.parameters() if p.requires_grad}
    own = [{**group, "params": [masters[p] for p in group["params"] if p in masters]} for group in groups(model)]
    optimizer = run.optimizer(own)
    norms = []
    for step in range(run.steps):
        sums = summed_gradients(model, run, step)
        for p, master in masters.items():
            master.grad = (sums[p] / run.world_size).to(master.dtype) if p in sums else None
        max_norm = run.clip if run.clip > 0 else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), max_norm)))
        optimizer.step()
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
    return {name: masters[p].detach() for name, p in model.named_parameters() if p in masters}, norms


def _master(p: Tensor, run: Run) -> Tensor:
    keeps_dtype = not run.options.get("master_weights", True)
    return p.detach().clone() if keeps_dtype else p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)


def summed_gradients(model: nn.Module, run: Run, step: int) -> dict[Tensor, Tensor]:
    """One step's gradients, summed over ranks and micro-batches in fp32 at least, unscaled."""
    scale = run.options.get("initial_scale", 2.0**16) if _has_half(model) else 1.0
    sums: dict[Tensor, Tensor] = {}
    for rank in range(run.world_size):
        for micro in range(run.micro_batches):
            (weighted_loss(model, run, step, micro, rank) * scale).backward()
            if run.no_sync and micro < run.micro_batches - 1:
                continue
            for p in model.parameters():
                if p.grad is not None:
                    grad = p.grad.to(torch.promote_types(p.dtype, torch.float32)) / scale
                    sums[p] = sums[p] + grad if p in sums else grad
                p.grad = None
    return sums


def _has_half(model: nn.Module) -> bool:
    return any(p.dtype == torch.float16 for p in model.parameters())


class Trained(NamedTuple):
    """What a rank has after a run."""

    model: nn.Module
    optimizer: LowLevelZeroOptimizer
    norms: list[float]

    def masters(self) -> dict[str, Tensor]:
        """This rank's master slices, by name."""
        slices = self.optimizer.get_working_to_master_map()
        return {name: slices[id(p)].detach().clone() for name, p in self.model.named_parameters() if id(p) in slices}


def train_rank(rank: int, world_size: int, run: Run) -> Trained:
    """A run as one rank of several."""
    model = build(replace(run, seed=run.seed + rank))  # rank 0's values are broadcast
    clip = 0.0 if run.clip_by_hand else run.clip
    optimizer = LowLevelZeroOptimizer(run.optimizer(groups(model)), model=model, clip_grad_norm=clip, **run.options)
    norms = []
    for step in range(run.steps):
        backward(optimizer, model, run, step, rank)
        by_hand = float(optimizer.clip_grad_norm_(run.clip)) if run.clip_by_hand else None
        optimizer.step()
        norms.append(optimizer.get_grad_norm() if by_hand is None else by_hand)
        optimizer.zero_grad()
    return Trained(model, optimizer, norms)


def train_sharded(rank: int, world_size: int, run: Run) -> Result:
    """A run as one rank of several: parameters and gradient norms."""
    model, _, norms = train_rank(rank, world_size, run)
    return parameters_of(model), norms


def backward(optimizer: LowLevelZeroOptimizer, model: nn.Module, run: Run, step: int, rank: int) -> None:
    """Of all micro-batches of a step, on one rank."""
    for micro in range(run.micro_batches):
        waits = run.no_sync and micro < run.micro_batches - 1
        with optimizer.no_sync() if waits else nullcontext():
            loss = loss_of(model, run, step, micro, rank)
            loss.backward() if run.bare else optimizer.backward(loss)


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
