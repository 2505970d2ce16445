"""Ranks of other kinds than the tests' own: with several threads, started by spawn, many, and of compiled models."""

from __future__ import annotations

import io
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.judging import check_run
from tests.support.oracle import Odd, Result, Run, train_sharded
from tests.support.ranks import run_ranks

WIDE = 190  # from 2**15 elements on, torch shares an operation out among threads
RUN = Run(2, steps=3, drop=lambda step, rank: {(step + rank) % 3}, clip=0.3)


def test_two_threads_compute_in_each_rank() -> None:
    run = replace(RUN, model=lambda: Odd(WIDE)).with_options(partition_grad=True)

    def work(rank: int, world_size: int) -> Result:
        torch.set_num_threads(2)
        assert torch.get_num_threads() == 2
        return train_sharded(rank, world_size, run)

    check_run(run, run_ranks(work, 2), 5e-6)


@pytest.mark.soak
@pytest.mark.parametrize("stage", [1, 2])
def test_eight_ranks(stage: int) -> None:
    run = replace(RUN, world_size=8).with_options(partition_grad=stage == 2, reduce_bucket_size=50)
    check_run(run, run_ranks(train_sharded, 8, run, timeout=100))


def train_spawned(rank: int, world_size: int, meet: str) -> bytes:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=world_size)
    result = train_sharded(rank, world_size, RUN)
    dist.destroy_process_group()
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


@pytest.mark.soak
def test_ranks_that_were_spawned(tmp_path: Path) -> None:
    """They begin with nothing of their parent's."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        ranks = [pool.submit(train_spawned, rank, 2, str(tmp_path / "meeting")) for rank in range(2)]
        results = [torch.load(io.BytesIO(rank.result(timeout=100)), weights_only=True) for rank in ranks]
    check_run(RUN, results)


class Compiled(Odd):
    """All of whose layers are compiled, by the compiler that users have."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.forward = torch.compile(partial(_forward, layer))


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_that_inductor_compiles(overlap: bool, tmp_path: Path) -> None:
    run = RUN.with_options(partition_grad=True, overlap_allgather=overlap)

    def work(rank: int, world_size: int) -> tuple[Result, int]:
        from torch._dynamo.utils import counters

        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / str(rank))
        result = train_sharded(rank, world_size, replace(run, model=Compiled))
        return result, counters["inductor"]["fxgraph_cache_miss"]

    ranks = run_ranks(work, 2, timeout=250)
    assert all(compiled > 0 for _, compiled in ranks)
    check_run(run, [result for result, _ in ranks])
