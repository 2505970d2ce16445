"""The last rank does what the others don't: all are told, or the right thing happens, and nothing hangs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero import Communication, LowLevelZeroOptimizer
from lowlevel_zero.deepspeed import safe_get_full_fp32_param
from tests.support.misuse import (
    Doing,
    Refused,
    Right,
    Work,
    Wrong,
    adam,
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


def backward_by_wrong_inputs_alone(work: Work) -> None:
    """It can't begin there; what others have reduced by theirs is dropped."""
    inputs = [[work.model[0].weight]] if work.odd else None
    with pytest.raises((TypeError, RuntimeError)) if work.odd else nullcontext():
        work.optimizer.backward(work.loss(), inputs=inputs)
    work.optimizer.zero_grad()


class Refusing(logging.Handler):
    """A handler as of who wants no warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError(f"unwanted: {record.getMessage()}")


def refuse_a_warning_alone(work: Work) -> None:
    """Rank 0, which is to tell that gradients of the last step are still there, can't begin its backward."""
    work.backward()
    work.optimizer.step()
    handler = Refusing(logging.WARNING)
    logging.getLogger("lowlevel_zero").addHandler(handler)
    try:
        with pytest.raises(ValueError, match="unwanted") if work.rank == 0 else nullcontext():
            work.optimizer.backward(work.loss())
    finally:
        logging.getLogger("lowlevel_zero").removeHandler(handler)
    work.optimizer.zero_grad()


def construct_by_a_bad_option(work: Work) -> None:
    own = net()
    LowLevelZeroOptimizer(adam(own), model=own, communication=Communication(reduction="max" if work.odd else "mean"))


def construct(model: nn.Module) -> None:
    LowLevelZeroOptimizer(adam(model), model=model)


def construct_with_another_buffer(work: Work) -> None:
    model = net()
    model.register_buffer("seen", torch.zeros(2 if work.odd else 1))
    construct(model)


def frozen(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)


def load_otherwise(work: Work) -> None:
    state = work.optimizer.state_dict(only_on_master=True)
    work.optimizer.load_state_dict(state)


def step_two_in_other_orders(work: Work) -> None:
    other = net()
    another = LowLevelZeroOptimizer(adam(other), model=other)
    another.backward(other(torch.ones(2, 3)).sum())
    work.backward()
    for optimizer in (another, work.optimizer) if work.odd else (work.optimizer, another):
        optimizer.step()


RANKS = [
    Wrong("inputs that are no tensors on one rank", backward_by_wrong_inputs_alone, Right(nothing)),
    Wrong("a warning that one rank refuses", refuse_a_warning_alone, Right(one_step)),
    Wrong(
        "verify with buffers for verify",
        instead(lambda work: work.optimizer.verify(buffers=True), lambda work: work.optimizer.verify()),
        Refused(RuntimeError, "rank 0 to verify; rank 1 to verify buffers: "),
    ),
    Wrong(
        "a step on one rank",
        instead(lambda work: work.optimizer.step(), lambda work: work.optimizer.zero_grad()),
        Refused(RuntimeError, "let every rank make the same calls .* «if rank == 0».*zero_grad"),
    ),
    Wrong(
        "a state dict on one rank",
        instead(lambda work: work.optimizer.state_dict()),
        Refused(RuntimeError, "rank 1 to state_dict: .*same calls .* none of them under «if rank == 0»"),
    ),
    Wrong(
        "an accessor on one rank",
        lambda work: safe_get_full_fp32_param(work.model[0].bias) if work.odd else work.optimizer.zero_grad(),
        Refused(RuntimeError, "rank 0 to zero_grad; rank 1 to call safe_get_full_fp32_param of 0.bias: "),
    ),
    Wrong(
        "a parameter that is unfrozen on one rank",
        thaw_alone,
        Refused(RuntimeError, "3.weight: expected it frozen", "rank 1 could not step: RuntimeError: 3.weight"),
    ),
    Wrong("a parameter over other memory on one rank", move_alone, Right()),
    Wrong(
        "a parameter of another dtype on one rank",
        convert_alone,
        Refused(
            RuntimeError,
            "0.weight: expected dtype, device and shape",
            "rank 1 could not step: RuntimeError: 0.weight",
            ends=True,
        ),
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
        "a bad option on one rank",
        construct_by_a_bad_option,
        Refused(
            ValueError,
            "reduction: expected",
            "rank 1 could not construct .*ValueError: communication.reduction: expected",
        ),
    ),
    Wrong(
        "a weight of another shape",
        lambda work: construct(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5 if work.odd else 2))),
        Refused(ValueError, r"rank 0.*1\.weight.*\(2, 4\).*rank 1.*\(5, 4\)"),
    ),
    Wrong(
        "a layer too many",
        lambda work: construct(nn.Sequential(*[nn.Linear(3, 3) for _ in range(3 if work.odd else 2)])),
        Refused(ValueError, r"rank 0.*rank 1.*2\.weight"),
    ),
    Wrong(
        "a buffer of another shape",
        construct_with_another_buffer,
        Refused(ValueError, r"rank 0.*rank 1.*seen.*\(2,\)"),
    ),
    Wrong(
        "a later parameter of another shape",
        lambda work: work.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2 + work.odd))]}),
        Refused(ValueError, "rank 1"),
    ),
    Wrong(
        "a later frozen parameter of another dtype",
        lambda work: work.optimizer.add_param_group({"params": [frozen(torch.int32 if work.odd else torch.float32)]}),
        Refused(ValueError, "rank 1"),
    ),
    Wrong(
        "a state dict that only the first rank has whole",
        load_otherwise,
        Refused(ValueError, "the same state dict on every rank; rank 0 has .*momentum_buffer.* where rank 1 has"),
    ),
    Wrong(
        "two optimizers that ranks step in other orders",
        step_two_in_other_orders,
        # Which number an optimizer has in a process depends on how many there were before.
        Refused(RuntimeError, r"rank 0 to step of optimizer (\d+); rank 1 to step of optimizer (?!\1)\d+: "),
    ),
]


def test_one_rank_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    monkeypatch.chdir(tmp_path)  # some save
    try_out(RANKS, 2, subtests)
