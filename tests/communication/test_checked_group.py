"""debug=True: what differs between ranks is an error on all of them, in time; what is legal trains the same bits."""

from __future__ import annotations

import multiprocessing
import re
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.diagnostics.debug_checks import CheckedProgress, check
from tests.support.judging import check_run
from tests.support.numbers import trained
from tests.support.oracle import Run
from tests.support.ranks import Raised, run_ranks, run_ranks_expecting

FAR = 50.0  # seconds that nobody waits for: what differs is seen when it is called
PATIENCE = 2.0  # where somebody never comes


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def wrap(model: nn.Module, **options: Any) -> LowLevelZeroOptimizer:
    options = {"debug": True, "stall_timeout": FAR, **options}
    return LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(2, 4)).sum()
    return loss


def refused(errors: list[Raised]) -> str:
    """What all ranks alike have raised."""
    (message,) = {error.message for error in errors}
    assert all(error.type == "RuntimeError" for error in errors)
    return message


def drop(step: int, rank: int) -> set[int]:
    return {(step + rank) % 3} if step % 2 else {1}


LEGAL = {
    "stage 1": {},
    "stage 2, drop": {"drop": drop, "options": {"partition_grad": True}},
    "bare, drop, micro-batches": {"bare": True, "drop": drop, "micro_batches": 2},
    "clipped, overlapped gathers": {"clip": 0.1, "drop": drop, "options": {"overlap_allgather": True}},
}


def test_legal_training_is_as_ever(subtests: pytest.Subtests) -> None:
    def of(way: str, world_size: int) -> Run:
        run = replace(Run(world_size=world_size, steps=3), **LEGAL[way])
        return run.with_options(reduce_bucket_size=30, debug=True)

    runs = {way: of(way, world_size) for way, world_size in zip(LEGAL, cycle([2, 3]), strict=False)}
    for way, run, ran in trained(runs):
        with subtests.test(way):
            check_run(run, ran.values())


def test_who_looks_at_gradients_alone_is_an_error_on_all_at_once() -> None:
    """The others step, and don't agree on anything before."""

    def live(rank: int, world_size: int) -> None:
        model = net()
        optimizer = wrap(model, reduce_bucket_size=4, stall_timeout=50.0)
        optimizer.backward(loss_of(model))
        if rank == 0:
            optimizer.get_working_grads_by_group_id(0)
        optimizer.step()

    message = refused(run_ranks_expecting(live, 2, timeout=20.0))
    assert "expected the same call on every rank" in message
    assert "rank 0 came to «agreement (step 1, in get_working_grads_by_group_id)" in message
    assert "rank 1 to «agreement (step 1, in step)" in message


def test_a_rank_with_another_bucket_is_an_error_on_all() -> None:
    """Rank 1's plan is another: parameters, shape and bucket are named before a byte has travelled."""

    def live(rank: int, world_size: int) -> None:
        model = net()
        optimizer = wrap(model)
        if rank == 1:
            optimizer.sharded_groups[0].reducer.plan.fill([0, 1, 2, 3])
        optimizer.backward(loss_of(model))
        optimizer.step()

    message = refused(run_ranks_expecting(live, 2))
    assert "rank 0 came to «reduction of bucket 0 (step 1, micro-batch 1): [2, 15] torch.float32 of 1.bias," in message
    assert "rank 1 to «reduction of bucket 0 (step 1, micro-batch 1): [2, 15] torch.float32 of 0.weight," in message


def test_a_gather_of_another_dtype_is_an_error_on_all() -> None:
    def live(rank: int, world_size: int) -> None:
        group = ShardGroup()
        check(group, patience=FAR)
        rows = torch.zeros(2, 3, dtype=(torch.float32, torch.bfloat16)[rank])
        group.gather([rows[rank]], [rows])

    message = refused(run_ranks_expecting(live, 2))
    assert "«gather (step 1): [2, 3] torch.float32»" in message
    assert "rank 1 to «gather (step 1): [2, 3] torch.bfloat16»" in message


def test_a_rank_that_never_comes_is_named_and_told_later() -> None:
    """Rank 2 is busy elsewhere: the others give up after their patience, and so does it, when it comes."""

    given_up = multiprocessing.get_context("fork").Semaphore(0)

    def live(rank: int, world_size: int) -> None:
        model = net()
        optimizer = wrap(model, stall_timeout=PATIENCE)
        optimizer.backward(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()
        if rank == 2:
            assert all(given_up.acquire(timeout=FAR) for _ in range(2))
        try:
            optimizer.backward(loss_of(model))
            optimizer.step()
        finally:
            given_up.release()

    message = refused(run_ranks_expecting(live, 3))
    assert re.search(r"rank [01] came to «agreement \(step 2, in step\)", message)
    assert "has waited 2 s: rank 2 last came to «agreement (step 2, in zero_grad)" in message


def test_the_environment_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def live(rank: int, world_size: int) -> bool:
        return isinstance(wrap(net(), debug=False).shard_group.progress, CheckedProgress)

    assert run_ranks(live, 2) == [False, False]
    monkeypatch.setenv("LOWLEVEL_ZERO_DEBUG", "1")
    assert run_ranks(live, 2) == [True, True]
    assert run_ranks(live, 1) == [False]


def test_the_store_does_not_fill() -> None:
    def live(rank: int, world_size: int) -> list[int]:
        model = net()
        optimizer = wrap(model)
        held = []
        for _ in range(4):
            optimizer.backward(loss_of(model))
            optimizer.step()
            optimizer.zero_grad()
            held.append(len(optimizer.shard_group.progress.fingerprints._own))  # type: ignore[attr-defined]
        return held[1:]

    for held in run_ranks(live, 2):
        assert len(set(held)) == 1
