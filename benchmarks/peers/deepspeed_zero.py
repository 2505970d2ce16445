"""DeepSpeed's ZeRO, stages 1 and 2, around torch's own AdamW."""

from __future__ import annotations

import os

# Before the import: what it would otherwise look for, and build.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..gpt import SIZES
from .peer import Peer, Setting, account, adamw

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed
    import deepspeed.comm.torch

# Its all-reduce through shared memory is for inference alone, and would be compiled at the first use.
deepspeed.comm.torch.build_shm_op = lambda: None

# Elements. Of 5e6, 25e6 and its default of 5e8, which is one bucket for the whole model, the first was the fastest on a
# CPU. On CUDA the default.
_BUCKETS = {"cpu": 5_000_000, "cuda": 500_000_000}


class DeepSpeedZeRO(Peer):
    """``deepspeed.initialize`` with a client optimizer; the engine divides by the micro-batches, and zeroes.

    Args:
        setting: what all have in common.
        stage: 1 or 2.
    """

    def __init__(self, setting: Setting, stage: int) -> None:
        model = setting.model()
        super().__init__(*initialized(model, adamw(model.parameters()), setting, stage))

    def forward_backward(self, batches: Sequence[Tensor]) -> Tensor:
        """The engine counts micro-batches: ``step`` after each, which steps after the last."""
        total = torch.zeros((), device=batches[0].device)
        for number, batch in enumerate(batches, start=1):
            loss = self.model(batch)
            self.model.backward(loss)
            if number < len(batches):
                self.model.step()
            total += loss.detach() / len(batches)
        return total

    def step(self) -> None:
        """Through the engine."""
        self.model.step()

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """What the engine leads to."""
        return account(self.model, self.optimizer.optimizer)


def initialized(model: nn.Module, optimizer: Optimizer, setting: Setting, stage: int) -> tuple[Any, Any]:
    """Return the engine around ``model`` and its optimizer."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as a launcher would
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    engine, sharded, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=_config(setting, stage), dist_init_required=False
    )
    return engine, sharded


def _config(setting: Setting, stage: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": SIZES[setting.size].batch,
        "gradient_accumulation_steps": setting.micro_batches,
        "bf16": {"enabled": setting.dtype == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": _BUCKETS[setting.device],
            "allgather_bucket_size": _BUCKETS[setting.device],
            "overlap_comm": setting.device == "cuda",  # of its streams
        },
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
