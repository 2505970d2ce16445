"""Ranks that differ where nobody should have to think of it: no collective does, or all ranks refuse it by name."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping.parameter_store import ParameterStore
from lowlevel_zero.communication.agreement import BUILDS, first_difference
from lowlevel_zero.deepspeed import full_fp32_params, full_grads, full_optimizer_states
from lowlevel_zero.options import GROUPS, ZeroOptions, abouts
from tests.support.options import grouped
from tests.support.oracle import Run, build, groups, loss_of
from tests.support.ranks import run_ranks
from tests.support.scripts import net
from tests.support.several import check_all, of_all, told

# The rank that differs, where it isn't rank 0.
ODD, RANKS = 1, 2


# ---- what works: the ranks end as if they were alike ----


class Training(NamedTuple):
    """One rank's, before its first step."""

    model: nn.Module
    inner: torch.optim.Optimizer


Differ = Callable[[Training], AbstractContextManager[object] | None]


def nothing(_: Training) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A difference between ranks that is to have no effect.

    Attributes:
        before: what the one rank does before it constructs its optimizer; what it returns is around all that follows.
        after: and once it has.
        options: of the one rank.
        rank: which one it is.
    """

    before: Differ = nothing
    after: Callable[[Training, LowLevelZeroOptimizer], Any] = lambda training, optimizer: None
    options: dict[str, Any] = field(default_factory=dict)
    rank: int = ODD


@contextmanager
def global_hooks() -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(lambda *_: None).remove)
        stack.callback(register_optimizer_step_post_hook(lambda *_: None).remove)
        yield


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def hook_steps(training: Training, *_: object) -> None:
    training.inner.register_step_pre_hook(lambda *_: None)
    training.inner.register_step_post_hook(lambda *_: None)


def hook_the_wrapper(_: Training, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)


def choose_other_kernels(training: Training, *_: object) -> None:
    for group in training.inner.param_groups:
        group.update(fused=False, foreach=False)


WORKS: dict[str, Case] = {
    "nothing": Case(),
    "verbose on rank 0": Case(options={"verbose": True}, rank=0),
    "verbose on another": Case(options={"verbose": True}),
    "a backward context": Case(options={"backward_context": lambda: torch.autograd.set_multithreading_enabled(False)}),
    "no shared memory": Case(lambda _: patch.dict(os.environ, LOWLEVEL_ZERO_SHARED_MEMORY="0")),
    "step hooks from the start": Case(hook_steps),
    "step hooks that came later": Case(after=hook_steps),
    "step hooks on the wrapper": Case(after=hook_the_wrapper),
    "step hooks of all optimizers": Case(lambda _: global_hooks()),
    "other kernels, chosen later": Case(after=choose_other_kernels),
    "grad mode": Case(lambda _: torch.no_grad()),
    "a default dtype": Case(lambda _: default_dtype()),
    "a default device": Case(lambda _: torch.device("meta")),
    "logging": Case(lambda _: told(logging.DEBUG)),
    "warnings as errors": Case(lambda _: warnings_as_errors()),
}


def fused(params: Any) -> Optimizer:
    """One that may scale gradients, and skip a step, in its own kernel; and that makes its states where they belong."""
    return AdamW(params, lr=1e-2, fused=True)


RUNS: dict[str, Run] = {
    "host": Run(steps=3, micro_batches=2, optimizer=fused, dtype=torch.float16).with_options(initial_scale=64.0),
    "device": Run(
        steps=4, optimizer=fused, drop=lambda step, rank: {(step + rank) % 3} if step else set(), clip=0.3
    ).with_options(partition_grad=True, overlap_allgather=True),
}


def train(rank: int, run: Run, case: Case) -> list[Any]:
    """All that a rank can see of a run in which one of the ranks differs as ``case`` has it."""
    model = build(run)
    training = Training(model, run.optimizer(groups(model)))
    odd = rank == case.rank
    options = {**run.options, **(case.options if odd else {})}
    with (case.before(training) if odd else None) or nullcontext():
        optimizer = LowLevelZeroOptimizer(
            training.inner, model=model, clip_grad_norm=run.clip, reduce_bucket_size=50, **options
        )
        if odd:
            case.after(training, optimizer)
        seen: list[Any] = []
        for step in range(run.steps):
            for micro in range(run.micro_batches):
                with torch.device("cpu"), torch.enable_grad():
                    loss = loss_of(model, run, step, micro, rank)
                optimizer.backward(loss)
            optimizer.step()
            seen += [*full_grads(model).values(), optimizer.get_grad_norm()]
            optimizer.zero_grad()
        optimizer.verify()
        optimizer.load_state_dict(optimizer.state_dict())
        masters, averages = full_fp32_params(model), full_optimizer_states(model, "exp_avg")
        return [*seen, *masters.values(), *averages.values()]


@pytest.mark.parametrize("rules", RUNS)
def test_it_changes_nothing(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, states, gradients and norms are those of ranks that are alike.

    A device's rules are to wait for nothing that needn't be known, here on the host's tensors.
    """
    if rules == "device":
        monkeypatch.setattr(ParameterStore, "on_host", False)

    def live(rank: int, world_size: int) -> list[list[Any]]:
        return [train(rank, RUNS[rules], case) for case in WORKS.values()]

    ranks = run_ranks(live, RANKS, timeout=100)
    for rank, all_seen in enumerate(ranks):
        for name, seen in zip(WORKS, all_seen, strict=True):
            torch.testing.assert_close(
                seen, ranks[0][0], rtol=1e-5, atol=1e-6, msg=lambda why, at=(name, rank): f"{at}: {why}"
            )


