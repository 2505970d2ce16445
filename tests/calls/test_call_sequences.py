"""Calls in any order, on models of any shape and ranks that drop different layers, do what plain torch does.

``hypothesis`` draws them: always the same few, and ``make soak`` as many new ones as ``LOWLEVEL_ZERO_EXAMPLES`` says.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import torch.distributed.tensor  # here once, not in every forked rank
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.ranks import run_ranks
from tests.support.sequences import (
    MOST_RANKS,
    NOTHING,
    OPTIMIZERS,
    Alone,
    Call,
    Case,
    Left,
    Net,
    Phase,
    Seen,
    Told,
    Weight,
    play_rank,
)

MANY = int(os.environ.get("LOWLEVEL_ZERO_EXAMPLES", "2000"))
PLAIN = [torch.float32, torch.float64]
ROUNDED = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def drawn(examples: int, new: bool = False) -> settings:
    """So many examples: the same at each run, or ``new`` ones."""
    return settings(
        max_examples=examples,
        derandomize=not new,
        database=None,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=[Stage.explicit, Stage.generate, Stage.shrink],
        suppress_health_check=[*HealthCheck],
    )


# ---- what is drawn; what is simplest comes first, so that failures shrink towards it ----

CALLS = [
    *("backward", "step", "zero_grad", "no_sync", "gradients", "clip", "evaluate", "zero_grad to zeros", "edit"),
    *("closure", "freeze", "add", "learning rate", "backward", "step", "overflow"),
]

shapes = st.sampled_from([(2,), (), (1,), (0, 3), (7,), (2, 3)]) | st.lists(st.integers(0, 4), max_size=3).map(tuple)
drops = st.sampled_from([0, 1, 2, 3, 4, 6, 7, NOTHING])


@st.composite
def weights(draw: st.DrawFn, dtypes: list[torch.dtype]) -> Weight:
    return Weight(
        draw(shapes),
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from(["trained"] * 4 + ["frozen", "late", "thawed"])),
        draw(st.integers(0, 2)),
        draw(st.booleans()),
    )


calls = st.builds(
    Call,
    name=st.sampled_from(CALLS),
    drops=st.tuples(*[drops] * MOST_RANKS),
    bare=st.sampled_from([0, 0, 15]) | st.integers(0, 15),
    checkpointing=st.sampled_from(["none", "none", "reentrant", "non-reentrant"]),
    amount=st.sampled_from([0.5, 0.05, 5.0]),
)


@st.composite
def options(draw: st.DrawFn, rounded: bool) -> dict[str, Any]:
    """Of what changes no numbers, what differs from the defaults."""
    stage = draw(st.sampled_from([{}, {"partition_grad": True}, {"reduce_scatter": True}]))
    chosen: dict[str, Any] = {**stage, "reduce_bucket_size": draw(st.sampled_from([1000, 1, 5, 20]))}
    if draw(st.booleans()):
        chosen["overlap_communication"] = False
    for name in ("overlap_allgather", "cpu_offload", "debug", "pad_buckets_for_high_nccl_busbw"):
        if draw(st.booleans()):
            chosen[name] = True
    if draw(st.booleans()):
        chosen["gradient_predivide_factor"] = 2.0
    if draw(st.booleans()):
        chosen["verify_every"] = 1
    if rounded and draw(st.booleans()):
        chosen["communication_dtype"] = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    if stage and draw(st.booleans()):
        chosen["reduce_scatter_with_fp32_accumulation"] = True
    return chosen


@st.composite
def cases(draw: st.DrawFn, most_calls: int = 14) -> Case:
    rounded = draw(st.sampled_from([False, False, True]))
    parameters = draw(st.lists(weights(ROUNDED if rounded else PLAIN), min_size=1, max_size=6))
    layer = st.lists(st.integers(0, len(parameters) - 1), max_size=4).map(tuple)
    phases = [
        Phase(
            (*draw(st.lists(calls, max_size=most_calls)), Call(), Call("step")),
            draw(st.sampled_from([2, 1, 3, 4])),
            draw(options(rounded)),
            draw(st.sampled_from(["none", "both", "hybrid"])),
            draw(st.sampled_from([True, False])),
            draw(st.sampled_from(["state_dict", "checkpoint"])),
        )
        for _ in range(draw(st.sampled_from([1, 1, 1, 2])))
    ]
    numbers: dict[str, Any] = {}
    if draw(st.booleans()):
        numbers["clip_grad_norm"] = draw(st.sampled_from([0.5, 5.0]))
    if not rounded and draw(st.booleans()):
        numbers["reduction"] = "sum"
    if rounded and draw(st.booleans()):
        numbers["master_weights"] = False
    return possible(
        Case(
            tuple(parameters),
            tuple(draw(st.lists(layer, min_size=1, max_size=3))),
            tuple(phases),
            draw(st.sampled_from(["sgd", "adamw", "adagrad"])),
            draw(st.integers(1, 3)),
            numbers,
        )
    )


def possible(case: Case) -> Case:
    """Without what can't be: fp16 weights or an overflow where no loss is scaled."""
    if case.half:
        return case
    parameters = [
        replace(weight, dtype=torch.bfloat16) if weight.dtype == torch.float16 else weight for weight in case.weights
    ]
    phases = [
        replace(phase, calls=tuple(call for call in phase.calls if call.name != "overflow")) for phase in case.phases
    ]
    return replace(case, weights=tuple(parameters), phases=tuple(phases))


