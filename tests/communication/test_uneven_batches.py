"""A rank has run out of batches and left, or has failed: the others name it, and are told what to do in both cases."""

from __future__ import annotations

import multiprocessing
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lowlevel_zero.communication.failed_ranks import LostRank
from tests.support.mortal import build, loss_of
from tests.support.warm_up import warm_up

LOST = re.compile(r"expected all ranks, lost (the connection to )?ranks? ([02], )?1\b")
REMEDIES = "If that rank ran out of batches, give every rank the same number", "start all ranks again"
TIMEOUT = 60.0


@pytest.fixture(params=["shared memory", "messages"], autouse=True)
def _wires(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWLEVEL_ZERO_SHARED_MEMORY", str(int(request.param == "shared memory")))


def train(rank: int, world_size: int, leave: Callable[[], None], folder: Path) -> None:
    """Rank 1 has two batches, the others have four, and write down what they are told."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    model, _, optimizer = build()
    try:
        for step in range(2 if rank == 1 else 4):
            optimizer.backward(loss_of(model, step, rank, world_size))
            optimizer.step()
            optimizer.zero_grad()
    except LostRank as error:
        (folder / str(rank)).write_text(str(error))
        raise
    if rank == 1:
        leave()


def told(leave: Callable[[], None], folder: Path) -> list[str]:
    """Return what ranks 0 and 2 are told when rank 1 leaves by ``leave``; nobody catches its error."""
    warm_up()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=train, args=(rank, 3, leave, folder)) for rank in range(3)]
    for each in ranks:
        each.start()
    deadline = time.monotonic() + TIMEOUT
    for each in ranks:
        each.join(deadline - time.monotonic())
        each.kill()
    return [(folder / str(rank)).read_text() for rank in (0, 2)]


def at_once() -> None:
    """The process ends with its group."""


def by_exit() -> None:
    sys.exit()


def at_leisure() -> None:
    """It destroys its group, as scripts do in the end, and has something else to do for a while."""
    dist.destroy_process_group()
    time.sleep(2)


def fail() -> None:
    raise ValueError("a mistake")


def fail_and_destroy() -> None:
    try:
        fail()
    finally:
        dist.destroy_process_group()


def exit_by_an_error() -> None:
    sys.exit("a mistake")


@pytest.mark.parametrize("leave", [at_once, by_exit, at_leisure, fail, fail_and_destroy, exit_by_an_error])
def test_a_rank_that_ends_is_named(leave: Callable[[], None], tmp_path: Path) -> None:
    for message in told(leave, tmp_path):
        assert LOST.search(message), message
        assert all(remedy in message for remedy in REMEDIES)
