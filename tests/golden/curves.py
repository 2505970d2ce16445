"""The short runs whose losses and gradient norms are kept, on data that no random generator or CPU can change.

A change of the model or of the data changes the numbers: the curves must be made anew then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer

CURVES = Path(__file__).parent / "curves.json"
RANKS = 2
STEPS = 8


@dataclass(frozen=True)
class Run:
    """A short run.

    Attributes:
        no_sync: whether a step has three micro-batches, of which the last one alone is synchronised; else it has one.
        drop: whether layers are dropped, at times by one rank and at times by both.
        clip: the largest norm; 0: none.
    """

    stage: int
    dtype: str
    no_sync: bool
    drop: bool
    clip: float

    @property
    def micro_batches(self) -> int:
        return 3 if self.no_sync else 1

    def dropped(self, step: int, rank: int) -> set[int]:
        """Return the second layer on both ranks in every third step, else another one on each rank."""
        if not self.drop:
            return set()
        return {1} if step % 3 == 2 else {(step + rank) % 2}


RUNS = [
    Run(1, "float32", no_sync=False, drop=False, clip=0.5),
    Run(2, "float32", no_sync=True, drop=True, clip=0.0),
    Run(1, "bfloat16", no_sync=False, drop=True, clip=0.0),
    Run(2, "float16", no_sync=False, drop=True, clip=0.5),
]


class Curve(NamedTuple):
    """By step the mean loss, and the gradient's norm before clipping."""

    losses: list[float]
    norms: list[float]


def numbers(*shape: int, seed: int) -> Tensor:
    """Return fp32 numbers between -1 and 1 without a pattern, made by exact arithmetic and one rounding."""
    i = torch.arange(torch.Size(shape).numel()) + 1009 + 17 * seed
    return ((i**3 + 5 * i**2) % 2003).double().div(1001).sub(1).float().view(shape)


class Small(nn.Module):
    """Two layers that can be dropped, between parameters of awkward kinds.

    ``rows`` (35 elements) is used twice; ``inward`` (30) is transposed; ``scale`` is 0-d; ``frozen`` is not trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(7, 5))
        self.inward = nn.Parameter(torch.empty(6, 5).t())
        self.scale = nn.Parameter(torch.empty(()))
        self.frozen = nn.Parameter(torch.empty(5), requires_grad=False)
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(2))
        with torch.no_grad():
            for place, p in enumerate(self.parameters()):
                p.copy_(numbers(*p.shape, seed=3 * place) / 2)

    def forward(self, x: Tensor, drop: set[int]) -> Tensor:
        """Return (samples, 5) for ``x`` of (samples, 6)."""
        hidden = x @ self.inward.t() * (self.scale + 1) + self.rows[: len(x)] + self.frozen
        for place, layer in enumerate(self.layers):
            if place not in drop:
                hidden = hidden + torch.tanh(layer(hidden))
        out: Tensor = hidden @ self.rows.t() @ self.rows
        return out


def loss_of(model: nn.Module, drop: set[int], step: int, micro: int, share: int) -> Tensor:
    """Return the loss of 4 samples, in fp32."""
    seed = 1 + 101 * step + 11 * micro + 3 * share
    dtype = next(model.parameters()).dtype
    out = model(numbers(4, 6, seed=seed).to(dtype), drop)
    return (out.float() - numbers(4, 5, seed=seed + 1)).square().mean()


def curve_of(rank: int, world_size: int, run: Run) -> Curve:
    """Train as one rank, and return its own losses with the norms of all."""
    model = Small().to(getattr(torch, run.dtype))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = LowLevelZeroOptimizer(
        torch.optim.SGD(trained, lr=0.02, momentum=0.9, weight_decay=0.05),
        model=model,
        partition_grad=run.stage == 2,
        reduce_bucket_size=40,
        clip_grad_norm=run.clip,
        initial_scale=2.0**10,
    )
    curve = Curve([], [])
    for step in range(STEPS):
        losses = [backward(optimizer, model, run, step, micro, rank) for micro in range(run.micro_batches)]
        curve.losses.append(sum(losses) / len(losses))
        optimizer.step()
        curve.norms.append(float(optimizer.get_grad_norm()))
        optimizer.zero_grad()
    return curve


def backward(optimizer: LowLevelZeroOptimizer, model: nn.Module, run: Run, step: int, micro: int, rank: int) -> float:
    """Run the backward of one micro-batch, and return its loss."""
    loss = loss_of(model, run.dropped(step, rank), step, micro, rank)
    if micro < run.micro_batches - 1:
        with optimizer.no_sync():
            optimizer.backward(loss / run.micro_batches)
    else:
        optimizer.backward(loss / run.micro_batches)
    return loss.item()


def curves_of(rank: int, world_size: int) -> list[Curve]:
    """Train all runs as one rank."""
    return [curve_of(rank, world_size, run) for run in RUNS]


def together(ranks: list[Curve]) -> Curve:
    """Return the curve of the whole batch."""
    losses = [sum(each) / len(ranks) for each in zip(*(curve.losses for curve in ranks), strict=True)]
    return Curve(losses, ranks[0].norms)
