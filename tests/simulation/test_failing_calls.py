"""A public call that fails on one rank after the ranks have agreed on it: all are told, and none uses what it left.

Operations that fail in all calls are in ``test_aftermath.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.bucket_store import Bucket
from lowlevel_zero.bookkeeping.gradient_store import GradientStore
from lowlevel_zero.deepspeed import safe_get_full_fp32_param
from tests.simulation.world import CARRIERS, Carrier, simulate

X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))


def told(call: Callable[[], Any]) -> str:
    """What leaves a call on this rank, if anything does."""
    try:
        call()
    except (RuntimeError, ValueError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def texts_of(job: Callable[[int], list[str]], carrier: Carrier) -> tuple[list[str], list[str]]:
    """What has left the calls of rank 1, where one fails, and of rank 0."""
    outcome = simulate(job, 2, 0, carrier)
    assert (outcome.deadlock, outcome.errors) == (None, {}), outcome.tracebacks
    return outcome.results[1], outcome.results[0]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_step_is_taken_after_a_backward_that_raised_on_one_rank(carrier: Carrier) -> None:
    """Also where this rank goes on as if nothing had happened: its gradients are half there."""

    def job(rank: int) -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)

        def fail(_: Tensor) -> None:
            raise ArithmeticError("no gradient today")

        def backward() -> None:
            optimizer.backward(model(X[rank]).square().mean())

        def failing() -> None:
            hook = model.weight.register_hook(fail) if rank == 1 else None
            try:
                backward()
            finally:
                if hook is not None:
                    hook.remove()

        calls = [failing, optimizer.step, optimizer.zero_grad, backward, optimizer.step, optimizer.zero_grad]
        calls += [failing, optimizer.zero_grad if rank == 1 else optimizer.step, optimizer.zero_grad]
        return list(map(told, calls))

    own, other = texts_of(job, carrier)
    for failed in (0, 6):
        assert (own[failed], other[failed]) == ("ArithmeticError: no gradient today", "")
    for text in (own[1], other[1]):
        assert "zero_grad" in text
        assert "no gradient today" in text
    assert other[1].startswith("RuntimeError: rank 1 could not step")
    assert own[2:6] == other[2:6] == [""] * 4
    for text in (own[7], other[7]):
        assert "rank 1 to zero_grad, after a call that failed there (ArithmeticError: no gradient today)" in text
    assert own[8] == other[8] == ""


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("name", ["state_dict", "load_state_dict", "verify", "add_param_group", "read", "detached"])
def test_what_needs_no_gradients_goes_on_where_a_rank_loses_some(
    name: str, carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for it: all are told by the next call that needs them."""
    accumulate = GradientStore.accumulate
    fails = False

    def failing(self: GradientStore, bucket: Bucket, total: Tensor) -> None:
        nonlocal fails
        if fails and bucket.records[0].rank == 1:
            fails = False
            raise ArithmeticError("no sum today")
        accumulate(self, bucket, total)

    monkeypatch.setattr(GradientStore, "accumulate", failing)

    def job(rank: int) -> list[str]:
        nonlocal fails
        torch.manual_seed(0)
        model, more = nn.Linear(6, 3), nn.Parameter(torch.ones(3))
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model=model)
        optimizer.backward(model(X[rank]).square().mean())
        detached = model.weight.grad.detach()
        optimizer.step()
        kept = optimizer.state_dict()
        calls: dict[str, Callable[[], Any]] = {
            "state_dict": optimizer.state_dict,
            "load_state_dict": lambda: optimizer.load_state_dict(kept),
            "verify": optimizer.verify,
            "add_param_group": lambda: optimizer.add_param_group({"params": [more]}),
            "read": lambda: safe_get_full_fp32_param(model.weight),
            "detached": lambda: detached.sum(),
        }
        optimizer.zero_grad()
        optimizer.verify()
        fails = True
        backward = partial(optimizer.backward, model(X[rank]).square().mean())
        return [told(each) for each in (backward, calls[name], optimizer.step, optimizer.zero_grad, optimizer.verify)]

    own, other = texts_of(job, carrier)
    assert not fails
    for texts in (own, other):
        assert texts[1] == texts[3] == texts[4] == ""
        assert "no sum today" in texts[2]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_errors_that_are_over_are_no_causes(carrier: Carrier) -> None:
    """Neither of what is lost later, nor of calls that differ later."""

    def job(rank: int) -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)

        def fail(_: Tensor) -> None:
            raise ArithmeticError("no gradient today")

        def step(lr: float = 0.1) -> None:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()

        def backward() -> None:
            model.zero_grad()
            optimizer.backward(model(X[rank]).square().mean())

        def step_apart() -> None:
            step(0.1 + rank)

        def failing() -> None:
            if rank == 1:
                model.weight.register_hook(fail)
            backward()

        last = optimizer.zero_grad if rank == 1 else step
        calls = [backward, step_apart, step, backward, last, optimizer.zero_grad, backward, step_apart, failing, step]
        return list(map(told, calls))

    own, other = texts_of(job, carrier)
    for texts in (own, other):
        assert "expected the same settings" in texts[1]
        assert texts[2] == texts[3] == ""
        assert "rank 1 to zero_grad:" in texts[4]
        assert "lost some on this rank to an error before (ArithmeticError: no gradient today)" in texts[9]


class FailingOnce(torch.optim.SGD):
    """Raises in its first step of the model on rank 1, but not in a trial of the class."""

    def step(self, closure: Any = None) -> None:
        super().step()
        is_trial = len(self.param_groups[0]["params"]) > 1 and self.param_groups[0]["params"][0].dim() > 1
        if torch.distributed.get_rank() == 1 and not is_trial and not self.__dict__.get("failed"):
            self.__dict__["failed"] = True
            raise ArithmeticError("no step today")


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_step_that_fails_on_one_rank_refuses_all_that_follows_until_a_checkpoint_is_loaded(carrier: Carrier) -> None:
    def job(rank: int) -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = LowLevelZeroOptimizer(FailingOnce(model.parameters(), lr=0.1), model=model, split="elements")
        saved = {name: each.clone() for name, each in model.state_dict().items()}, optimizer.state_dict()

        def step() -> None:
            optimizer.backward(model(X[rank]).square().mean())
            optimizer.step()

        texts = [told(step), told(optimizer.zero_grad), told(step), told(optimizer.state_dict)]
        optimizer.zero_grad()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return [*texts, told(step)]

    own, other = texts_of(job, carrier)
    assert (own[0], other[0]) == ("ArithmeticError: no step today", "")
    assert (own[1], other[1]) == ("", "")
    for at, call in ((2, "step"), (3, "state_dict")):
        assert other[at].startswith(f"RuntimeError: rank 1 could not {call}: RuntimeError: expected parameters")
        for text in (own[at], other[at]):
            assert "ArithmeticError: no step today" in text
            assert "load a checkpoint on every rank" in text
    assert (own[4], other[4]) == ("", "")
