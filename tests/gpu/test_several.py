"""On several GPUs, one a rank, over NCCL: who waits for whom, and that no memory is used too early.

Collected where there are several GPUs (see ``conftest.py``).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.gpu.places import DEVICE, EXTRAS, GPUS, LONG, Blocks, over_gpus, ran_beside_products, traced_backward
from tests.support.grid import Grid
from tests.support.numbers import STAGES
from tests.support.oracle import momentum
from tests.support.ranks import run_ranks


def train(model: nn.Module, optimizer: LowLevelZeroOptimizer, rank: int, steps: int, late: bool = False) -> None:
    """Two micro-batches a step; where ``late``, each rank's device is held up now and then, at times of its own."""
    device = next(model.parameters()).device
    for step in range(steps):
        for micro_batch in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro_batch)
            x = torch.randn(16, 512, generator=generator).to(device)
            if late and (step + micro_batch + rank) % 3 == 0:
                torch.cuda._sleep(LONG)
            optimizer.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_computing_waits_for_no_reduction(stage: str) -> None:
    """A rank whose peers come seconds later has long computed its backward."""

    def work(rank: int, world_size: int) -> None:
        model = Blocks().to(DEVICE)
        options = {"reduce_bucket_size": 2**18, **STAGES[stage]}
        optimizer = LowLevelZeroOptimizer(momentum(model.parameters()), **options)
        train(model, optimizer, rank, steps=3)
        loss = model(torch.ones(16, 512, device=DEVICE))
        torch.cuda.synchronize()
        dist.barrier()
        if rank > 0:
            time.sleep(4)
        begin, computed = time.monotonic(), torch.cuda.Event()
        optimizer.backward(loss)
        computed.record()
        computed.synchronize()
        assert time.monotonic() - begin < 2
        optimizer.step()

    over_gpus(work)


def test_backward_goes_on_while_gradients_are_reduced(tmp_path: Path) -> None:
    """One rank's reduction is a copy that NCCL may leave out, so that one GPU can't tell."""

    def work(rank: int, world_size: int) -> None:
        trace = traced_backward(tmp_path / f"trace-{rank}.json")
        assert ran_beside_products(trace, "nccl")

    over_gpus(work)


@pytest.mark.parametrize("form", ["flat", *(["pair", "hybrid"] if GPUS >= 4 else [])])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("stage", STAGES)
def test_what_runs_beside_changes_no_bit(stage: str, extra: str, form: str) -> None:
    """Memory that was given away before its last reader had come would show."""

    def work(rank: int, world_size: int) -> None:
        grid = {} if form == "flat" else Grid.of(rank, (world_size // 2, 2)).options(form)
        found: list[list[Tensor]] = []
        for overlaps in (False, True):
            torch.manual_seed(0)
            model = Blocks().to(DEVICE)
            wrapped = momentum(model.parameters())
            options: dict[str, Any] = {**STAGES[stage], **EXTRAS[extra], **grid, "reduce_bucket_size": 2**18}
            optimizer = LowLevelZeroOptimizer(wrapped, overlap_communication=overlaps, **options)
            train(model, optimizer, rank, steps=12, late=overlaps)
            found.append([p.detach().clone() for p in model.parameters()])
        assert all(map(torch.equal, *found))

    over_gpus(work, ranks=GPUS // 2 * 2)


def test_devices_are_the_parameters_and_not_the_current_one(tmp_path: Path) -> None:
    """``init_process_group(device_id=...)`` without ``torch.cuda.set_device``."""

    def work(rank: int, world_size: int) -> None:
        own = torch.device(DEVICE, rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", f"file://{tmp_path}/meeting", rank=rank, world_size=world_size, device_id=own
        )
        for extra in EXTRAS.values():
            model = Blocks().to(own)
            optimizer = LowLevelZeroOptimizer(momentum(model.parameters()), model=model, partition_grad=True, **extra)
            train(model, optimizer, rank, steps=3)
            optimizer.verify()
        assert torch.cuda.current_device() == 0
        assert rank == 0 or torch.cuda.memory_reserved(0) == 0
        torch.cuda.synchronize(own)

    run_ranks(work, 2, init=False, timeout=100)
