"""Where ranks are that use a GPU: one alone, several that share it, and one on each of several GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lowlevel_zero import LowLevelZeroOptimizer
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


# ---- what the device did at the same time ----

# As cuBLAS names them on one generation of GPUs or another.
PRODUCTS = ("gemm", "matmul", "cutlass", "nvjet")


def traced_backward(trace: Path, **options: Any) -> Path:
    """Profile a backward of large products on this rank, after two steps, and write what happened to ``trace``."""
    model = Blocks(width=4096, layers=8).to(DEVICE, torch.bfloat16)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = LowLevelZeroOptimizer(inner, partition_grad=True, reduce_bucket_size=2**24, **options)
    x = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(2):
        optimizer.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        optimizer.backward(model(x))
        torch.cuda.synchronize()
    traced.export_chrome_trace(str(trace))
    return trace


def ran_beside_products(trace: Path, wanted: str) -> bool:
    """Whether any work of the device whose name has ``wanted`` in it ran at the same time as a product of matrices."""
    asked, products = _spans(trace, (wanted,)), _spans(trace, PRODUCTS)
    assert asked
    assert products
    return any(begin < other_end and other < end for begin, end in asked for other, other_end in products)


def _spans(trace: Path, names: tuple[str, ...]) -> list[tuple[float, float]]:
    """Begin and end of the device's work whose name has one of ``names`` in it."""
    events = json.loads(trace.read_text())["traceEvents"]
    device = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy")]
    return [(each["ts"], each["ts"] + each["dur"]) for each in device if any(n in each["name"].lower() for n in names)]
