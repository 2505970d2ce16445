"""The run that the golden checkpoints are of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.accessors import safe_get_full_fp32_param

from .model import FOLDER, Small, loss_of

FORMAT_1 = FOLDER / "format-1"
WRITERS = {"fp32": 3, "bf16": 3, "wrapped": 1}  # ranks
SHARES = 12  # of each batch: whatever the number of ranks, all train on the same data
STEPS = 3  # before the save
EXTRA = {"step": STEPS, "losses": [0.5, 0.25], "tensor": torch.arange(3), "text": "ja", "nested": {"of": (1, None)}}


def build(kind: str, seed: int = 0) -> nn.Module:
    """``"wrapped"``: of fp32, the first layer recomputes its activations, and the second one is compiled."""
    model = Small(seed).to(torch.bfloat16 if kind == "bf16" else torch.float32)
    if kind == "wrapped":
        model.layers[0] = checkpoint_wrapper(model.layers[0], CheckpointImpl.NO_REENTRANT)
        model.layers[1] = torch.compile(model.layers[1])
    return model


def plain(name: str) -> str:
    """A name without what wrappers put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


@dataclass
class Saved:
    """What is saved together, and how it goes on."""

    model: nn.Module
    optimizer: LowLevelZeroOptimizer
    scheduler: Any

    @classmethod
    def start(cls, model: nn.Module, stage: int = 2) -> Saved:
        deep = [p for p in model.parameters() if p.dim() == 2]
        flat = [p for p in model.parameters() if p.dim() < 2]
        inner = torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": deep}], lr=0.02, weight_decay=0.1)
        optimizer = LowLevelZeroOptimizer(
            inner, model=model, partition_grad=stage == 2, reduce_bucket_size=40, clip_grad_norm=1.0
        )
        return cls(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5))

    def step(self, at: int, drop: set[int], rank: int, world_size: int) -> None:
        losses = [loss_of(self.model, drop, at, 0, share) for share in range(rank, SHARES, world_size)]
        self.optimizer.backward(torch.stack(losses).mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def until_saved(self, rank: int, world_size: int) -> None:
        """The second layer is dropped in all steps."""
        for at in range(STEPS):
            self.step(at, {1}, rank, world_size)
        self.model.counter.count = STEPS
        self.model.seen.add_(1.0)
        self.optimizer.param_groups[0]["weight_decay"] = 0.125

    def one_more(self, rank: int, world_size: int) -> None:
        """The second layer's first gradient; it stays dropped where it would have to be compiled."""
        self.step(STEPS, {1} if hasattr(self.model.layers[1], "_orig_mod") else set(), rank, world_size)

    def whole(self) -> dict[str, Any]:
        """Copies of all that is held, as whole tensors, by the plain model's names; every rank calls it."""
        return {
            "model": {plain(name): _copied(value) for name, value in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": dict(self.scheduler.state_dict()),
        }

    def masters(self) -> Tensor:
        """The fp32 values of all trained parameters, end to end; every rank calls it."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return torch.cat([safe_get_full_fp32_param(p).flatten() for p in trained])


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
