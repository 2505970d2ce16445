"""Where ranks are that use a GPU: one alone, several that share it, and one on each of several GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero.communication.backends.native import Native
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.oracle import Odd, Run
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks

DEVICE = "cuda"
LONG = 10**8  # cycles that the device sleeps, about 0.05 s: whoever doesn't wait comes too early
GPUS = min(4, torch.cuda.device_count())  # of which tests use so many at most

EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap_allgather": {"overlap_allgather": True},
    "cpu_offload": {"cpu_offload": True},
}


class Blocks(nn.Module):
    """Layers that are large enough for a device to have something to do."""

    def __init__(self, width: int = 512, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


class OnDevice(Odd):
    """The oracle's model on the device, of which the oracle sees nothing."""

    def forward(self, x: Tensor, drop: set[int]) -> Tensor:
        return super().forward(x.to(DEVICE), drop).cpu()


def on_device(run: Run) -> Run:
    return replace(run, model=lambda: OnDevice().to(DEVICE))


def over_nccl(work: Callable[..., Any], *args: Any) -> None:
    """Run ``work`` as the one rank of a group whose collectives go through NCCL all the same."""

    def alone(rank: int, world_size: int) -> None:
        torch.backends.cudnn.allow_tf32 = False
        patch_rank(ShardGroup, "_choose", lambda self, device, fp8=False: Native(dist.group.WORLD))
        work(rank, world_size, *args)
        torch.cuda.synchronize()

    run_ranks(alone, 1, backend="nccl", timeout=100)


def over_gloo(world_size: int, work: Callable[..., Any], *args: Any) -> None:
    """Run ``work`` on ranks that share the device."""

    def shared(rank: int, world_size: int) -> None:
        torch.backends.cudnn.allow_tf32 = False
        work(rank, world_size, *args)
        torch.cuda.synchronize()

    run_ranks(shared, world_size, timeout=100)


def over_gpus(work: Callable[..., Any], *args: Any, ranks: int = GPUS) -> None:
    """Run ``work`` on ranks with a GPU each, over NCCL."""

    def apart(rank: int, world_size: int) -> None:
        torch.backends.cudnn.allow_tf32 = False
        torch.cuda.set_device(rank)
        work(rank, world_size, *args)
        torch.cuda.synchronize()

    run_ranks(apart, ranks, backend="cpu:gloo,cuda:nccl", timeout=100)
