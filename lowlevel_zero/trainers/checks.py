"""Checks of the adapters: models and optimizers must be plain, and nothing else may shard or scale."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..optimizer import LowLevelZeroOptimizer

_OTHER_WAYS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")


def check_plain(handed: object) -> None:
    """Raise ``TypeError`` for a model in DDP, DP or FSDP, a sharded optimizer and accelerate's ``DummyOptim``."""
    if isinstance(handed, LowLevelZeroOptimizer):
        raise TypeError(
            "optimizer: expected a plain torch optimizer, got a LowLevelZeroOptimizer: hand over the one that it "
            "wraps, unwrapped, and its options as zero_options; the trainer shards it once the model is in its place"
        )
    if type(handed).__name__ == "DummyOptim":  # a stand-in of accelerate's for DeepSpeed
        raise TypeError(
            "optimizer: expected a plain torch optimizer, got DummyOptim, which stands for DeepSpeed's: pass one of "
            "torch.optim, and leave DeepSpeed out of accelerate's config"
        )
    if isinstance(handed, DistributedDataParallel | DataParallel | FullyShardedDataParallel):
        raise TypeError(
            f"model: expected the bare module, got {type(handed).__name__}, which would reduce or shard a second time: "
            "hand over the module that it wraps, and make the optimizer from that one's parameters"
        )


def check_loss_scales(optimizers: Sequence[Optimizer], forced_dtype: torch.dtype | None = None) -> None:
    """Raise ``ValueError`` if there are several optimizers, and one of them scales the loss, or will once sharded.

    ``forced_dtype``: the option by which plain ones are sharded.
    """
    if len(optimizers) > 1 and any(_scales(each, forced_dtype) for each in optimizers):
        raise ValueError(
            "expected one optimizer where parameters are fp16, since it scales the loss, got several: use bf16, or one "
            "optimizer with several param groups"
        )


def _scales(optimizer: Optimizer, forced_dtype: torch.dtype | None) -> bool:
    if isinstance(optimizer, LowLevelZeroOptimizer):
        return optimizer.scaler is not None
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    return any((forced_dtype or p.dtype) == torch.float16 for p in trained)


def check_accelerator(accelerator: Any) -> None:
    """Raise if accelerate itself would shard, scale or compress, or sees fewer or more processes than were launched."""
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision: expected 'no' or 'bf16', got {accelerator.mixed_precision!r}, whose GradScaler would "
            "look for gradients before they are reduced: take 'bf16'; or 'no' and a model in fp16, whose loss is scaled"
        )
    others = [name for name in _OTHER_WAYS if os.environ.get(name, "false").lower() == "true"]
    if others or accelerator.parallelism_config is not None:
        raise ValueError(
            f"expected no other way to shard, got {(others or ['parallelism_config'])[0]}: leave the plugin out, and "
            "choose multi-GPU or multi-CPU without one where accelerate is configured or launched"
        )
    ddp = accelerator.ddp_handler
    if ddp is not None and ddp.comm_hook.value != "no":
        raise ValueError(
            f"comm_hook: expected none, since there is no DDP to have it, got {ddp.comm_hook}: pass "
            "zero_options=dict(communication_dtype=torch.bfloat16), say"
        )
    launched = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise RuntimeError(
            f"expected the {launched} processes that were launched, got an Accelerator of {accelerator.num_processes}: "
            "start it with torchrun or accelerate launch, and on CPUs pass cpu=True (transformers: use_cpu=True)"
        )
