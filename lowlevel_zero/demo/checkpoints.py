"""A run's checkpoints: when one is due, what it must have for the run to go on exactly, and which one fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from .. import LowLevelZeroOptimizer
from ..checkpoint import latest, load_checkpoint, save_checkpoint
from .history import History
from .options import Options

# What makes a run what it is. The stage, the device and the number of ranks may change.
IDENTITY = (
    *("layers", "width", "heads", "context", "layer_drop", "layer_drop_per_rank"),
    *("steps", "batch", "accumulation", "lr", "clip", "seed"),
)


class Checkpoints:
    """The checkpoints of one run: directories ``step-N`` in one folder."""

    def __init__(self, options: Options, dtype: str) -> None:
        self.folder = options.checkpoint_dir
        self._options = options
        self._identity = {"dtype": dtype, **{name: getattr(options, name) for name in IDENTITY}}

    def due(self, step: int) -> bool:
        """Whether to save after ``step``: every so often, and at the end; never for plain DDP."""
        every = self._options.save_every
        return bool(every and self._options.stage) and (step % every == 0 or step == self._options.steps)

    def save(
        self, step: int, history: History, model: nn.Module, optimizer: LowLevelZeroOptimizer, schedule: LRScheduler
    ) -> None:
        """Write ``step-N``; every rank calls it."""
        extra = {"step": step, "identity": self._identity, "history": asdict(history)}
        path = self.folder / f"step-{step}"
        save_checkpoint(path, model, optimizer, scheduler=schedule, extra=extra, keep=self._options.keep)

    def newest(self) -> Path | None:
        """The newest whole checkpoint; None where there is none yet."""
        return latest(self.folder)

    def load(
        self, path: Path, model: nn.Module, optimizer: LowLevelZeroOptimizer, schedule: LRScheduler
    ) -> tuple[int, History]:
        """Load a checkpoint; every rank calls it. Returns how many steps were done, and what is remembered of them.

        Raises:
            ValueError: it is of a run with other options.
        """
        extra = load_checkpoint(path, model, optimizer, scheduler=schedule)
        self._refuse_another(path, extra)
        return extra["step"], History(**extra["history"])

    def _refuse_another(self, path: Path, extra: Any) -> None:
        saved = extra.get("identity") if isinstance(extra, Mapping) else None
        if not isinstance(saved, Mapping):
            raise ValueError(f"--resume: {path} is not one of the demo's checkpoints")
        for name, own in self._identity.items():
            if saved.get(name) != own:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"--resume: {path} is of a run with {option} {saved.get(name)}, this one has {own}: "
                    "give the same options, or another --checkpoint-dir"
                )
