"""The short runs whose losses and gradient norms are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer

from .model import FOLDER, Small, loss_of

CURVES = FOLDER / "curves.json"
RANKS = 2
STEPS = 8


@dataclass(frozen=True)
class Run:
    """A short run.

    Attributes:
        accumulation: ``"once"``, or three micro-batches a step, ``"synced"`` each or under ``"no_sync"``.
        drop: whether layers are dropped, at times by one rank and at times by both.
        clip: the largest norm; 0: none.
    """

    stage: int
    dtype: str
    accumulation: str
    drop: bool
    clip: float

    @property
    def label(self) -> str:
        drop, clip = "drop" if self.drop else "whole", "clip" if self.clip else "unclipped"
        return f"stage {self.stage}, {self.dtype}, {self.accumulation}, {drop}, {clip}"

    @property
    def micro_batches(self) -> int:
        return 1 if self.accumulation == "once" else 3

    def dropped(self, step: int, rank: int) -> set[int]:
        """By both ranks the second layer in every third step, else by each rank another one."""
        if not self.drop:
            return set()
        return {1} if step % 3 == 2 else {(step + rank) % 2}


# Any two settings of different columns meet (of accumulation: one or three micro-batches).
RUNS = [
    Run(1, "float32", "once", False, 0.5),
    Run(2, "float32", "no_sync", True, 0.0),
    Run(1, "bfloat16", "once", True, 0.0),
    Run(2, "bfloat16", "synced", False, 0.5),
    Run(1, "float16", "no_sync", False, 0.0),
    Run(2, "float16", "once", True, 0.5),
]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


@dataclass(frozen=True)
class Mistake:
    """What a run may do wrong."""

    rank_left_out: bool = False
    factor: float = 1.0
    micro_batch_lost: bool = False
    step_skipped: bool = False
    zeros_for_dropped: bool = False
    clipping_forgotten: bool = False


NONE = Mistake()


@dataclass
class Curve:
    """By step the mean loss, and the gradient's norm before clipping."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def curve_of(rank: int, world_size: int, run: Run, optimizer: str, mistake: Mistake = NONE) -> Curve:
    """One rank's: its own losses, everybody's norms."""
    model = Small().to(getattr(torch, run.dtype))
    zero = LowLevelZeroOptimizer(
        OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad]),
        model=model,
        partition_grad=run.stage == 2,
        reduce_bucket_size=40,
        clip_grad_norm=0.0 if mistake.clipping_forgotten else run.clip,
        initial_scale=2.0**10,
    )
    curve = Curve()
    for step in range(STEPS):
        losses = [_backward(zero, model, run, (step, micro, rank), mistake) for micro in range(run.micro_batches)]
        curve.losses.append(sum(losses) / len(losses))
        if not (mistake.step_skipped and step == 1):
            zero.step()
        curve.norms.append(float(zero.get_grad_norm()))
        zero.zero_grad()
    return curve


def together(ranks: list[Curve]) -> Curve:
    """That of the whole batch."""
    losses = [sum(each) / len(ranks) for each in zip(*(curve.losses for curve in ranks), strict=True)]
    return Curve(losses, ranks[0].norms)


def _backward(
    zero: LowLevelZeroOptimizer, model: nn.Module, run: Run, place: tuple[int, int, int], mistake: Mistake
) -> float:
    """One micro-batch; returns its loss."""
    step, micro, rank = place
    loss = loss_of(model, run.dropped(step, rank), step, micro, rank)
    told, last = loss.item(), micro == run.micro_batches - 1
    if mistake.rank_left_out:
        loss = loss_of(model, run.dropped(step, 0), step, micro, 0)
    if mistake.zeros_for_dropped:
        loss = loss + 0.0 * _all_of([p for p in model.parameters() if p.requires_grad])
    loss = loss * (mistake.factor / run.micro_batches)
    if mistake.micro_batch_lost and micro == 1:
        loss = loss * 0.0
    if run.accumulation == "no_sync" and not last:
        with zero.no_sync():
            zero.backward(loss)
    else:
        zero.backward(loss)
    return told


def _all_of(parameters: list[nn.Parameter]) -> Tensor:
    return torch.stack([p.float().sum() for p in parameters]).sum()
