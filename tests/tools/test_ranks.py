"""The helper that starts ranks: what it returns, and what it says when a rank fails, dies or hangs."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import rank_process
from tests.support.ranks import run_cases, run_cases_expecting, run_ranks, run_ranks_expecting


def test_ranks_share_a_process_group_and_return_tensors_of_any_dtype() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]

    def make(rank: int, world_size: int) -> tuple[float, list[torch.Tensor]]:
        total = torch.full((), float(rank))
        dist.all_reduce(total)
        return total.item(), [torch.arange(rank, 5).to(dtype) for dtype in dtypes]

    for world_size in (1, 3):
        for rank, (total, rows) in enumerate(run_ranks(make, world_size)):
            assert total == sum(range(world_size))
            for row, dtype in zip(rows, dtypes, strict=True):
                assert row.dtype == dtype
                assert torch.equal(row, torch.arange(rank, 5).to(dtype))


def test_a_failure_is_told_with_its_traceback_and_ends_the_others_soon() -> None:
    def fail_or_wait(rank: int, world_size: int) -> None:
        if rank == 1:
            raise ValueError("these are the wrong numbers")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"^rank 1 of 2 failed:\nTraceback") as e:
        run_ranks(fail_or_wait, 2)
    assert time.monotonic() - start < 10
    assert re.search("(?s)in fail_or_wait.*rank 0 was still running.*in barrier", str(e.value))
    assert "ValueError: these are the wrong numbers" in str(e.value)
    with pytest.raises(AssertionError, match="UserWarning: look here"):
        run_ranks(lambda rank, world_size: warnings.warn("look here", stacklevel=1), 1)


def test_ranks_that_hang_are_named_in_time() -> None:
    def hang(rank: int, world_size: int) -> None:
        if rank != 1:
            dist.barrier()

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"these ranks hung \(timeout 1 s\): 0, 2\n") as caught:
        run_ranks(hang, 3, timeout=1.0)
    assert time.monotonic() - start < 10
    assert len(re.findall(r"rank [02] was at:\n.*?in hang", str(caught.value), re.DOTALL)) == 2


def test_an_expected_mistake_is_returned_for_each_rank_and_one_that_misses_it_is_named() -> None:
    def refuse(rank: int, world_size: int, misses: int) -> str:
        if rank != misses:
            raise TypeError(f"rank {rank} wants floats")
        return "fine"

    errors = run_ranks_expecting(refuse, 2, 7)
    told = [("TypeError", f"rank {rank} wants floats") for rank in range(2)]
    assert [(error.type, error.message) for error in errors] == told
    with pytest.raises(AssertionError, match="rank 1 did not raise, but returned 'fine'\nrank 0 raised TypeError: "):
        run_ranks_expecting(refuse, 2, 1)


# Many cases in one launch.


def test_cases_share_their_processes_and_nothing_else() -> None:
    def draw(rank: int, world_size: int, base: int, factor: int) -> tuple[int, float, float, float]:
        total = torch.full((1,), float(base + rank))
        dist.all_reduce(total)
        return os.getpid(), total.item() * factor, torch.rand(1).item(), random.random()

    cases = [(10, 1), (20, 1), (30, 2)]
    ran = run_cases(draw, 2, cases)
    assert [case for case, _ in ran] == cases
    torch.manual_seed(0)
    random.seed(0)
    seeds = (torch.rand(1).item(), random.random())
    values = [each.values() for _, each in ran]
    assert [[value[1:] for value in ranks] for ranks in values] == [
        [(total, *seeds)] * 2 for total in (21.0, 41.0, 122.0)
    ]
    assert len({value[0] for ranks in values for value in ranks}) == 2


def test_a_case_that_fails_hangs_or_kills_a_rank_ends_the_launch_alone() -> None:
    def misbehave(rank: int, world_size: int, how: str) -> tuple[str, int]:
        if rank == 0 and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and how == "hang":
            time.sleep(600)
        if rank == 1 and how == "fail":
            raise ValueError("these are the wrong numbers")
        dist.barrier()
        return how, os.getpid()

    hows = ["a", "die", "b", "hang", "c", "fail", "d"]
    told = {
        "die": (AssertionError, r"(?s)rank 0 of 2 failed.*SIGKILL"),
        "hang": (TimeoutError, r"(?s)these ranks hung \(timeout 2 s\): 0, 1\n.*in misbehave"),
        "fail": (
            AssertionError,
            r"(?s)rank 1 of 2 failed.*in misbehave.*ValueError: these.*rank 0 was still running",
        ),
    }
    pids = []
    for (how,), ran in run_cases(misbehave, 2, [(how,) for how in hows], timeout=2.0):
        if how in told:
            with pytest.raises(told[how][0], match=told[how][1]):
                ran.values()
        else:
            assert [own for own, _ in ran.values()] == [how] * 2
            pids += [pid for _, pid in ran.values()]
    assert len(set(pids)) == 8


def test_cases_that_every_rank_refuses_go_on_in_the_same_launch() -> None:
    pids = []

    def refuse(rank: int, world_size: int, number: int) -> None:
        total = torch.zeros(3)
        dist.all_reduce(total, async_op=True)  # under way while it raises
        if number == 1 and rank == 1:
            time.sleep(0.2)
        raise TypeError(f"{number} from {rank} in {os.getpid()}")

    for (number,), ran in run_cases_expecting(refuse, 2, [(0,), (1,), (2,)]):
        for rank, error in enumerate(ran.raised()):
            what, pid = error.message.split(" in ")
            assert (error.type, what) == ("TypeError", f"{number} from {rank}")
            pids.append(pid)
    assert len(set(pids)) == 2


LEAVINGS: dict[str, Callable[[], Any]] = {
    "environment": lambda: os.environ.update(LEFT="1"),
    "working folder": lambda: os.chdir("/"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "intra-op threads": lambda: torch.set_num_threads(2),
    "threads": lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(),
    "optimizers alive": lambda: setattr(dist, "left", torch.optim.SGD([torch.zeros(1, requires_grad=True)])),
}


def test_what_a_case_leaves_behind_is_its_failure_and_does_not_reach_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "PATIENCE", 0.1)

    def leave(rank: int, world_size: int, what: str) -> None:
        if what in LEAVINGS and rank == 1:
            LEAVINGS[what]()

    cases = [(name,) for what in LEAVINGS for name in (what, "nothing")]
    for (what,), ran in run_cases(leave, 2, cases, init=False):
        if what == "nothing":
            assert ran.values() == [None, None]
        else:
            with pytest.raises(AssertionError, match=f"rank 1 of 2 failed:\nleft behind: {what}: "):
                ran.values()
