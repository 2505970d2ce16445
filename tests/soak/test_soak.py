"""Long runs: memory stays flat, nothing is left open, and the numbers are the oracle's."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
import torch.distributed.tensor  # here once, not in every forked rank

from tests.support.ranks import run_ranks
from tests.support.soak import Held, Soak, train_alone, train_rank

pytestmark = pytest.mark.soak

WAYS = {
    "stage 1": Soak(world_size=4),
    "stage 2": Soak(options={"partition_grad": True, "reduce_bucket_size": 100}),
    "messages": Soak(shared_memory=False, options={"partition_grad": True}),
    "overlapped gathers": Soak(options={"overlap_allgather": True, "reduce_bucket_size": 100}),
}


def check(soak: Soak, folder: Path, timeout: float) -> None:
    expected = train_alone(soak)
    reports = run_ranks(train_rank, soak.world_size, soak, str(folder), init=False, timeout=timeout)
    for report in reports:
        for name, value in expected.parameters.items():
            torch.testing.assert_close(report.outcome.parameters[name], value, rtol=1e-6, atol=1e-8)
        assert report.outcome.norms == pytest.approx(expected.norms, rel=1e-6)  # Adam hides a factor, and clipping too
        assert report.after == report.before
        assert bool(report.during.mapped) == soak.shared_memory
        assert report.growth("resident") < 0.01
        assert report.growth("objects") < 0.01


@pytest.mark.parametrize("way", ["stage 2", "messages"])
def test_a_short_run(way: str, tmp_path: Path) -> None:
    check(replace(WAYS[way], steps=60, measure_every=5, save_every=15), tmp_path, timeout=60)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_a_long_run(way: str, tmp_path: Path) -> None:
    check(WAYS[way], tmp_path, timeout=1700)


@pytest.mark.parametrize("what", ["file", "thread", "memory"])
def test_what_stays_open_would_show(what: str) -> None:
    before = Held.now()
    with ExitStack() as stack:
        if what == "file":
            stack.enter_context(open(os.devnull))
        elif what == "thread":
            stop = threading.Event()
            stack.callback(stop.set)
            threading.Thread(target=stop.wait).start()
        else:
            file = os.memfd_create("held")
            os.ftruncate(file, 4096)
            stack.enter_context(mmap(file, 4096))
            os.close(file)
        assert Held.now() != before
