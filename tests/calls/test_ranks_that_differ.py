"""Ranks that differ where nobody should have to think of it: no collective does, or all ranks refuse it by name."""

from __future__ import annotations

import inspect
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.accessors import full_fp32_params, full_grads, full_optimizer_states
from lowlevel_zero.bookkeeping.parameter_store import ParameterStore
from tests.support.oracle import Run, build, emulate, groups, loss_of, worst
from tests.support.ranks import run_ranks

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
def environment(**values: str) -> Iterator[None]:
    kept = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextmanager
def global_hooks() -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(lambda *_: None).remove)
        stack.callback(register_optimizer_step_post_hook(lambda *_: None).remove)
        yield


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def loud() -> Iterator[None]:
    logger = logging.getLogger("lowlevel_zero")
    handler, level = logging.NullHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def hook_parameters(training: Training) -> None:
    for p in training.model.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: gradient.clone())
            p.register_post_accumulate_grad_hook(lambda p: None)


def hook_modules(training: Training) -> None:
    for module in training.model.modules():
        module.register_forward_pre_hook(lambda *_: None)
        module.register_forward_hook(lambda *_: None)


def hook_steps(training: Training, *_: object) -> None:
    training.inner.register_step_pre_hook(lambda *_: None)
    training.inner.register_step_post_hook(lambda *_: None)


def hook_the_wrapper(_: Training, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)


def choose_other_kernels(training: Training, *_: object) -> None:
    for group in training.inner.param_groups:
        group.update(fused=False, foreach=False)


def evaluate(training: Training) -> None:
    training.model.eval()


WORKS: dict[str, Case] = {
    "nothing": Case(),
    "verbose on rank 0": Case(options={"verbose": True}, rank=0),
    "verbose on another": Case(options={"verbose": True}),
    "a backward context": Case(options={"backward_context": lambda: torch.autograd.set_multithreading_enabled(False)}),
    "no shared memory": Case(lambda _: environment(LOWLEVEL_ZERO_SHARED_MEMORY="0")),
    "step hooks from the start": Case(hook_steps),
    "step hooks on rank 0": Case(hook_steps, rank=0),
    "step hooks that came later": Case(after=hook_steps),
    "step hooks on the wrapper": Case(after=hook_the_wrapper),
    "step hooks of all optimizers": Case(lambda _: global_hooks()),
    "hooks on parameters": Case(hook_parameters),
    "hooks on modules": Case(hook_modules),
    "other kernels, chosen later": Case(after=choose_other_kernels),
    "evaluation mode": Case(evaluate),
    "grad mode": Case(lambda _: torch.no_grad()),
    "autocast": Case(lambda _: torch.autocast("cpu", torch.bfloat16)),
    "deterministic algorithms": Case(lambda _: deterministic()),
    "a default dtype": Case(lambda _: default_dtype()),
    "a default device": Case(lambda _: torch.device("meta")),
    "logging": Case(lambda _: loud()),
    "warnings as errors": Case(lambda _: warnings_as_errors()),
}


def fused(params: Any) -> Optimizer:
    """One that may scale gradients, and skip a step, in its own kernel; and that makes its states where they belong."""
    return AdamW(params, lr=1e-2, fused=True)


def drop_layers(step: int, rank: int) -> set[int]:
    return {(step + rank) % 3} if step else set()


# In fp16 one more step overflows, which must leave everything as it is.
SCALE = {"initial_scale": 64.0, "hysteresis": 1}
RUNS: dict[str, Run] = {
    "stage 1": Run(steps=3, micro_batches=2, optimizer=fused, clip=0.3).with_options(overlap_allgather=True),
    "stage 2, dropped layers": Run(steps=4, optimizer=fused, drop=drop_layers).with_options(partition_grad=True),
    "stage 1, fp16": Run(steps=3, micro_batches=2, optimizer=fused, dtype=torch.float16).with_options(**SCALE),
    "stage 2, fp16": Run(steps=3, optimizer=fused, dtype=torch.float16, clip=0.3).with_options(
        partition_grad=True, **SCALE
    ),
}
OVERFLOW_BEFORE = 1
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}  # of what three steps of 0.01 make


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
            if run.dtype == torch.float16 and step == OVERFLOW_BEFORE:
                seen += take_step(rank, run, step, math.inf, model, optimizer)
            seen += take_step(rank, run, step, 1.0, model, optimizer)
        optimizer.verify()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        return [full_fp32_params(model), *seen, full_optimizer_states(model, "exp_avg"), state["state"]]


