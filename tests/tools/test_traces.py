"""What a profiler sees of a step: reductions in the midst of backward, gathers in the midst of the next forward."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping import gather_store
from tests.support.cases import check_cases

LAYERS = 6


@pytest.fixture(autouse=True)
def every_bucket_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is: else these models would be stepped, and gathered, in one."""
    monkeypatch.setattr(gather_store, "PART", 1)


class Seen(NamedTuple):
    """When what happened, in one step and the forward after it: starts, in the profiler's microseconds."""

    forward: list[float]
    backward: list[float]
    packed: list[float]
    gathered: list[float]


def trace(overlap_communication: bool, overlap_allgather: bool) -> Seen:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(30, 30) for _ in range(LAYERS)))
    optimizer = LowLevelZeroOptimizer(
        AdamW(model.parameters(), lr=0.01),
        partition_grad=True,
        reduce_bucket_size=1000,
        overlap_communication=overlap_communication,
        overlap_allgather=overlap_allgather,
    )
    x = torch.randn(8, 30)
    for _ in range(2):  # until the order of buckets is known
        optimizer.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    model(x)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = model(x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        model(x)
    started: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        started.setdefault(event.name, []).append(event.time_range.start)
    return Seen(
        forward=sorted(started["aten::linear"])[LAYERS:],
        backward=sorted(started["autograd::engine::evaluate_function: AddmmBackward0"]),
        packed=sorted(started["aten::_chunk_cat"]),
        gathered=sorted(started["aten::split_with_sizes_copy"]),
    )


def between(times: list[float], of: list[float]) -> int:
    assert len(of) == LAYERS <= len(times)
    return sum(of[0] < time < of[-1] for time in times)


def test_reductions_overlap_backward_and_gathers_the_next_forward_where_they_may(subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, overlap_communication: bool, overlap_allgather: bool) -> None:
        seen = trace(overlap_communication, overlap_allgather)
        for overlap, count in (
            (overlap_communication, between(seen.packed, seen.backward)),
            (overlap_allgather, between(seen.gathered, seen.forward)),
        ):
            assert count >= LAYERS - 2 if overlap else count == 0

    check_cases(subtests, 2, work, [(True, True), (True, False), (False, False)])
