"""Runs one program in the simulated world, and judges it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

from tests.simulation.draw import draw
from tests.simulation.judge import Failure, Judge
from tests.simulation.log import Log
from tests.simulation.net import Batches
from tests.simulation.outcome import Carrier, Fault, Outcome
from tests.simulation.program import Program
from tests.simulation.rank import play
from tests.simulation.world import simulate


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


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing of what programs do wrong on purpose."""
    log = logging.getLogger("lowlevel_zero")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def run(program: Program, count: bool = False) -> Verdict:
    """Run a program; ``count``: operations are counted, in which faults may be."""
    batches = Batches(program)
    with quiet():
        outcome = simulate(
            lambda rank: play(program, rank, batches),
            program.ranks,
            program.schedule,
            program.carrier,
            program.fault,
            count=count,
        )
    try:
        return Verdict(program, outcome, None, _judge(program, outcome, batches))
    except Failure as failure:
        return Verdict(program, outcome, failure)


def _judge(program: Program, outcome: Outcome[Log], batches: Batches) -> int:
    """Raise ``Failure`` where the run is wrong; else how often a call was refused."""
    if outcome.deadlock is not None:
        stacks = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in sorted(outcome.deadlock.items()))
        raise Failure("deadlock", f"no rank can go on:\n{stacks}")
    if outcome.mismatch is not None:
        raise Failure("mismatch", outcome.mismatch)
    died = {program.fault.rank} if program.fault is not None and program.fault.kind == "die" else set()
    crashed = {rank: error for rank, error in outcome.errors.items() if rank not in died}
    if crashed:
        told = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in crashed.items())
        raise Failure("crash", told)
    if died:
        return 0
    judge = Judge(program, [outcome.results[rank] for rank in range(program.ranks)], batches)
    judge.judge()
    if outcome.left:
        raise Failure("left behind", str(outcome.left))
    return judge.refused


def run_seed(seed: int, carrier: Carrier | None = None) -> list[Verdict]:
    """Run the program of a seed, and once more with the fault that the seed draws; the last one may have failed."""
    program = draw(seed, carrier)
    random = Random(-seed)
    kind = random.choices(["none", "raise", "wait", "die"], [70, 15, 10, 5])[0]
    verdicts = [run(program, count=kind == "raise")]
    if verdicts[0].failure is None and kind != "none":
        places = {"raise": "operations", "wait": "messages", "die": "steps_of"}[kind]
        rank = random.randrange(program.ranks)
        among = getattr(verdicts[0].outcome, places).get(rank, 0)
        if among:
            fault = Fault(rank, random.randrange(among), kind)
            verdicts.append(run(replace(program, fault=fault, kind=f"{kind} fault")))
    return verdicts
