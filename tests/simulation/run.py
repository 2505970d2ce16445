"""Runs one program in the simulated world, and judges it."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from tempfile import TemporaryDirectory

from torch import Tensor

from tests.simulation.judge import Failure, Judge, largest
from tests.simulation.judge_errors import judge_raised, judge_told
from tests.simulation.log import Log
from tests.simulation.net import Batches
from tests.simulation.outcome import Outcome, SimulationEnded
from tests.simulation.probes import kept_answers
from tests.simulation.program import Program
from tests.simulation.rank import play, training_group
from tests.simulation.world import simulate

SLACK = 4.0  # how much more numbers may be off by where roundings grow
OFF = 1e-4  # a part of the largest number, by which others may be off in fp32
OFF_IN_FP16 = 0.1  # most programs' numbers change by a hundredth
HALF_IN_BF16 = 0.25 * 2.0**-15  # a change by a rounding in fp32, two of which would be half of a number in bf16
ROUNDINGS = 20  # of a program, each of which may grow as one of its weights does


@dataclass(frozen=True)
class Verdict:
    """What came of a program.

    Attributes:
        failure: what was wrong; None: nothing.
        refused: how often all ranks refused a call.
    """

    program: Program
    outcome: Outcome[Log]
    failure: Failure | None
    refused: int = 0

    @property
    def injected(self) -> str:
        """The kind of the fault, if the run came to it."""
        fault, outcome = self.program.fault, self.outcome
        if fault is None:
            return ""
        came = {
            "raise": bool(outcome.failed),
            "wait": outcome.messages.get(fault.rank, 0) > fault.at,
            "die": outcome.steps_of.get(fault.rank, 0) >= fault.at,
        }
        return fault.kind if came[fault.kind] else ""


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing of what programs do wrong on purpose."""
    log = logging.getLogger("lowlevel_zero")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            for text in ("Using backward.. with create_graph", "grad and param do not obey"):
                warnings.filterwarnings("ignore", text)
            yield
    finally:
        log.disabled = before


def run(program: Program, count: bool = False) -> Verdict:
    """Run a program; ``count``: operations are counted, in which faults may be."""
    batches = Batches(program)
    outcome = _played(program, batches, count)
    try:
        return Verdict(program, outcome, None, _judge(program, outcome, batches))
    except Failure as failure:
        if failure.kind != "wrong numbers" or not _has_grown(program, outcome, batches):
            return Verdict(program, outcome, failure)
    except Exception:  # a mistake of the judge's own, which is to be shown with its seed
        return Verdict(program, outcome, Failure("judge", traceback.format_exc()))
    return Verdict(program, outcome, None)


def told(seed: int, verdict: Verdict, options: str = "") -> str:
    """The model, each rank's calls and the fault of a program that failed, why it failed, and how to see it again.

    ``options``: those that it was drawn with, beside its seed.
    """
    replay = f'make simulate ARGS="--seed {seed}{options}"'
    return f"seed {seed} fails:\n{verdict.program}\n{verdict.failure}\nreplay it: {replay}\n"


def _has_grown(program: Program, outcome: Outcome[Log], batches: Batches) -> bool:
    """Whether numbers are wrong by roundings alone, which some programs make larger with each step.

    In fp32, numbers change as much where weights begin a rounding away; or a part as much, since a program rounds many
    times, and they are off by little. With fp16, whose loss scale belongs to the program, a rounding of its own changes
    them by a tenth. With bf16, the same program is right in fp32, and two roundings of bf16 would grow to half of a
    number; or numbers are off by less than that: a gradient that is missing, or comes twice, is off by more.
    """
    exact = program.in_fp32()
    if exact is None:
        return _growth(program, outcome) > OFF_IN_FP16
    if exact == program:
        growth = _growth(program, outcome)
        return growth > OFF or (growth > OFF / ROUNDINGS and _is_close(program, outcome, batches))
    of_exact = run(exact)
    if of_exact.failure is not None:
        return False
    return _growth(exact, of_exact.outcome) > HALF_IN_BF16 or _is_close(program, outcome, batches)


def _is_close(program: Program, outcome: Outcome[Log], batches: Batches) -> bool:
    try:
        _judge(program, outcome, batches, slack=SLACK)
    except Failure:
        return False
    return True


def _growth(program: Program, outcome: Outcome[Log]) -> float:
    """By how much a rounding of the initial weights changes what the ranks end with, relative to the largest number."""
    other = _played(program.nudged(), Batches(program), count=False)
    if outcome.errors or other.errors or other.deadlock is not None:
        return 0.0
    changes = [
        float((value.nan_to_num() - other_value.nan_to_num()).abs().max()) / (largest(value) + 0.1)
        if value.numel()
        else 0.0
        for rank, log in outcome.results.items()
        for value, other_value in zip(_numbers(log), _numbers(other.results[rank]), strict=True)
    ]
    return max(changes, default=0.0)


def _numbers(log: Log) -> list[Tensor]:
    """What a rank ends with: parameters, and slices of masters and states."""
    return [*log.parameters.values(), *chain.from_iterable(states.values() for states in log.slices.values())]


def _played(program: Program, batches: Batches, count: bool) -> Outcome[Log]:
    first, fault = program.offset, program.fault

    def job(rank: int) -> Log:
        if rank < first:
            training_group(program)
            return Log()
        return play(program, rank - first, batches, folder)

    counts = count or (fault is not None and fault.kind == "raise")
    with quiet(), _folder(program) as folder, nullcontext() if counts else kept_answers():
        placed = fault and replace(fault, rank=fault.rank + first)
        outcome = simulate(job, first + program.ranks, program.schedule, program.carrier, placed, count=count)
    return outcome.without_first(first)


def _folder(program: Program) -> AbstractContextManager[str]:
    """A folder for checkpoints, if any are saved."""
    saves = program.raises or any(call is not None and call.name == "save" for row in program.rows for call in row)
    return TemporaryDirectory() if saves else nullcontext("")


def _judge(program: Program, outcome: Outcome[Log], batches: Batches, slack: float = 1.0) -> int:
    """Raise ``Failure`` where the run is wrong; else how often a call was refused."""
    if outcome.deadlock is not None:
        stacks = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in sorted(outcome.deadlock.items()))
        raise Failure("deadlock", f"no rank can go on:\n{stacks}")
    if outcome.mismatch is not None:
        raise Failure("mismatch", outcome.mismatch)
    if program.fault is not None and isinstance(outcome.errors.get(program.fault.rank), SimulationEnded):
        judge_told(outcome)
        return 0
    if program.raises and outcome.failed:
        judge_raised(program, outcome, batches)
        return 0
    if outcome.errors:
        told = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in outcome.errors.items())
        raise Failure("crash", told)
    judge = Judge(program, [outcome.results[rank] for rank in range(program.ranks)], batches, slack)
    judge.judge()
    if outcome.left:
        raise Failure("left behind", str(outcome.left))
    return judge.refused