# ---- what is refused: on all ranks, by name ----


class Mine(AdamW):
    """Somebody's own, with the settings of another."""


def wrap(
    model: nn.Module | None = None, make: Callable[..., Optimizer] = AdamW, given: bool = True, **options: Any
) -> LowLevelZeroOptimizer:
    model = net() if model is None else model
    options = {"stage": 2, **options}
    return LowLevelZeroOptimizer(make(model.parameters()), model=model if given else None, **options)


def stepped(params: Any) -> Optimizer:
    optimizer = AdamW(params)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


def counting(params: Any, count: int) -> Optimizer:
    optimizer = AdamW(params)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["count"] = count
    return optimizer


OTHER_OPTIONS: dict[str, Any] = {
    "stage": 1,
    "bucket_size": 50,
    "dtype": torch.bfloat16,
    "initial_scale": 2.0,
    "hysteresis": 3,
}

Construct = Callable[[], Any]


class Refused(NamedTuple):
    """What a rank constructs that differs, what the others do, and what they all are told."""

    odd: Construct
    others: Construct
    words: tuple[str, ...]


REFUSED: dict[str, Refused] = {
    **{
        name: Refused(lambda option=(name, value): wrap(**grouped(dict([option]))), wrap, (name, str(value)))
        for name, value in OTHER_OPTIONS.items()
    },
    "another class": Refused(lambda: wrap(make=Mine), wrap, ("optimizer", "AdamW", "Mine")),
    "a class of no other settings": Refused(
        lambda: wrap(make=lambda params: torch.optim.SGD(params, lr=1e-3)), wrap, ("AdamW", "SGD")
    ),
    **{
        f"{switch} kernels": Refused(
            lambda switch=switch: wrap(make=lambda params: AdamW(params, **{switch: True})), wrap, (switch, "True")
        )
        for switch in ("fused", "maximize")
    },
    "a learning rate": Refused(lambda: wrap(make=lambda params: AdamW(params, lr=0.5)), wrap, ("lr", "0.5")),
    "a learning rate in a tensor": Refused(
        lambda: wrap(make=lambda params: AdamW(params, lr=torch.tensor(0.5))),
        lambda: wrap(make=lambda params: AdamW(params, lr=torch.tensor(0.25))),
        ("lr", "0.5", "0.25"),
    ),
    "states": Refused(lambda: wrap(make=stepped), wrap, ("0.weight", "exp_avg")),
    "a number among states": Refused(
        lambda: wrap(make=lambda params: counting(params, 7)),
        lambda: wrap(make=lambda params: counting(params, 6)),
        ("0.weight", "state count int 7", "state count int 6"),
    ),
    "no model": Refused(lambda: wrap(given=False), wrap, ("model=None",)),
}