def take_step(
    rank: int, run: Run, step: int, factor: float, model: nn.Module, optimizer: LowLevelZeroOptimizer
) -> list[Any]:
    """One step, with gradients times ``factor`` on one rank: the gradients that are left, and their norm.

    They are read at once, and in the last step one by one.
    """
    for micro in range(run.micro_batches):
        with torch.device("cpu"), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            loss = loss_of(model, run, step, micro, rank) * (factor if rank == 0 else 1.0)
        with torch.autocast("cpu", enabled=False):  # which would change what the model computes
            optimizer.backward(loss)
    optimizer.step()
    if step < run.steps - 1:
        gradients = list(full_grads(model).values())
    else:
        gradients = [optimizer.get_param_grad(p) for p in model.parameters() if p.requires_grad]
    optimizer.zero_grad()
    return [gradients, optimizer.get_grad_norm(), optimizer.loss_scale] if math.isfinite(factor) else []


def flat(seen: Any) -> list[Any]:
    if isinstance(seen, dict):
        seen = list(seen.values())
    return [leaf for each in seen for leaf in flat(each)] if isinstance(seen, list) else [seen]


@pytest.mark.parametrize(("kind", "rules"), list(zip(RUNS, ["host", "device", "device", "host"], strict=True)))
def test_it_changes_nothing(kind: str, rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, states, gradients and norms are those of ranks that are alike, and those the oracle's.

    A device's rules are to wait for nothing that needn't be known, here on the host's tensors. Each difference is tried
    by both rules, and with both dtypes.
    """
    if rules == "device":
        monkeypatch.setattr(ParameterStore, "on_host", False)
    run = RUNS[kind]
    half = [name for at, name in enumerate(WORKS) if at == 0 or at % 2 == list(RUNS).index(kind) % 2]

    def live(rank: int, world_size: int) -> list[list[Any]]:
        return [train(rank, run, WORKS[name]) for name in half]

    ranks = run_ranks(live, RANKS, timeout=100)
    alike = ranks[0][0]
    expected, _ = emulate(run)
    difference, parameter = worst(expected, {name: alike[0][name] for name in expected})
    assert difference <= TOLERANCES[run.dtype], f"{parameter} differs from the oracle by {difference:.3g}"
    for rank, all_seen in enumerate(ranks):
        for name, seen in zip(half, all_seen, strict=True):
            torch.testing.assert_close(
                flat(seen), flat(alike), rtol=1e-5, atol=1e-6, msg=lambda why, at=(name, rank): f"{at}: {why}"
            )


# ---- what is refused: on all ranks, by name ----


def net(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, device=device), nn.Linear(4, 2, device=device))


class Mine(AdamW):
    """Somebody's own, with the settings of another."""


def wrap(
    model: nn.Module | None = None, make: Callable[..., Optimizer] = AdamW, given: bool = True, **options: Any
) -> LowLevelZeroOptimizer:
    model = net() if model is None else model
    options = {"partition_grad": True, **options}
    return LowLevelZeroOptimizer(make(model.parameters()), model=model if given else None, **options)


def having(change: Callable[[nn.Sequential], Any]) -> nn.Sequential:
    model = net()
    change(model)
    return model


def stepped(params: Any) -> Optimizer:
    optimizer = AdamW(params)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


def with_state_on_meta(params: Any) -> Optimizer:
    optimizer = stepped(params)
    for state in optimizer.state.values():
        state["step"] = state["step"].to("meta")
    return optimizer


def wrap_in(environment_of: dict[str, str]) -> Any:
    with environment(**environment_of):
        return wrap()


OTHER_OPTIONS: dict[str, Any] = {
    "partition_grad": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 50,
    "communication_dtype": torch.bfloat16,
    "forced_dtype": torch.float64,
    "overlap_communication": False,
    "overlap_allgather": True,
    "cpu_offload": True,
    "master_weights": False,
    "clip_grad_norm": 0.5,
    "assume_elementwise": True,
    "fp8_communication": True,
    "fp8_min_numel": 1,
    "reduce_scatter_with_fp32_accumulation": True,
    "gradient_predivide_factor": 2.0,
    "reduction": "sum",
    "pad_buckets_for_high_nccl_busbw": True,
    "slice_multiple": 8,
    "stall_timeout": 0.0,
    "debug": True,
    "verify_every": 1,
    "max_skipped_steps": 1,
    "error_if_nonfinite": True,
    "own_communicator": False,
    "initial_scale": 2.0,
    "min_scale": 0.5,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "hysteresis": 3,
    "max_scale": 2.0**20,
}
# Process groups: ranks that differ in them have other errors.
GROUPS = {"dp_process_group", "extra_dp_group", "pg_to_param_list", "hybrid_shard"}

Construct = Callable[[], Any]


class Refused(NamedTuple):
    """What a rank constructs that differs, what the others do, and what they all are told."""

    odd: Construct
    others: Construct
    words: tuple[str, ...]


REFUSED: dict[str, Refused] = {
    **{
        name: Refused(lambda option=(name, value): wrap(**dict([option])), wrap, (name, str(value)))
        for name, value in OTHER_OPTIONS.items()
    },
    "LOWLEVEL_ZERO_DEBUG": Refused(lambda: wrap_in({"LOWLEVEL_ZERO_DEBUG": "1"}), wrap, ("LOWLEVEL_ZERO_DEBUG",)),
    "another class": Refused(lambda: wrap(make=Mine), wrap, ("optimizer", "AdamW", "Mine")),
    "a class of no other settings": Refused(
        lambda: wrap(make=lambda params: torch.optim.SGD(params, lr=1e-3)), wrap, ("AdamW", "SGD")
    ),
    **{
        f"{switch} kernels": Refused(
            lambda switch=switch: wrap(make=lambda params: AdamW(params, **{switch: True})), wrap, (switch, "True")
        )
        for switch in ("fused", "foreach", "capturable", "maximize", "amsgrad")
    },
    "a learning rate": Refused(lambda: wrap(make=lambda params: AdamW(params, lr=0.5)), wrap, ("lr", "0.5")),
    "a learning rate in a tensor": Refused(
        lambda: wrap(make=lambda params: AdamW(params, lr=torch.tensor(0.5))),
        lambda: wrap(make=lambda params: AdamW(params, lr=torch.tensor(0.25))),
        ("lr", "0.5", "0.25"),
    ),
    "states": Refused(lambda: wrap(make=stepped), wrap, ("0.weight", "exp_avg")),
    "a state's device": Refused(lambda: wrap(make=with_state_on_meta), lambda: wrap(make=stepped), ("step", "meta")),
    "no model": Refused(lambda: wrap(given=False), wrap, ("model=None",)),
    "a frozen parameter": Refused(
        lambda: wrap(having(lambda model: model[1].bias.requires_grad_(False))), wrap, ("1.bias", "frozen", "trainable")
    ),
}


def test_all_options_are_refused_or_have_no_effect() -> None:
    known = {*OTHER_OPTIONS, *(name for case in WORKS.values() for name in case.options), *GROUPS}
    assert known == set(inspect.signature(LowLevelZeroOptimizer).parameters) - {"optimizer", "model"}


def test_all_ranks_refuse_it_and_say_what_differs_and_where() -> None:
    def live(rank: int, world_size: int) -> dict[str, str]:
        told: dict[str, str] = {}
        for name, case in REFUSED.items():
            with pytest.raises(ValueError, match="on every rank; rank 0 has") as caught:
                (case.odd if rank == ODD else case.others)()
            told[name] = str(caught.value)
        optimizer = wrap(model := net())
        optimizer.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        return told

    ranks = run_ranks(live, RANKS + 1, timeout=100)
    assert ranks[0] == ranks[1] == ranks[2]
    for name, message in ranks[0].items():
        assert f"rank {ODD} has" in message, name
        assert all(word in message for word in REFUSED[name].words), f"{name}: {message}"


def test_parameters_on_different_devices_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lowlevel_zero.bookkeeping.checks.check_has_values", lambda model: None
    )  # meta is here for a device

    def live(rank: int, world_size: int) -> str:
        model = nn.Linear(3, 2, bias=False, device="meta" if rank == ODD else "cpu")
        with pytest.raises(ValueError, match="on every rank") as caught:
            wrap(model)
        return str(caught.value)

    first, *others = run_ranks(live, RANKS + 1, backend="cpu:gloo,meta:gloo")
    assert others == [first, first]
    assert "rank 0 has «trained on cpu» where rank 1 has «trained on meta»" in first


