"""The helper that starts ranks: what it returns, and what it says when a rank fails, dies or hangs."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.ranks import run_ranks, run_ranks_expecting


def _sum_of_ranks(rank: int, world_size: int) -> torch.Tensor:
    total = torch.full((3,), float(rank))
    dist.all_reduce(total)
    return total


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_a_process_group(world_size: int) -> None:
    expected = torch.full((3,), float(sum(range(world_size))))
    for total in run_ranks(_sum_of_ranks, world_size):
        assert torch.equal(total, expected)


def test_results_come_in_rank_order() -> None:
    def late_first(rank: int, world_size: int, base: int) -> int:
        time.sleep(0.1 * (world_size - rank))
        return base + rank

    assert run_ranks(late_first, 3, 10) == [10, 11, 12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_come_back_in_any_dtype(dtype: torch.dtype) -> None:
    def make(rank: int, world_size: int) -> dict[str, list[torch.Tensor]]:
        return {"rows": [torch.arange(5).to(dtype), torch.tensor(rank).to(dtype)]}

    for rank, result in enumerate(run_ranks(make, 2)):
        row, scalar = result["rows"]
        assert row.dtype == dtype
        assert torch.equal(row, torch.arange(5).to(dtype))
        assert torch.equal(scalar, torch.tensor(rank).to(dtype))


def test_large_results_do_not_block() -> None:
    results = run_ranks(lambda rank, world_size: torch.full((2**21,), float(rank)), 2)
    assert [result.mean().item() for result in results] == [0.0, 1.0]


def test_backward_in_the_parent_does_not_hurt_the_ranks() -> None:
    def gradient(rank: int, world_size: int) -> torch.Tensor:
        weight = torch.ones(200, 200, requires_grad=True)
        (weight @ weight).sum().backward()
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
        return weight.grad

    (expected,) = run_ranks(gradient, 1)
    weight = torch.ones(200, 200, requires_grad=True)
    (weight @ weight).sum().backward()
    for result in run_ranks(gradient, 2):
        assert torch.equal(result, 2 * expected)


def test_parent_has_no_process_group() -> None:
    assert run_ranks(lambda rank, world_size: dist.is_initialized(), 1) == [True]
    assert run_ranks(lambda rank, world_size: dist.is_initialized(), 2, init=False) == [False, False]
    assert not dist.is_initialized()


def test_ranks_leave_together(tmp_path: Path) -> None:
    held = []

    def done_early(rank: int, world_size: int) -> bool:
        """Whether rank 0, done long ago, still lives: its end would release the lock."""
        lock = (tmp_path / "lock").open("w")
        held.append(lock)
        if rank == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
        dist.barrier()
        time.sleep(0.3 * rank)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return rank == 0

    assert run_ranks(done_early, 2) == [True, True]


def test_failing_rank_is_named_with_its_traceback() -> None:
    def fail_on_one(rank: int, world_size: int) -> None:
        if rank == 1:
            raise ValueError("these are the wrong numbers")

    with pytest.raises(AssertionError) as caught:
        run_ranks(fail_on_one, 3)
    assert str(caught.value).startswith("rank 1 of 3 failed:\nTraceback")
    assert "in fail_on_one" in str(caught.value)
    assert "ValueError: these are the wrong numbers" in str(caught.value)


def test_failure_ends_the_others_soon_and_shows_where_they_were() -> None:
    def fail_or_wait(rank: int, world_size: int) -> None:
        if rank == 1:
            raise ValueError("no")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2 failed.*rank 0 was still running.*in barrier"):
        run_ranks(fail_or_wait, 2)
    assert time.monotonic() - start < 10


def test_warning_in_a_rank_is_an_error() -> None:
    with pytest.raises(AssertionError, match="UserWarning: look here"):
        run_ranks(lambda rank, world_size: warnings.warn("look here", stacklevel=1), 1)


def test_result_that_cannot_be_sent_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="rank 0 of 1 failed"):
        run_ranks(lambda rank, world_size: lambda: None, 1)


def test_dead_rank_is_named_with_its_signal() -> None:
    def die(rank: int, world_size: int) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError, match=r"(?s)rank 0 of 2 failed.*SIGKILL"):
        run_ranks(die, 2, init=False)


def test_hang_is_reported_in_time() -> None:
    def hang(rank: int, world_size: int) -> None:
        if rank != 1:
            dist.barrier()

    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        run_ranks(hang, 3, timeout=2.0)
    assert time.monotonic() - start < 10
    assert "these ranks hung (timeout 2 s): 0, 2\n" in str(caught.value)
    assert len(re.findall(r"rank [02] was at:\n.*?in hang", str(caught.value), re.DOTALL)) == 2


def test_hung_ranks_are_killed(tmp_path: Path) -> None:
    def hang(rank: int, world_size: int) -> None:
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        time.sleep(600)

    with pytest.raises(TimeoutError):
        run_ranks(hang, 2, timeout=2.0, init=False)
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_expected_mistake_is_returned_for_each_rank() -> None:
    def refuse(rank: int, world_size: int) -> None:
        raise TypeError(f"rank {rank} wants floats")

    errors = run_ranks_expecting(refuse, 3)
    assert [(error.type, error.message) for error in errors] == [
        ("TypeError", f"rank {rank} wants floats") for rank in range(3)
    ]


def test_rank_that_misses_the_mistake_is_named() -> None:
    def refuse_on_zero(rank: int, world_size: int) -> str:
        if rank == 0:
            raise TypeError("floats, please")
        return "fine"

    with pytest.raises(AssertionError) as caught:
        run_ranks_expecting(refuse_on_zero, 2)
    assert "rank 1 did not raise, but returned 'fine'" in str(caught.value)
    assert "rank 0 raised TypeError: floats, please" in str(caught.value)


def test_rank_that_hangs_over_the_mistake_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_or_wait(rank: int, world_size: int) -> None:
        if rank == 0:
            raise TypeError("floats, please")
        dist.barrier()

    monkeypatch.setattr(ranks, "EXPECTING_GRACE", 1.0)
    with pytest.raises(AssertionError, match=r"(?s)rank 1 did not raise, but was still running.*in barrier"):
        run_ranks_expecting(refuse_or_wait, 2)
