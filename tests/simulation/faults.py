"""The fault sweep: each operation of some trainings fails once, and every rank does what the docs say.

A training is a lesson (``lessons.py``). A rank that an exception leaves follows the page's loop: ``zero_grad`` and the
next batch, and a checkpoint when it is told that parameters are undefined. In the end the ranks hold what a training
holds in which the steps that failed never happened, or that went on from the checkpoint.

    python -m tests.simulation.faults "stage 2" --rank 1 --at 57      one point, told in full
    python -m tests.simulation.faults                                 all of them
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from tests.simulation.aftermath import OF_CALL, Others, Recovery
from tests.simulation.lessons import LESSONS, Lesson
from tests.simulation.outcome import Fault, Outcome
from tests.simulation.run import quiet
from tests.simulation.training import STEPS, Diary, Raised, Training
from tests.simulation.world import simulate


class Point(NamedTuple):
    """One run of the sweep.

    Attributes:
        lesson: its name.
        rank: where the operation fails.
        at: which operation, from 0.
    """

    lesson: str
    rank: int
    at: int

    @property
    def replay(self) -> str:
        return f'python -m tests.simulation.faults "{self.lesson}" --rank {self.rank} --at {self.at}'


# ---- one point, and what is wrong with it ----


class Played(NamedTuple):
    """A lesson's outcome, and each rank's diary: what it has written until it ended."""

    outcome: Outcome[Diary]
    diaries: list[Diary]


def play(lesson: Lesson, fault: Fault | None, batches: Sequence[Sequence[int]] | None = None) -> Played:
    """Simulate a lesson; ``batches``: by rank, those that it takes.

    The operations are counted where nothing is to fail.
    """
    diaries = [Diary() for _ in range(lesson.ranks)]

    def job(rank: int) -> Diary:
        training = Training(lesson, rank, diaries[rank], folder, None if batches is None else batches[rank])
        diary = training.train()
        del training
        gc.collect()  # what torch's own exceptions tie up, while this rank runs
        return diary

    with quiet(), tempfile.TemporaryDirectory() as folder:
        seed = 0 if fault is None else fault.at
        return Played(simulate(job, lesson.ranks, seed, lesson.carrier, fault, count=fault is None), diaries)


@cache
def without_fault(name: str, batches: tuple[tuple[int, ...], ...]) -> list[dict[str, Tensor]]:
    """By rank, what a training holds that takes these batches and in which nothing fails."""
    return [diary.holds for diary in play(LESSONS[name], None, batches).diaries]


def problem(point: Point) -> str:
    """Run one point; return what is wrong, or nothing."""
    outcome, diaries = play(LESSONS[point.lesson], Fault(point.rank, point.at))
    first = next(iter(diaries[point.rank].raised), None)
    if first is not None and OF_CALL[first.call].recovery is Recovery.RESTART:
        found = _stopped(outcome) or _against_end(point, outcome)
    else:
        found = (
            _stopped(outcome)
            or _told(outcome.errors)
            or ("" if first is None else _against_table(point, first, diaries))
            or _against_training(point, diaries)
            or (f"left behind: {outcome.left}" if outcome.left else "")
        )
    where = "no call raised" if first is None else f"{first.call} raised {first.text}"
    return f"{where}\n{found}" if found else ""


def _stopped(outcome: Outcome[Diary]) -> str:
    """Return why no rank can go on."""
    if outcome.deadlock is not None:
        stacks = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in sorted(outcome.deadlock.items()))
        return f"deadlock: no rank can go on:\n{stacks}"
    return "" if outcome.mismatch is None else f"mismatch: {outcome.mismatch}"


def _told(errors: Mapping[int, BaseException]) -> str:
    """Return the errors that have ended processes, as one line."""
    told = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items())
    return f"crash: {told}" if told else ""


def _against_end(point: Point, outcome: Outcome[Diary]) -> str:
    """Return which process hasn't ended by an error that names the rank, where one of them has let it be ended."""
    if point.rank in outcome.errors:
        for rank in range(LESSONS[point.lesson].ranks):
            error = outcome.errors.get(rank)
            if error is None or not re.search(rf"\brank {point.rank}\b|injected fault", str(error)):
                return f"not ended: rank {rank} has ended by {error}; {_told(outcome.errors)}"
        return ""
    return _told(outcome.errors)


