"""What goes wrong beside the main thread: a thread that can't be started, and finalisers within a wait."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.backends.shared_memory import SharedMemory
from lowlevel_zero.communication.pipes import OwnPipe
from tests.support.ranks import run_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))


def made(**options: Any) -> tuple[nn.Sequential, LowLevelZeroOptimizer]:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, LowLevelZeroOptimizer(sgd, model=model, reduce_bucket_size=400, **options)


def train(model: nn.Module, optimizer: LowLevelZeroOptimizer, steps: int = 2) -> list[Tensor]:
    for _ in range(steps):
        optimizer.backward(model(torch.ones(2, 20)).sum())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.verify()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("shared", ["0", "1"], ids=["messages", "shared memory"])
def test_any_one_thread_that_can_t_be_started_changes_no_numbers(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", shared)

    def run(rank: int, world_size: int, failing: int) -> tuple[list[Tensor], int]:
        start: Callable[[threading.Thread], None] = threading.Thread.start
        begun = 0

        def refuse_one(thread: threading.Thread) -> None:
            nonlocal begun
            begun += thread.name.startswith("lowlevel_zero")
            if begun == failing and thread.name.startswith("lowlevel_zero"):
                raise RuntimeError("can't start new thread")
            start(thread)

        if rank == 1:
            threading.Thread.start = refuse_one  # type: ignore[method-assign]
        return train(*made()), begun

    (expected, _), (_, threads) = run_ranks(run, 2, 0)
    assert threads > 0
    for failing in range(1, threads + 1):
        for found, _ in run_ranks(run, 2, failing, timeout=20):
            assert all(map(torch.equal, found, expected)), failing


def test_the_garbage_collector_may_find_an_optimizer_within_another_s_wait() -> None:
    """Its finaliser waits for the gathers under way in the same pipe."""

    def run(rank: int, world_size: int) -> tuple[bool, bool]:
        gc.disable()
        former, other = made(overlap_allgather=True), made(overlap_allgather=True)
        expected = train(*other, steps=1)
        gather = SharedMemory.gather

        def late(*args: Any) -> Any:
            SharedMemory.gather = gather  # type: ignore[method-assign]
            time.sleep(0.3)
            return gather(*args)

        if rank == 1:
            SharedMemory.gather = late  # type: ignore[method-assign, assignment]
        model, optimizer = former
        optimizer.backward(model(torch.ones(2, 20)).sum())
        optimizer.step()
        cycle: list[Any] = [optimizer]
        cycle.append(cycle)
        del former, optimizer, cycle
        wait, collected = OwnPipe.wait, 0

        def collect(pipe: OwnPipe, milliseconds: float) -> bool:
            nonlocal collected
            collected += gc.collect()
            return wait(pipe, milliseconds)

        if rank == 0:
            OwnPipe.wait = collect  # type: ignore[method-assign]
        train(*other)
        return all(map(torch.equal, model.parameters(), expected)), collected > 0

    assert run_ranks(run, 2, timeout=20) == [(True, True), (True, False)]