# ---- how it is judged ----


def check(case: Case) -> None:
    alone = Alone(case)
    left: Left | None = None
    with tempfile.TemporaryDirectory() as folder:
        for at, phase in enumerate(case.phases):
            expected = alone.play(phase)
            played = run_ranks(play_rank, phase.world_size, case, at, left, folder, timeout=40)
            left = played[0][1]
            for seen, _ in played:
                compare(case, expected, seen)
                for name, value in played[0][0].parameters.items():
                    assert torch.equal(value, seen.parameters[name]), f"ranks differ in {name}"


def compare(case: Case, expected: Seen, got: Seen) -> None:
    for one, other in zip(expected.told, got.told, strict=True):
        compare_told(case, one, other)
    start = dict(Net(case, 0).named_parameters())
    for name, value in expected.parameters.items():
        way = largest(value.double() - start[name].detach().double())
        compare_values(case, value, got.parameters[name], f"parameter {name}", way, roundings=2)
        if value.numel():  # empty ones are never stepped
            theirs, ours = (seen.states.get(name, {}) for seen in (expected, got))
            assert theirs.keys() == ours.keys(), name
            for key, state in theirs.items():
                compare_values(case, state, ours[key], f"state of {name}, {key}", largest(state))


def compare_told(case: Case, expected: Told, got: Told) -> None:
    assert expected.name == got.name
    for at, (one, other) in enumerate(zip(expected.values, got.values, strict=True)):
        if one is None or other is None:
            assert one is other or expected.name == "losses", f"{expected.name}, {at}"
        else:
            compare_values(case, one, other, f"{expected.name} {at}", largest(one))


def largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def compare_values(case: Case, expected: Tensor, got: Tensor, what: str, size: float, roundings: float = 0) -> None:
    """Off by no more than a share of ``size``, and so many ``roundings`` of the numbers themselves."""
    # A momentum of 0.02 may be what two gradients of 0.3 differ by, each rounded to bf16.
    share, least = (0.03, 3e-3) if case.coarse else (1e-5, 1e-6)
    within = share * size + least + roundings * largest(expected) * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(
        got.double(),
        expected.double(),
        rtol=0,
        atol=within,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


# ---- what the judgement is worth ----


class Doubling(Alone):
    def _gradient(self, p: nn.Parameter) -> Tensor | None:
        gradient = super()._gradient(p)
        return None if gradient is None else 2 * gradient


class LeavingARankOut(Alone):
    def _backward(self, call: Call, place: int, rank: int) -> None:
        if rank < self.ranks - 1:
            super()._backward(call, place, rank)


class LosingABackward(Alone):
    def _backward(self, call: Call, place: int, rank: int) -> None:
        if place > 0:
            super()._backward(call, place, rank)


class SkippingAStep(Alone):
    skipped = False

    def _step(self) -> None:
        if self.skipped:
            super()._step()
        self.skipped = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mistaken", [Doubling, LeavingARankOut, LosingABackward, SkippingAStep])
def test_a_mistake_is_seen_in_parameters_and_in_states(
    mistaken: type[Alone], optimizer: str, dtype: torch.dtype
) -> None:
    step = (Call(), Call(), Call("step"), Call("zero_grad"))
    phase = Phase((*step, *step), world_size=MOST_RANKS)
    case = Case((Weight((2, 3), dtype), Weight((7,), dtype)), ((0,), (1,)), (phase,), optimizer)
    expected, wrong = Alone(case).play(phase), mistaken(case).play(phase)
    compare(case, expected, Alone(case).play(phase))
    for mixed in (expected._replace(parameters=wrong.parameters), expected._replace(states=wrong.states)):
        with pytest.raises(AssertionError, match="parameter|state"):
            compare(case, expected, mixed)


@drawn(8)
@given(cases())
def test_calls_in_any_order(case: Case) -> None:
    check(case)


@drawn(4)
@given(cases())
def test_calls_in_any_order_with_unused_parameters_detected(forecasting: None, case: Case) -> None:
    check(case)


@pytest.mark.soak
@pytest.mark.timeout(0)
@drawn(MANY, new=True)
@given(cases(most_calls=30))
def test_many_new_calls_in_any_order(case: Case) -> None:
    check(case)


@pytest.mark.soak
@pytest.mark.timeout(0)
@drawn(MANY, new=True)
@given(cases(most_calls=30))
def test_many_new_calls_in_any_order_with_unused_parameters_detected(forecasting: None, case: Case) -> None:
    check(case)