def _against_table(point: Point, first: Raised, diaries: Sequence[Diary]) -> str:
    """Return where the ranks' exceptions aren't those of the table."""
    if first.changed:
        return "changed: parameters or states aren't what they were before the call"
    for rank, diary in enumerate(diaries):
        if rank == point.rank:
            continue
        same_call = any((each.call, each.number) == (first.call, first.number) for each in diary.raised)
        if OF_CALL[first.call].others is Others.RAISE and not same_call:
            return f"not raised: rank {rank} went on"
        if diary.raised and not re.search(rf"\brank {point.rank}\b", diary.raised[0].text):
            return f"unnamed: rank {rank} got {diary.raised[0].text}, which doesn't name rank {point.rank}"
    return ""


def _against_training(point: Point, diaries: Sequence[Diary]) -> str:
    """Return how the ranks' numbers differ from those of a training in which nothing fails."""
    taken = tuple(tuple(diary.taken) for diary in diaries)
    if len(set(map(len, taken))) > 1:
        return f"steps differ: the ranks have taken {taken}"
    for rank, (expected, diary) in enumerate(zip(without_fault(point.lesson, taken), diaries, strict=True)):
        if expected.keys() != diary.holds.keys():
            return f"rank {rank} holds {sorted(diary.holds)}, expected {sorted(expected)}"
        for name, value in expected.items():
            if not torch.allclose(diary.holds[name].float(), value.float(), rtol=1e-5, atol=1e-6):
                got = diary.holds[name]
                return f"wrong numbers: rank {rank}, {name}: expected {value.tolist()}, got {got.tolist()}"
    return ""


def points(names: Sequence[str] = tuple(LESSONS)) -> Iterator[Point]:
    """Yield every operation of every rank in each lesson; one more step follows it, in which the others are told."""
    for name in names:
        lesson = LESSONS[name]
        operations = play(lesson, None, [range(STEPS - 1)] * lesson.ranks).outcome.operations
        for rank, count in sorted(operations.items()):
            yield from (Point(name, rank, at) for at in range(count))


# ---- all of them ----


def sweep(chosen: Sequence[Point], processes: int, minutes: float = float("inf")) -> int:
    """Run these points in a fixed random order until time is over, and print what is wrong; return how many are."""
    until = time.monotonic() + 60 * minutes
    shuffled = Random(0).sample(chosen, len(chosen))
    done = failures = 0
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for point, found in tqdm(
            pool.imap_unordered(_checked, shuffled, chunksize=8), total=len(chosen), unit=" faults"
        ):
            done += 1
            if found:
                failures += 1
                tqdm.write(
                    f"{point.lesson}, rank {point.rank}, operation {point.at}: {found}\nreplay: {point.replay}\n"
                )
            if time.monotonic() > until:
                break
    print(f"{done:,} of {len(chosen):,} operations of small trainings failed, one at a time: {failures} problems")
    return failures


def _checked(point: Point) -> tuple[Point, str]:
    return point, problem(point)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one point, those of some lessons, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.faults", description=__doc__.split("\n")[0])
    parser.add_argument("lessons", nargs="*", default=list(LESSONS), help="names of lessons; none: all")
    parser.add_argument("--rank", type=int, help="the rank where an operation fails")
    parser.add_argument("--at", type=int, help="which one")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = [
        point
        for point in points(options.lessons)
        if options.rank in (None, point.rank) and options.at in (None, point.at)
    ]
    return 1 if sweep(chosen, options.processes) else 0


if __name__ == "__main__":
    sys.exit(main())
