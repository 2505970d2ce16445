"""Start ranks: by fork, over a file, with a timeout, and with tracebacks that name their rank.

``run_ranks(fn, world_size, *args)`` runs ``fn(rank, world_size, *args)`` in ``world_size`` forked processes, and
``run_cases(fn, world_size, cases)`` runs ``fn(rank, world_size, *case)`` for one case after another in the same ones.
Fork takes hundredths of a second where a fresh interpreter takes seconds, and ``fn`` may be a closure. The
price: a rank inherits what the parent did to torch. On a CPU that is harmless, backward included (it runs in
the calling thread). On a machine with an accelerator the parent must neither touch the device nor run a
backward before (the autograd engine would have started a thread per device, and refuses to work in a fork
after it): there an oracle runs in ``run_ranks(oracle, 1, init=False)``.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from tests.support.rank_process import LEFT_BEHIND, Job, Outcome, Raised, live
from tests.support.warm_up import warm_up

_FORK = multiprocessing.get_context("fork")

# Seconds that the other ranks get once one has raised: those that would raise too should come first.
GRACE = 2.0
EXPECTING_GRACE = 10.0


class _Rank(NamedTuple):
    process: ForkProcess
    pipe: Connection  # brings the outcome, then tells the rank to leave
    stacks: Path  # where it writes its stacks when asked; exists once it can be asked


class Ran(NamedTuple):
    """What became of one case on all ranks."""

    job: Job
    outcomes: dict[int, Outcome]  # in order of arrival
    stacks: dict[int, str]  # of the ranks that hung

    def values(self) -> list[Any]:
        """What the ranks returned; as ``run_ranks``, whose errors these are."""
        __tracebackhide__ = True
        if raised := self._raised():
            message = _describe(raised, self.job.world_size) + _show(self.stacks, "was still running, at")
            raise AssertionError(message)
        _raise_if_hung(self.stacks, self.job.timeout)
        return [self.outcomes[rank].value for rank in range(self.job.world_size)]

    def raised(self) -> list[Raised]:
        """What every rank raised; as ``run_ranks_expecting``, whose errors these are."""
        __tracebackhide__ = True
        raised = self._raised()
        returned = {rank: outcome.value for rank, outcome in self.outcomes.items() if not outcome.raised}
        if returned or (raised and self.stacks):
            lines = [f"rank {rank} did not raise, but returned {value!r:.99}\n" for rank, value in returned.items()]
            lines += [f"rank {rank} raised {error.type}: {error.message}\n" for rank, error in raised.items()]
            raise AssertionError("".join(lines) + _show(self.stacks, "did not raise, but was still running, at"))
        _raise_if_hung(self.stacks, self.job.timeout)
        return [raised[rank] for rank in range(self.job.world_size)]

    def _raised(self) -> dict[int, Raised]:
        return {rank: outcome.raised for rank, outcome in self.outcomes.items() if outcome.raised}


Case = TypeVar("Case", bound=tuple[Any, ...])


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    init: bool = True,
) -> list[Any]:
    """Return what ``fn(rank, world_size, *args)`` returned, rank by rank; tensors are copies, of any dtype.

    Args:
        timeout: seconds for all of it.
        backend: of the default process group.
        init: False: start without a process group.

    Raises:
        AssertionError: a rank raised or died; the message holds the first one's traceback. Ranks that are not
            done two seconds later are killed, and the message shows where they were.
        TimeoutError: the message names the ranks that hung and shows where.
    """
    (ran,) = _launch(Job(fn, world_size, [args], timeout, backend if init else None))
    return ran.values()


def run_ranks_expecting(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    init: bool = True,
) -> list[Raised]:
    """As ``run_ranks``, for a mistake that every rank must notice: return what each rank raised.

    Raises:
        AssertionError: a rank returned, or was still running ten seconds after another one had raised.
        TimeoutError: ranks hung, and none raised.
    """
    (ran,) = _launch(Job(fn, world_size, [args], timeout, backend if init else None), EXPECTING_GRACE)
    return ran.raised()


def run_cases(
    fn: Callable[..., Any],
    world_size: int,
    cases: Iterable[Case],
    *,
    timeout: float = 60.0,
    backend: str = "gloo",
    init: bool = True,
    one_group: bool = False,
) -> list[tuple[Case, Ran]]:
    """Run ``fn(rank, world_size, *case)`` for each case, in one launch of ranks; return each with what became of it.

    Look at each within a subtest, so that one that failed hides no other::

        for (stage, size), ran in run_cases(train, 2, product(STAGES, SIZES)):
            with subtests.test(stage=stage, size=size):
                assert ran.values() == ...

    A case has the process group to itself, and begins with the seeds that a test begins with. What it leaves behind
    in the process (see ``rank_process.state``) is its failure. After a case in which some ranks failed, the others
    run in a fresh launch.

    Args:
        timeout: seconds for each case.
        one_group: of cases that train as they should: each begins in the group of the one before, whose ranks know
            each other already, and takes a third of the time.
    """
    job = Job(_seeded(fn), world_size, [], timeout, backend if init else None, one_group=one_group)
    return _run_all(job, list(cases))


def run_cases_expecting(
    fn: Callable[..., Any],
    world_size: int,
    cases: Iterable[Case],
    *,
    timeout: float = 60.0,
    backend: str = "gloo",
    init: bool = True,
) -> list[tuple[Case, Ran]]:
    """As ``run_cases``, for mistakes that every rank must notice: ask each case for what it ``raised``."""
    return _run_all(Job(_seeded(fn), world_size, [], timeout, backend if init else None), list(cases), EXPECTING_GRACE)


def run_ranks_losing(
    fn: Callable[..., Any], world_size: int, lost: int, *args: Any, timeout: float = 60.0, how: str = "SIGKILL"
) -> dict[int, Raised]:
    """As ``run_ranks``, for an ``fn`` that kills rank ``lost``: return what each other rank raised.

    A rank's process ends as soon as it has raised, since that is what others may be waiting for. ``how`` is the message
    of what the lost one raises, where nobody kills it.

    Raises:
        AssertionError: a rank returned, or hadn't raised ten seconds after another one had ended.
    """
    (ran,) = _launch(Job(fn, world_size, [args], timeout, "gloo", stays=False), EXPECTING_GRACE)
    assert not ran.stacks, _show(ran.stacks, "was still running, at")
    raised = {rank: outcome.raised for rank, outcome in ran.outcomes.items() if outcome.raised}
    assert len(raised) == world_size, f"ranks that raised: {sorted(raised)}"
    assert raised.pop(lost).message == how
    return raised


# The parent's side.


def _run_all(job: Job, cases: list[Case], grace: float = GRACE) -> list[tuple[Case, Ran]]:
    done: list[Ran] = []
    while len(done) < len(cases):
        done += _launch(job._replace(cases=[tuple(case) for case in cases[len(done) :]]), grace)
    return list(zip(cases, done, strict=True))


def _seeded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` from the seeds that a test begins with."""

    def run(*args: Any) -> Any:
        random.seed(0)
        torch.manual_seed(0)
        return fn(*args)

    return run


