"""Stepping bucket by bucket: where it is one step for who watches, and where it must be one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping import gather_store
from lowlevel_zero.stepper import steps_in_parts
from tests.support.on_ranks import on_ranks


@pytest.fixture(autouse=True)
def every_bucket_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is: else these models would be stepped, and gathered, in one."""
    monkeypatch.setattr(gather_store, "PART", 1)


class OwnAdamW(AdamW):
    """A user's subclass might count its steps: it is stepped once."""


@contextmanager
def watching(look: Callable[[Any], object]) -> Iterator[None]:
    """Call ``look`` with the param groups before each step of ``AdamW``."""
    step = AdamW.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdamW, "step", lambda optim: (look(optim.param_groups), step(optim)))
        yield


def train(make: Callable[[Any], Optimizer], steps: int = 3) -> tuple[list[Tensor], list[int], LowLevelZeroOptimizer]:
    """Parameters after some steps of a net of several buckets, and how many parameters each step call saw."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim], "lr": 0.1 / dim} for dim in (1, 2)]
    optimizer = LowLevelZeroOptimizer(make(groups), reduce_bucket_size=50, partition_grad=True)
    calls: list[int] = []
    with watching(lambda groups: calls.append(sum(len(group["params"]) for group in groups))):
        for _ in range(steps):
            optimizer.backward(model(torch.randn(2, 6)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], calls, optimizer


def watched(groups: Any) -> Optimizer:
    optimizer = AdamW(groups)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize("make", [OwnAdamW, watched])
@on_ranks(2)
def test_one_call_and_several_end_in_the_same_bits(rank: int, make: Callable[[Any], Optimizer]) -> None:
    in_parts, calls_in_parts, _ = train(AdamW)
    at_once, calls_at_once, _ = train(make)
    assert all(map(torch.equal, in_parts, at_once))
    assert calls_at_once == [8, 8, 8]
    assert sum(calls_in_parts) == 24
    assert max(calls_in_parts) <= 3  # a bucket of 50 elements holds that many


@on_ranks(1, [({}, {}), ({"fused": True}, {}), ({}, {"cpu_offload": True})])
def test_the_wrapped_optimizer_is_as_it_was_after_an_error(
    rank: int, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = AdamW(model.parameters(), lr=0.1, **settings)
    optimizer = LowLevelZeroOptimizer(wrapped, reduce_bucket_size=8, **options)
    (group,) = wrapped.param_groups
    group["lr"] = "much"
    before, members, attributes = {**group, "params": None}, list(group["params"]), set(vars(wrapped))
    optimizer.backward(model(torch.randn(2, 4)).sum())
    with pytest.raises(TypeError):
        optimizer.step()
    assert all(one is other for one, other in zip(group["params"], members, strict=True))
    assert {**group, "params": None} == before
    assert set(vars(wrapped)) == attributes
    with pytest.raises(RuntimeError, match=r"expected step\(\) of the LowLevelZeroOptimizer, got that of the AdamW"):
        wrapped.step()


@on_ranks(2)
def test_a_part_is_stepped_with_the_param_groups_that_it_has_members_of(rank: int) -> None:
    """A step of many small groups would else take each group's loop for each part."""
    model = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    groups = [{"params": list(layer.parameters()), "lr": 0.1 * (1 + at)} for at, layer in enumerate(model)]
    optimizer = LowLevelZeroOptimizer(AdamW(groups), reduce_bucket_size=42, partition_grad=True)
    rates: list[list[float]] = []
    optimizer.backward(model[3](model[1](model[0](torch.ones(2, 6)))).sum())
    with watching(lambda groups: rates.append([round(group["lr"], 1) for group in groups])):
        optimizer.step()
    assert sorted(rates) == [[0.1], [0.2], [0.4]]
    assert len(optimizer.param_groups) == 4


def test_only_what_torch_counts_by_parameter_is_stepped_in_parts() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert steps_in_parts(AdamW(parameters))
    assert not steps_in_parts(OwnAdamW(parameters))
    patched = AdamW(parameters)
    patched.step = lambda closure=None: None  # type: ignore[method-assign, assignment, misc]
    assert not steps_in_parts(patched)
    assert not steps_in_parts(watched(parameters))


# ---- optimizers that scale gradients themselves ----


def fused(groups: Any) -> Optimizer:
    return AdamW(groups, fused=True)


def by_hand(groups: Any) -> Optimizer:
    return OwnAdamW(groups, fused=True)


DTYPES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-3, torch.float16: 2e-3}  # with tolerances


def steps(
    make: Callable[[Any], Optimizer], rank: int, dtype: torch.dtype, clip: float
) -> tuple[list[Tensor], list[Tensor | None], float | None]:
    """How far masters have gone, the last gradients, and their norm."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).to(dtype)
    optimizer = LowLevelZeroOptimizer(
        make(model.parameters()), reduce_bucket_size=50, partition_grad=True, clip_grad_norm=clip, initial_scale=64
    )
    masters = optimizer.get_working_to_master_map().values()
    start = [master.detach().clone() for master in masters]
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        for _ in range(2):
            optimizer.backward(model(torch.randn(2, 6, dtype=dtype)).float().square().mean())
        optimizer.step()
    gradients = [optimizer.get_param_grad(p) for p in model.parameters()]
    ways = [master.detach() - before for master, before in zip(masters, start, strict=True)]
    return ways, gradients, optimizer.get_grad_norm()


@on_ranks(2, product(DTYPES, (0.0, 0.05)))
def test_a_fused_optimizer_scales_as_we_would(rank: int, dtype: torch.dtype, clip: float) -> None:
    """A factor that only one of them takes shows in gradients and norms: Adam's steps hide it."""
    ours, our_gradients, our_norm = steps(fused, rank, dtype, clip)
    expected, expected_gradients, expected_norm = steps(by_hand, rank, dtype, clip)
    rel = DTYPES[dtype]
    for got, exact in zip([*ours, *our_gradients], [*expected, *expected_gradients], strict=True):
        assert (got - exact).norm() <= rel * exact.norm()
    assert our_norm == pytest.approx(expected_norm, rel=rel)


@on_ranks(2)
def test_small_buckets_are_stepped_together(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_store, "PART", 45)
    together, calls, _ = train(AdamW)
    monkeypatch.setattr(gather_store, "PART", 1)
    one_by_one, more_calls, _ = train(AdamW)
    assert all(map(torch.equal, together, one_by_one))
    assert sum(calls) == sum(more_calls)
    assert len(calls) < len(more_calls)