def test_states_that_a_hook_adds_on_one_rank_are_refused_by_name() -> None:
    def live(rank: int, world_size: int) -> str:
        optimizer = wrap(model := net())

        def average(inner: Optimizer, *_: object) -> None:
            for p, state in inner.state.items():
                state.update(average=p.detach().clone(), times=1)

        handle = optimizer.optim.register_step_post_hook(average) if rank == ODD else None
        optimizer.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        with pytest.raises(ValueError, match="on every rank") as caught:
            optimizer.state_dict()
        if handle is not None:
            handle.remove()
        for state in optimizer.state.values():
            state.pop("average", None)
        assert all("average" not in state for state in optimizer.state_dict()["state"].values())
        return str(caught.value)

    first, second = run_ranks(live, RANKS)
    assert first == second
    assert "rank 1 has «average of 0.weight, torch.float32»" in first


def test_a_group_that_is_added_with_other_settings_is_refused_by_name() -> None:
    def live(rank: int, world_size: int) -> None:
        optimizer = wrap(net(), make=fused)
        late = nn.Parameter(torch.zeros(3))
        with pytest.raises(ValueError, match="rank 0 has «fused of group 1: True» where rank 1 has «fused of group 1"):
            optimizer.add_param_group({"params": [late], "fused": rank != ODD})
        optimizer.add_param_group({"params": [late]})

    run_ranks(live, RANKS)
