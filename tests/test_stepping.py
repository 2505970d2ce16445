"""Stepping bucket by bucket: where it is one step for who watches, and where it must be one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.stepping import steps_in_parts
from ranks import run_ranks


class OwnAdamW(AdamW):
    """A user's subclass might count its steps: it is stepped once."""


def train(make: Callable[[Any], Optimizer], steps: int = 3) -> tuple[list[Tensor], list[int], LowLevelZeroOptimizer]:
    """Parameters after some steps of a net of several buckets, and how many parameters each step call saw."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim], "lr": 0.1 / dim} for dim in (1, 2)]
    optimizer = LowLevelZeroOptimizer(make(groups), reduce_bucket_size=50, partition_grad=True)
    calls: list[int] = []
    step = optimizer.optim.step
    optimizer.optim.step = lambda: (  # type: ignore[method-assign]
        calls.append(sum(len(group["params"]) for group in optimizer.optim.param_groups)),
        step(),
    )
    for _ in range(steps):
        optimizer.backward(model(torch.randn(2, 6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], calls, optimizer


def watched(groups: Any) -> Optimizer:
    optimizer = AdamW(groups)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@contextmanager
def watched_globally() -> Iterator[None]:
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("make", [OwnAdamW, watched])
def test_one_call_and_several_end_in_the_same_bits(make: Callable[[Any], Optimizer]) -> None:
    def work(_rank: int, _size: int) -> None:
        in_parts, calls_in_parts, _ = train(AdamW)
        at_once, calls_at_once, _ = train(make)
        assert all(map(torch.equal, in_parts, at_once))
        assert calls_at_once == [8, 8, 8]
        assert sum(calls_in_parts) == 24
        assert max(calls_in_parts) <= 3  # a bucket of 50 elements holds that many

    run_ranks(work, 2)


def test_a_global_hook_sees_one_step() -> None:
    def work(_rank: int, _size: int) -> None:
        with watched_globally():
            _, calls, _ = train(AdamW)
        assert calls == [8, 8, 8]

    run_ranks(work, 1)


def test_groups_are_whole_again_after_an_error() -> None:
    def work(_rank: int, _size: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = LowLevelZeroOptimizer(AdamW(model.parameters(), lr=0.1), reduce_bucket_size=8)
        members = list(optimizer.optim.param_groups[0]["params"])
        optimizer.optim.param_groups[0]["lr"] = "much"
        optimizer.backward(model(torch.randn(2, 4)).sum())
        with pytest.raises(TypeError):
            optimizer.step()
        kept = optimizer.optim.param_groups[0]["params"]
        assert all(one is other for one, other in zip(kept, members, strict=True))

    run_ranks(work, 1)


def test_only_what_torch_counts_by_parameter_is_stepped_in_parts() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert steps_in_parts(AdamW(parameters))
    assert not steps_in_parts(OwnAdamW(parameters))
    assert not steps_in_parts(watched(parameters))