def _launch(job: Job, grace: float = GRACE) -> list[Ran]:
    """What became of the cases, up to the first one after which these ranks can't go on."""
    warm_up()
    ranks: list[_Rank] = []
    done: list[Ran] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(job.world_size):
                ranks.append(_start(rank, job, Path(folder)))
            while len(done) < len(job.cases):
                outcomes = _collect(ranks, job.timeout, grace)
                ran, goes_on = _end_case(job, ranks, outcomes, last=len(done) + 1 == len(job.cases))
                done.append(ran)
                if not goes_on:
                    break
            return done
        finally:
            for each in ranks:
                each.process.kill()
                each.process.join()
                each.pipe.close()


def _end_case(job: Job, ranks: list[_Rank], outcomes: dict[int, Outcome], last: bool) -> tuple[Ran, bool]:
    """Take the case down on all ranks, and tell whether they can run another one."""
    raised = sum(outcome.raised is not None for outcome in outcomes.values())
    whole = len(outcomes) == len(ranks)
    goes_on = whole and not last and raised in (0, len(ranks)) and all(each.process.is_alive() for each in ranks)
    if goes_on:
        hung = _take_down(ranks, outcomes)
    elif whole and not raised:
        hung = _dismiss(ranks)
    else:
        hung = [rank for rank in range(job.world_size) if rank not in outcomes]
    if whole and raised and hung:  # its ranks raised, and what that has left can't be taken down: no mistake
        return Ran(job, outcomes, {}), False
    failed = hung or any(outcome.raised and outcome.raised.type == LEFT_BEHIND for outcome in outcomes.values())
    return Ran(job, outcomes, _dump_stacks({rank: ranks[rank] for rank in hung})), goes_on and not failed


