"""The last rank does what the others don't: all are told, or the right thing happens, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.accessors import safe_get_full_fp32_param
from lowlevel_zero.checkpoint import save_checkpoint
from tests.support.misuse import (
    Doing,
    Refused,
    Right,
    Work,
    Wrong,
    adam,
    forget_zero_grad,
    momentum,
    net,
    nothing,
    one_step,
    try_out,
)


def instead(call: Callable[[Work], Any], others: Callable[[Work], Any] = lambda work: work.optimizer.step()) -> Doing:
    """After a backward, a call on the last rank alone, while the others make another."""

    def do(work: Work) -> None:
        work.backward()
        (call if work.odd else others)(work)

    return do


def different(theirs: str) -> Refused:
    """All are told that the last rank came to another call than to step."""
    return Refused(RuntimeError, f"rank 0 to step; rank 1 to {theirs}: ")


def forget_zero_grad_alone(work: Work) -> None:
    one_step(work)
    if not work.odd:
        work.optimizer.zero_grad()
    work.backward(3)
    work.optimizer.step()


def without_the_last(work: Work) -> None:
    work.backward(without=work.world_size - 1)
    work.optimizer.step()


def no_sync_alone(work: Work) -> None:
    if work.plain or not work.odd:
        work.backward()
    else:
        with work.no_sync():
            work.backward()
    work.optimizer.step()


def bare_backward_alone(work: Work) -> None:
    if work.plain or not work.odd:
        work.backward()
    else:
        work.loss().backward()
    work.optimizer.step()


def fail_alone(work: Work) -> None:
    handle = work.model[0].weight.register_hook(lambda _: 1 / 0 if work.odd else None)
    try:
        work.backward()
    except ZeroDivisionError:
        work.optimizer.zero_grad()
        return
    finally:
        handle.remove()
    work.optimizer.step()


def freeze_alone(work: Work) -> None:
    bias = work.model[0].bias
    for rank in range(work.world_size) if work.plain else [work.rank]:
        bias.requires_grad_(rank != work.world_size - 1)
        if work.plain:
            (work.loss(0, rank) / work.world_size).backward()
        else:
            work.backward()
    work.optimizer.step()
    bias.requires_grad_(True)


def thaw_alone(work: Work) -> None:
    frozen = work.model[3].weight
    frozen.requires_grad_(work.odd)
    work.loss().backward()
    try:
        work.optimizer.step()
    finally:
        frozen.requires_grad_(False)


def move_alone(work: Work) -> None:
    if work.odd:
        work.model[0].weight.data = work.model[0].weight.data.clone()
    work.steps(3)


def convert_alone(work: Work) -> None:
    if work.odd:
        work.model[0].weight.data = work.model[0].weight.data.double()
    work.optimizer.step()


def sparse_alone(work: Work) -> None:
    if work.odd:
        work.model[0].weight.grad = torch.ones(4, 3).to_sparse()
    work.optimizer.step()


def regroup_alone(work: Work) -> None:
    members = work.optimizer.param_groups[0]["params"]
    taken = members.pop() if work.odd else None
    work.backward()
    try:
        work.optimizer.step()
    finally:
        members += [] if taken is None else [taken]


def construct_otherwise(
    model: Callable[[bool], Any] = lambda odd: net(), options: Callable[[bool], dict[str, Any]] = lambda odd: {}
) -> Doing:
    """Another optimizer, of another model or by other options on the last rank."""

    def do(work: Work) -> None:
        own = model(work.odd)
        LowLevelZeroOptimizer(adam(own), model=own, **options(work.odd))

    return do


def load_otherwise(work: Work) -> None:
    state = work.optimizer.state_dict(only_on_master=True)
    work.optimizer.load_state_dict(state)


def step_under_no_sync_alone(work: Work) -> None:
    work.backward()
    if work.odd:
        with work.no_sync():
            work.optimizer.step()
        work.optimizer.verify()
    else:
        work.optimizer.step()


def step_two_in_other_orders(work: Work) -> None:
    other = net()
    another = LowLevelZeroOptimizer(adam(other), model=other)
    another.backward(other(torch.ones(2, 3)).sum())
    work.backward()
    for optimizer in (another, work.optimizer) if work.odd else (work.optimizer, another):
        optimizer.step()


RANKS = [
    Wrong(
        "zero_grad for step", instead(lambda work: work.optimizer.zero_grad()), different("zero_grad"), Right(nothing)
    ),
    Wrong(
        "clip_grad_norm_ for step",
        instead(lambda work: work.clip(1.0)),
        different("clip_grad_norm_"),
        Right(nothing),
    ),
    Wrong(
        "synchronize for step",
        instead(lambda work: work.optimizer.synchronize()),
        different("synchronize"),
        Right(nothing),
    ),
    Wrong(
        "get_param_grad for step",
        instead(lambda work: work.optimizer.get_param_grad(work.model[0].weight)),
        different("get_param_grad of 0.weight"),
        Right(nothing),
    ),
    Wrong(
        "add_param_group for step",
        instead(lambda work: work.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})),
        different("add_param_group"),
        Right(nothing),
    ),
    Wrong(
        "load_state_dict for step",
        instead(lambda work: work.optimizer.load_state_dict(momentum(work.model).state_dict())),
        different("load_state_dict"),
        Right(lambda work: work.optimizer.state.clear()),
    ),
    Wrong("verify for step", instead(lambda work: work.optimizer.verify()), different("verify"), Right(nothing)),
    Wrong(
        "verify with buffers for verify",
        instead(lambda work: work.optimizer.verify(buffers=True), lambda work: work.optimizer.verify()),
        Refused(RuntimeError, "rank 0 to verify; rank 1 to verify buffers: ", plain=nothing),
        Right(nothing),
    ),
    Wrong(
        "step under no_sync for step, and verify",
        step_under_no_sync_alone,
        Refused(RuntimeError, "rank 0 to step; rank 1 to verify: ", plain=nothing),
        Right(nothing),
    ),
    Wrong(
        "a zero_grad that one rank forgets",
        forget_zero_grad_alone,
        Refused(RuntimeError, "rank 0 to zero_grad; rank 1 to step: ", plain=one_step),
        Right(forget_zero_grad),
    ),
    Wrong("a backward that one rank leaves out", without_the_last, Right()),
    Wrong("no_sync on one rank", no_sync_alone, Right()),
    Wrong("a bare backward on one rank", bare_backward_alone, Right()),
    Wrong("an exception in one rank's backward", fail_alone, different("zero_grad"), Right(nothing)),
    Wrong(
        "an accessor on one rank",
        lambda work: safe_get_full_fp32_param(work.model[0].bias) if work.odd else work.optimizer.zero_grad(),
        Refused(
            RuntimeError, "rank 0 to zero_grad; rank 1 to call safe_get_full_fp32_param of 0.bias: ", plain=nothing
        ),
        Right(nothing),
    ),
    Wrong(
        "a save on one rank",
        lambda work: save_checkpoint("nowhere", work.model, work.optimizer) if work.odd else work.optimizer.zero_grad(),
        Refused(RuntimeError, "rank 0 to zero_grad; rank 1 to save a checkpoint to nowhere: ", plain=nothing),
        Right(nothing),
    ),
    Wrong("a parameter that is frozen on one rank", freeze_alone, Right()),
    Wrong(
        "a parameter that is unfrozen on one rank",
        thaw_alone,
        Refused(RuntimeError, "3.weight: expected it frozen", "rank 1 could not step: RuntimeError: 3.weight"),
    ),
    Wrong("a parameter over other memory on one rank", move_alone, Right()),
    Wrong(
        "a parameter of another dtype on one rank",
        convert_alone,
        Refused(RuntimeError, "0.weight: .* over other", "rank 1 could not step: RuntimeError: 0.weight", ends=True),
    ),
    Wrong(
        "a sparse gradient on one rank",
        sparse_alone,
        Refused(RuntimeError, "0.weight: expected a dense", "rank 1 could not step: RuntimeError: 0.weight"),
    ),
    Wrong(
        "a param group that lacks a slice on one rank",
        regroup_alone,
        Refused(RuntimeError, "^param_groups.0..'params'.: expected the 4 slices", "rank 1 could not step: .*param_gr"),
    ),
    Wrong(
        "other models",
        construct_otherwise(lambda odd: net() if odd else net()[:3]),
        Refused(ValueError, "rank 0 has .* rank 1 has .*parameter 3.weight of group 0: frozen"),
        Right(nothing),
    ),
    Wrong(
        "other dtypes",
        construct_otherwise(lambda odd: net().bfloat16() if odd else net()),
        Refused(ValueError, "rank 0 has «parameter 0.weight .*float32» where rank 1 has .*bfloat16"),
        Right(nothing),
    ),
    Wrong(
        "other options",
        construct_otherwise(options=lambda odd: {"partition_grad": odd}),
        Refused(ValueError, "rank 0 has .*partition_grad=False.* where rank 1 has .*partition_grad=True"),
        Right(nothing),
    ),
    Wrong(
        "other learning rates",
        lambda work: LowLevelZeroOptimizer(torch.optim.SGD(net().parameters(), lr=0.1 * (1 + work.odd))),
        Refused(ValueError, "rank 0 has .*lr.* where rank 1 has .*lr"),
        Right(nothing),
    ),
    Wrong(
        "options that may differ",
        construct_otherwise(options=lambda odd: {"verbose": odd, "backward_context": nullcontext if odd else None}),
        Right(nothing),
    ),
    Wrong(
        "a bad option on one rank",
        construct_otherwise(options=lambda odd: {"reduction": "max" if odd else "mean"}),
        Refused(ValueError, "reduction: expected", "rank 1 could not construct .*ValueError: reduction: expected"),
    ),
    Wrong(
        "a state dict that only the first rank has whole",
        load_otherwise,
        Refused(ValueError, "the same state dict on every rank; rank 0 has .*momentum_buffer.* where rank 1 has"),
        Right(nothing),
    ),
    Wrong(
        "two optimizers that ranks step in other orders",
        step_two_in_other_orders,
        # Which number an optimizer has in a process depends on how many there were before.
        Refused(RuntimeError, r"rank 0 to step of optimizer (\d+); rank 1 to step of optimizer (?!\1)\d+: "),
        Right(one_step),
    ),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_rank_that_differs(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.chdir(tmp_path)  # some save
    try_out(RANKS, world_size, subtests)


# Those in which ranks run other syncs than others, or one can't.
UNEVEN = (
    "zero_grad for step",
    "verify for step",
    "a backward that one rank leaves out",
    "a bare backward on one rank",
    "an exception in one rank's backward",
    "a parameter that is unfrozen on one rank",
    "a sparse gradient on one rank",
)


@pytest.mark.usefixtures("forecasting")
def test_wrong_calls_where_unused_parameters_are_detected(subtests: pytest.Subtests) -> None:
    try_out([wrong for wrong in RANKS if wrong.what in UNEVEN], 2, subtests)


def test_the_uneven_ones_are_among_them() -> None:
    assert {wrong.what for wrong in RANKS}.issuperset(UNEVEN)
