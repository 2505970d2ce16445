"""What the checkpoint tests share: a run whose data doesn't depend on the world size, and whole states to compare."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.tensor  # here once, not in every forked rank
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.oracle import Drop, Run, adamw, batch, build, groups
from tests.support.several import told

SHARES = 12  # of each batch: every world size here divides it, so that all see the same data
BEFORE, AFTER = range(2), range(2, 4)  # steps before the save, in which layer 2 has no state yet, and after it


@dataclass(frozen=True)
class Training:
    """A kind of run that is saved and resumed."""

    stage: int = 2
    dtype: torch.dtype = torch.float32
    bucket: int = 50
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        drop: Drop = lambda step, rank: {2} if step in BEFORE else set()  # noqa: E731
        return Run(SHARES, dtype=self.dtype, drop=drop, optimizer=adamw)

    def start(self, seed: int = 0) -> Pair:
        model = build(replace(self.run, seed=seed))
        optimizer = LowLevelZeroOptimizer(
            self.run.optimizer(groups(model)),
            model=model,
            partition_grad=self.stage == 2,
            reduce_bucket_size=self.bucket,
            clip_grad_norm=0.5,
            **self.options,
        )
        return Pair(self, model, optimizer)


@dataclass
class Pair:
    """A model and its optimizer."""

    training: Training
    model: nn.Module
    optimizer: LowLevelZeroOptimizer

    def train(self, steps: range, rank: int, world_size: int) -> Pair:
        run = self.training.run
        for step in steps:
            shares = [batch(run, step, 0, share) for share in range(rank, SHARES, world_size)]
            x, y = (torch.cat(parts) for parts in zip(*shares, strict=True))
            self.optimizer.backward((self.model(x, run.drop(step, rank)) - y).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def whole(self) -> dict[str, Any]:
        """Copies of all that the two hold, as whole tensors. Every rank calls it."""
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {"model": model, "optimizer": self.optimizer.state_dict()}


def differences(expected: Any, got: Any, tolerance: float = 0.0, at: str = "") -> list[str]:
    """Where two nests of dicts, lists and tensors differ."""
    if isinstance(expected, dict) and isinstance(got, dict):
        if expected.keys() != got.keys():
            return [f"{at}: keys {sorted(map(str, expected.keys() ^ got.keys()))}"]
        return [line for key in expected for line in differences(expected[key], got[key], tolerance, f"{at}.{key}")]
    if isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)) and len(expected) == len(got):
        pairs = enumerate(zip(expected, got, strict=True))
        return [line for place, (one, two) in pairs for line in differences(one, two, tolerance, f"{at}[{place}]")]
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        alike = expected.shape == got.shape and expected.dtype == got.dtype
        same = torch.allclose(expected, got, 0.0, tolerance) if alike and tolerance else torch.equal(expected, got)
        return [] if alike and same else [f"{at}: {expected} and {got}"]
    return [] if type(expected) is type(got) and expected == got else [f"{at}: {expected!r} and {got!r}"]


def check_same(expected: Any, got: Any, at: str = "", tolerance: float = 0.0) -> None:
    """Check that two nests of dicts, lists and tensors differ nowhere."""
    found = differences(expected, got, tolerance, at)
    assert not found, found


def wait_for_pruning() -> None:
    """Return when no thread of any rank removes older checkpoints any more. Every rank calls it."""
    for thread in threading.enumerate():
        if thread.name == "lowlevel_zero pruning":
            thread.join()
    dist.barrier()


def logged() -> AbstractContextManager[list[str]]:
    """What the package logs within, as LEVEL: message."""
    return told(logging.INFO, levels=True)