def _start(rank: int, job: Job, folder: Path) -> _Rank:
    pipe, its_pipe = _FORK.Pipe()
    process = _FORK.Process(target=live, args=(rank, job, its_pipe, folder), name=f"rank-{rank}")
    process.start()
    its_pipe.close()  # so that the pipe ends when the rank dies
    return _Rank(process, pipe, folder / f"stacks-{rank}")


def _collect(ranks: list[_Rank], timeout: float, grace: float) -> dict[int, Outcome]:
    """Wait for all ranks; once one has raised, only ``grace`` seconds more."""
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    while len(outcomes) < len(ranks):
        waiting = {each.pipe: rank for rank, each in enumerate(ranks) if rank not in outcomes}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            outcomes[waiting[pipe]] = outcome = _receive(ranks[waiting[pipe]])
            if outcome.raised:
                deadline = min(deadline, time.monotonic() + grace)
    return outcomes


def _receive(rank: _Rank) -> Outcome:
    try:
        packed = rank.pipe.recv_bytes()
    except (EOFError, OSError):
        end = _end(rank)
        return Outcome(None, Raised("ProcessDied", end, f"no traceback: the process ended by {end}\n"))
    outcome: Outcome = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
    return outcome


def _end(rank: _Rank) -> str:
    rank.process.join()
    code = rank.process.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _take_down(ranks: list[_Rank], outcomes: dict[int, Outcome], patience: float = 30.0) -> list[int]:
    """Let the ranks end the case, now that all are done with it; what one has left behind becomes its outcome.

    Returns those that can't get out of it.
    """
    for each in ranks:
        with suppress(BrokenPipeError):
            each.pipe.send_bytes(b"go on")
    left = _collect(ranks, patience, patience)
    outcomes.update({rank: outcome for rank, outcome in left.items() if outcome.raised})
    return [rank for rank in range(len(ranks)) if rank not in left]


def _dismiss(ranks: list[_Rank], patience: float = 10.0) -> list[int]:
    """Let the ranks leave, now that all are done: one that left early would break a peer's last collective.

    Returns those that can't get out.
    """
    for each in ranks:
        with suppress(BrokenPipeError):  # it died; its exit code tells
            each.pipe.send_bytes(b"leave")
    deadline = time.monotonic() + patience
    for rank, each in enumerate(ranks):
        each.process.join(max(0.0, deadline - time.monotonic()))
        if each.process.exitcode:
            raise AssertionError(f"rank {rank} returned, but then its process ended by {_end(each)}")
    return [rank for rank, each in enumerate(ranks) if each.process.is_alive()]


def _dump_stacks(hung: dict[int, _Rank]) -> dict[int, str]:
    """Ask for the stacks and read what came; the handler is C, and so answers inside a collective too."""
    for each in hung.values():
        if each.stacks.exists():  # without the handler the signal would kill
            os.kill(each.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 2.0
    while not all(_stack(each) for each in hung.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if hung:
        time.sleep(0.1)  # for the rest of the lines
    return {rank: _stack(each) or "(no answer)\n" for rank, each in hung.items()}


def _stack(rank: _Rank) -> str:
    """The stacks so far, without the parent's frames below the rank's own."""
    text = rank.stacks.read_text() if rank.stacks.exists() else ""
    return re.sub(r"( in _work\n)(?:  File .*\n)+", r"\1", text)


def _describe(raised: dict[int, Raised], world_size: int) -> str:
    (first, error), *others = raised.items()
    also = "".join(f"rank {rank} raised too: {other.type}: {other.message}\n" for rank, other in others)
    return f"rank {first} of {world_size} failed:\n{error.traceback}{also}"


def _show(stacks: dict[int, str], what: str) -> str:
    return "".join(f"rank {rank} {what}:\n{stack}" for rank, stack in stacks.items())


def _raise_if_hung(stacks: dict[int, str], timeout: float) -> None:
    if stacks:
        names = ", ".join(str(rank) for rank in stacks)
        raise TimeoutError(f"these ranks hung (timeout {timeout:g} s): {names}\n{_show(stacks, 'was at')}")