def test_all_options_but_those_that_have_no_effect_are_compared() -> None:
    compared = {line.partition("=")[0] for line in ZeroOptions().alike()}
    groups = {f"{name}.{option}" for name, group in GROUPS.items() for option in abouts(group)}
    # What a cost returns is compared, parameter by parameter.
    assert {*groups, *abouts(ZeroOptions)} - compared == {"diagnostics.verbose", "backward_context", "cost"}


def test_all_ranks_refuse_it_and_say_what_differs_and_where() -> None:
    def live(rank: int, world_size: int) -> dict[str, str]:
        told: dict[str, str] = {}
        for name, case in REFUSED.items():
            with pytest.raises(ValueError, match="on every rank; rank 0 has") as caught:
                (case.odd if rank == ODD else case.others)()
            told[name] = str(caught.value)
        optimizer = wrap(model := net())
        optimizer.backward(model(torch.ones(2, 5)).sum())
        optimizer.step()
        return told

    ranks = run_ranks(live, RANKS + 1, timeout=100)
    assert ranks[0] == ranks[1] == ranks[2]
    for name, message in ranks[0].items():
        assert f"rank {ODD} has" in message, name
        assert all(word in message for word in REFUSED[name].words), f"{name}: {message}"


def test_of_many_ranks_those_that_differ_are_told_and_no_more_than_eight_of_them() -> None:
    """Of eight ranks or fewer all are told, beginning with the first and the first that differs from it."""

    def told(*odd: int, ranks: int) -> str:
        lines = [["alike", "other"] if rank in odd else ["alike", "one", "more"] for rank in range(ranks)]
        return first_difference(lines, range(10, 10 + ranks), BUILDS)

    for ranks, odd, others in (
        (8, (3, 7), (3, 1, 2, 4, 5, 6, 7)),
        (9, (3, 7), (3, 7)),
        (40, range(5, 30), range(5, 13)),
    ):
        text = told(*odd, ranks=ranks)
        listed = [f"rank {10 + rank} has «{'other' if rank in odd else 'one'}»" for rank in others]
        assert f"on every rank; rank 10 has «one» where {', '.join(listed)}: build them alike" in text
    shorter = first_difference([["alike", "more"], ["alike"]], [2, 4], BUILDS)
    assert "rank 2 has «more» where rank 4 has «nothing more»: " in shorter


def parameters_on_different_devices(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 2, bias=False, device="meta" if rank == ODD else "cpu")
    differ = "rank 0 has «trained on cpu» where rank 1 has «trained on meta»"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "lowlevel_zero.construction.checks.check_has_values", lambda model: None
        )  # meta is a device here
        with pytest.raises(ValueError, match=f"on every rank.*{differ}") as caught:
            wrap(model)
    assert set(of_all(str(caught.value))) == {str(caught.value)}


def states_that_a_hook_adds_on_one_rank(rank: int, world_size: int) -> None:
    optimizer = wrap(model := net())

    def average(inner: Optimizer, *_: object) -> None:
        for p, state in inner.state.items():
            state.update(average=p.detach().clone(), times=1)

    handle = optimizer.optim.register_step_post_hook(average) if rank == ODD else None
    optimizer.backward(model(torch.ones(2, 5)).sum())
    optimizer.step()
    with pytest.raises(ValueError, match="on every rank.*rank 1 has «average of 0.weight, torch.float32»") as caught:
        optimizer.state_dict()
    assert set(of_all(str(caught.value))) == {str(caught.value)}
    if handle is not None:
        handle.remove()
    for state in optimizer.state.values():
        state.pop("average", None)
    assert all("average" not in state for state in optimizer.state_dict()["state"].values())


def a_group_that_is_added_with_other_settings(rank: int, world_size: int) -> None:
    optimizer = wrap(net(), make=fused)
    late = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="rank 0 has «fused of group 1: True» where rank 1 has «fused of group 1"):
        optimizer.add_param_group({"params": [late], "fused": rank != ODD})
    optimizer.add_param_group({"params": [late]})


def test_other_differences_are_refused_by_name(subtests: pytest.Subtests) -> None:
    checks = [
        parameters_on_different_devices,
        states_that_a_hook_adds_on_one_rank,
        a_group_that_is_added_with_other_settings,
    ]
    check_all(checks, RANKS + 1, subtests, backend="cpu:gloo,meta:gloo", one_group=True)
