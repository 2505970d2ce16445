"""What an optimizer with hybrid sharding leaves behind: no thread."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace

from tests.support.grid import Grid
from tests.support.oracle import Run, train_sharded
from tests.support.ranks import run_ranks


def test_threads_end_with_their_optimizer() -> None:
    def train(rank: int, world_size: int) -> list[str]:
        run = replace(Run(world_size), steps=2).with_options(**Grid.of(rank, (2, 2)).options("hybrid"))
        train_sharded(rank, world_size, run)
        deadline = time.monotonic() + 10
        while threading.active_count() > 1 and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        return [thread.name for thread in threading.enumerate()]

    assert run_ranks(train, 4) == [["MainThread"]] * 4
