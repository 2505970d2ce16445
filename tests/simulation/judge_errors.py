"""Judges runs in which a rank dies, or in which an operation of the package raises once."""

from __future__ import annotations

import re
from dataclasses import replace

from lowlevel_zero.communication.failed_ranks import LostRank
from tests.simulation.calls import BACKWARDS
from tests.simulation.judge import Failure, Judge
from tests.simulation.log import Entry, Log
from tests.simulation.net import Batches
from tests.simulation.outcome import InjectedFault, Outcome, SimulationEnded
from tests.simulation.program import Program

PROBES = "lowlevel_zero/optim/"  # which take an error for one of the optimizer's class


def _tells_split(error: BaseException) -> bool:
    return bool(re.search("rank . has .(the optimizer may write|.* split by)", str(error)))


def judge_told(outcome: Outcome[Log], others: str = "") -> None:
    """Raise ``Failure`` unless each error of a rank refuses a call, or tells that a rank was lost.

    Args:
        outcome: of a run in which a rank dies or raises.
        others: a pattern of what errors may tell beside.
    """
    raised = {rank: error for rank, error in outcome.errors.items() if not isinstance(error, SimulationEnded)}
    told = [(rank, f"{type(error).__name__}: {error}") for rank, error in raised.items()]
    told += [(rank, str(entry.error)) for rank, log in outcome.results.items() for entry in log.errors]
    for rank, error in told:
        if not re.search(rf"\bexpected\b|Connection closed|UserError{others}", error):
            raise Failure("untold", f"rank {rank}: {error}")


def judge_raised(program: Program, outcome: Outcome[Log], batches: Batches) -> None:
    """Raise ``Failure`` unless the ranks recover from an operation that has raised, as the docs tell.

    Each rank clears gradients and loads the checkpoint of the start. From there on numbers are compared.
    """
    assert program.fault is not None
    rank = program.fault.rank
    judge_told(outcome, rf"|{InjectedFault.__name__}|\brank {rank + program.offset}\b")
    if outcome.errors:  # it had to end its process, or couldn't construct its optimizers
        if str(outcome.failed).startswith(PROBES) and all(map(_tells_split, outcome.errors.values())):
            return
        if "injected fault" not in str(outcome.errors.get(rank)):
            raise Failure("crash", f"without an error of rank {rank}: {outcome.errors}")
        return
    logs = [outcome.results[each] for each in range(program.ranks)]
    if any(log.errors for log in logs):
        _judge_steps(rank, logs[rank])
        last = [entry.error.type for entry in logs[rank].errors[-1:]]  # none where its gradients were cleared anyway
        if last == [LostRank.__name__]:  # the others had come to their end
            return
        logs = [_recovered(each, log) for each, log in enumerate(logs)]
    Judge(program, logs, batches).judge()
    if outcome.left:
        raise Failure("left behind", str(outcome.left))


def _judge_steps(rank: int, log: Log) -> None:
    """Raise ``Failure`` if a step was taken after an error in a backward, whose gradients are lost."""
    lost: set[int] = set()  # numbers of parts
    for entry in log.entries:
        call, error = entry.call, entry.error
        injected = error is not None and error.type == InjectedFault.__name__
        # A rank asks for the loss scale before it runs a backward by gradient.
        if error is not None and injected and call.name in BACKWARDS and not error.stack[0].endswith(" loss_scale"):
            lost.add(call.of)
        elif call.name in ("zero_grad", "zero_grad to zeros", "load", "restore") and error is None:
            lost.discard(call.of)
        elif call.name in ("step", "closure", "synchronize") and error is None and call.of in lost:
            raise Failure("stepped", f"rank {rank} at {entry.place}: gradients were lost before")


def _recovered(rank: int, log: Log) -> Log:
    """Return the rank's log from the last checkpoint that it has loaded of the start."""
    starts = [at for at, entry in enumerate(log.entries) if _restores(entry)]
    if not starts or any(entry.error for entry in log.entries[starts[-1] :]):
        last = f", at last by {log.errors[-1].call}: {log.errors[-1].error}" if log.errors else ""
        raise Failure("not recovered", f"rank {rank} has raised {len(log.errors)} times{last}")
    return replace(log, entries=log.entries[starts[-1] :])


def _restores(entry: Entry) -> bool:
    return entry.call.name == "restore" and entry.call.of == 0
