"""Programs that seeds draw, always the same ones, do what one process does, or are refused by all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.simulation import judge
from tests.simulation.draw import draw
from tests.simulation.judge import Failure, Judge
from tests.simulation.outcome import CARRIERS, Carrier, Fault
from tests.simulation.program import Call, Part, Program, Weight
from tests.simulation.regressions import REGRESSIONS
from tests.simulation.run import run
from tests.simulation.shrink import shrink


@pytest.mark.parametrize("name", REGRESSIONS)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_went_wrong_before(name: str, carrier: Carrier) -> None:
    for schedule in sorted({0, 1, 2, REGRESSIONS[name].schedule}):
        verdict = run(replace(REGRESSIONS[name], carrier=carrier, schedule=schedule))
        assert verdict.failure is None, f"schedule {schedule}\n{verdict.program}\n{verdict.failure}"


OVERLAPS = Part(options=(("overlap_allgather", True),))  # norms are judged a step later
WHOLE = Part((Weight(), Weight((7,))), ((0,), (1,)), options=(("partition_grad", True), ("split", "parameters")))
BY_ELEMENTS = replace(WHOLE, options=())
EXPERTS = Part((Weight(), Weight(expert=True)))
FROZEN = Part((Weight(), Weight((2, 3), role="frozen", transposed=True)), ((0,), (0, 1)))  # sent from a copy
REFUSES = Part(options=(("error_if_nonfinite", True),))  # on all ranks, by the norm that some of them can't read
NEVER = 10**6  # as many operations no program has


def _failing(*names: str, part: Part = Part(), ranks: int = 2, carrier: Carrier = "messages") -> Program:  # noqa: B008
    rows = tuple((Call(name),) * ranks for name in names)
    return Program(ranks, carrier, (part,), rows, fault=Fault(0, NEVER))


# Programs, and a function of the package in which some operation fails.
FAILING: dict[str, tuple[Program, str]] = {
    "looks at a norm that isn't finite": (_failing("nan", "step"), "norm"),
    "reads a norm that all ranks refuse": (_failing("nan", "step", part=REFUSES, carrier="nccl"), "value"),
    "looks for a parameter that isn't finite": (_failing("nan", "step"), "_first_bad"),
    "looks at the norm of the step before": (_failing("nan", "step", "step", part=OVERLAPS), "norm"),
    "reduces buckets to their owners": (_failing("backward", "step", part=WHOLE, carrier="nccl"), "reduce"),
    "copies what it broadcasts": (_failing("backward", part=FROZEN), "as_bytes"),
    "broadcasts, before experts are": (_failing("backward", part=EXPERTS, ranks=4, carrier="nccl"), "_spread"),
    "broadcasts, before others within a row": (
        _failing("backward", part=Part(levels="inner"), ranks=4, carrier="nccl"),
        "_spread",
    ),
    "verifies": (_failing("backward", "verify", "step", part=BY_ELEMENTS), "sum_rows"),
    "keeps a state dict": (_failing("backward", "keep state", "step", part=BY_ELEMENTS), "sum_rows"),
    "loads a state dict": (_failing("keep state", "backward", "load state", "step", part=BY_ELEMENTS), "sum_rows"),
    "verifies experts of its own": (_failing("backward", "verify", part=EXPERTS), "checksum"),
    "gathers what is verified": (_failing("backward", "step", "verify", part=OVERLAPS), "unpack_theirs"),
    "brings back what sleeps, in a backward whose exception its caller ignores": (
        replace(_failing("backward", "sleep", "backward", "step", carrier="nccl"), schedule=1),
        "_move",
    ),
    "tells the others of states that it owns": (_failing("backward", "step", "keep state", part=WHOLE), "told"),
    "brings back what sleeps, in a plain backward whose exception its caller ignores": (
        replace(_failing("backward", "sleep", "plain", "step", carrier="nccl"), schedule=1),
        "_move",
    ),
    "brings back what sleeps, in a pass within another optimizer's": (
        Program(
            2,
            "nccl",
            (Part((Weight(),), ((0,),)),) * 2,
            ((Call("backward", of=1),) * 2, (Call("sleep", of=1),) * 2, (Call("nested"),) * 2),
            fault=Fault(0, NEVER),
        ),
        "_move",
    ),
    "follows a write, where others have gradients": (
        Program(
            2,
            "nccl",
            (Part((Weight(), Weight(dtype="bfloat16")), ((1,),), options=(("split", "parameters"),)),),
            ((Call("backward", drops=1), Call("backward")), (Call("write weight", at=1),) * 2, (Call("step"),) * 2),
            fault=Fault(0, NEVER),
        ),
        "_rounds_to",
    ),
    "takes norms of gradients": (_failing("backward", "package's clip", "step"), "norm"),
    "sums within a group, then across": (_failing("backward", "step", ranks=4, part=Part(levels="inner")), "sum_rows"),
}


@pytest.mark.parametrize("name", FAILING)
def test_nobody_waits_for_a_rank_that_fails_where_it(name: str) -> None:
    program, function = FAILING[name]
    places = run(program, count=True).outcome.places
    points = [(rank, at) for rank, each in places.items() for at, place in enumerate(each) if place == function]
    assert points
    for rank, at in points[:12]:
        verdict = run(replace(program, fault=Fault(rank, at)))
        assert verdict.failure is None, f"operation {at} of rank {rank}\n{verdict.failure}"


@pytest.mark.parametrize("carrier", ["messages", "nccl"])
def test_nobody_waits_among_several_groups_for_a_rank_that_has_lost_another(carrier: Carrier) -> None:
    rows = tuple((Call(name),) * 4 for name in ("backward", "gradient", "step"))
    program = Program(4, carrier, (replace(EXPERTS, layers=((0, 1),)),), rows, schedule=1)
    for at in range(30, run(program).outcome.steps_of[1], 3):
        verdict = run(replace(program, fault=Fault(1, at, "die")))
        assert verdict.failure is None, f"hand-over {at} of rank 1\n{verdict.failure}"


def test_nobody_waits_for_a_rank_whose_reductions_on_a_device_another_one_has_broken() -> None:
    drops = Call("plain", drops=1)
    program = Program(
        4,
        "nccl",
        (Part((Weight(),) * 3, ((0,),), options=(("reduce_bucket_size", 4),)),),
        ((Call("plain"), drops, drops, drops), (Call("keep state"),) * 4),
    )
    for schedule in (17, 19, 20, 31, 35):
        for at in range(38, 48):
            verdict = run(replace(program, schedule=schedule, fault=Fault(1, at, "die")))
            assert verdict.failure is None, f"schedule {schedule}, hand-over {at} of rank 1\n{verdict.failure}"


# ---- what the simulation itself must do ----

STEP = (Call("backward"), Call("step"), Call("zero_grad"))
TWO_STEPS = Program(parts=(Part((Weight(), Weight((2, 3))), ((0, 1),)),), rows=tuple((call,) * 2 for call in STEP * 2))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_seed_replays_exactly(carrier: Carrier) -> None:
    for seed in range(4):
        program = draw(seed, carrier)
        assert program == draw(seed, carrier)
        assert run(program).outcome.trace == run(program).outcome.trace
    assert len({run(replace(TWO_STEPS, carrier=carrier, schedule=at)).outcome.trace for at in range(4)}) > 1


def test_a_program_is_printed_as_data_that_makes_it_again() -> None:
    for seed in range(50):
        assert eval(repr(draw(seed))) == draw(seed)


def test_a_seed_draws_what_users_do() -> None:
    programs = [draw(seed) for seed in range(400)]
    names = {call.name for program in programs for row in program.rows for call in row if call is not None}
    assert names >= {
        "backward",
        "plain",
        "no_sync",
        "pass",
        "step",
        "closure",
        "grad = None",
        "scale",
        "reload",
        "nested",
    }
    assert {program.ranks for program in programs} == {2, 3, 4}
    assert {program.carrier for program in programs} == set(CARRIERS)
    assert {len(program.parts) for program in programs} == {1, 2}
    kinds = {program.kind for program in programs}
    assert kinds >= {"alike", "leave out", "swap", "another call", "learning rate alone", "write weight alone"}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("off", [0.01, float("nan")])
def test_wrong_numbers_are_seen(at: int, off: float) -> None:
    logs = list(run(TWO_STEPS).outcome.results.values())
    Judge(TWO_STEPS, logs).judge()
    for log in logs:
        log.parameters[0, at].view(-1)[0] += off
    with pytest.raises(Failure, match=f"wrong numbers: rank 0, model 0, w{at}"):
        Judge(TWO_STEPS, logs).judge()


def test_ranks_that_differ_in_their_last_bit_are_seen() -> None:
    logs = list(run(TWO_STEPS).outcome.results.values())
    values = logs[1].parameters[0, 0]
    values[2] = torch.nextafter(values[2], values[2] + 1)
    with pytest.raises(Failure, match="ranks differ: model 0, w0: ranks 0 and 1"):
        Judge(TWO_STEPS, logs).judge()


def test_slices_of_states_are_compared() -> None:
    logs = list(run(TWO_STEPS).outcome.results.values())
    logs[1].slices[0, 1]["momentum_buffer"][0] += 0.01
    with pytest.raises(Failure, match="wrong numbers: rank 1, model 0, momentum_buffer of w1"):
        Judge(TWO_STEPS, logs).judge()


def test_a_refusal_must_name_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    program = replace(TWO_STEPS, rows=((STEP[0], STEP[0]), (STEP[1], STEP[2])))
    verdict = run(program)
    assert verdict.failure is None
    assert verdict.refused == 1
    entry = verdict.outcome.results[1].errors[0]
    assert entry.error is not None
    entry.error = entry.error._replace(text="something is wrong")
    with pytest.raises(Failure, match="unnamed cause: rank 1"):
        Judge(program, [verdict.outcome.results[rank] for rank in range(2)]).judge()


def test_a_refusal_by_one_rank_alone_is_seen() -> None:
    program = replace(TWO_STEPS, rows=((STEP[0], STEP[0]), (STEP[1], STEP[2])))
    logs = [run(program).outcome.results[rank] for rank in range(2)]
    logs[1].errors[0].error = None
    with pytest.raises(Failure, match="refused by some"):
        Judge(program, logs).judge()


def test_shrinking_leaves_what_matters() -> None:
    """A failure that hangs on one call of one weight and one option."""
    program = next(each for each in map(draw, range(9000)) if _odd(each) and each.ranks == 3 and len(each.parts) == 2)
    small = shrink(program, _odd, tries=10_000)
    assert small.ranks == 2
    assert len(small.rows) == 1
    assert len(small.parts) == 1
    assert len(small.parts[0].options) == 1
    assert len(small.parts[0].weights) <= 2


def _odd(program: Program) -> bool:
    scaled = {call.of for row in program.rows for call in row if call is not None and call.name == "scale"}
    return any("overlap_allgather" in program.parts[of].keywords for of in scaled)


COARSE = replace(TWO_STEPS, parts=(replace(TWO_STEPS.parts[0], options=(("communication_dtype", "bfloat16"),)),))


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_rounding_to_16_bits_may_grow_and_gradients_must_not_come_twice(share: float, monkeypatch: Any) -> None:
    """Numbers are off by a share of themselves, in the one program alone, and not in the same one in fp32."""
    compare = Judge._compare

    def off(self: Judge, part: Any, expected: Any, got: Any, *args: Any) -> None:
        compare(self, part, expected, got * (1 + share * part.is_coarse), *args)

    monkeypatch.setattr(Judge, "_compare", off)
    failure = run(COARSE).failure
    assert (failure is None) == (share < 0.5), failure


def test_the_tolerance_is_small() -> None:
    """In fp32; numbers that are rounded to 16 bits may differ by more."""
    part = judge.PartReference(TWO_STEPS, 0)
    assert judge.tolerance(part, torch.float32, 1.0) < 2e-4
