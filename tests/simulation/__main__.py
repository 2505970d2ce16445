"""Simulate programs from seeds, on all cores, and print each failure shrunk: ``make simulate``.

Five minutes unless the options say otherwise:

    make simulate ARGS="--seed 7"          one seed: what it draws, and what comes of it
    make simulate ARGS="--seeds 100000"    so many
    make simulate ARGS="--carrier nccl"    over one kind of network alone
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from tests.simulation.coverage_of_story import table
from tests.simulation.draw import draw
from tests.simulation.faults import points, sweep
from tests.simulation.outcome import CARRIERS, Carrier
from tests.simulation.run import Verdict, run, told
from tests.simulation.shrink import shrink
from tests.support.warm_up import warm_up

MINUTES = 5.0
FAULTS_SHARE = 0.4  # of these, in which operations of small trainings fail
CHUNK = 10  # seeds that a process takes at a time
MOST_FAILURES = 20


@dataclass
class Tally:
    """What has been seen so far."""

    seeds: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    carriers: Counter[str] = field(default_factory=Counter)
    hand_overs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, seed: int, verdict: Verdict, options: str = "") -> None:
        self.seeds += 1
        self.kinds[verdict.program.kind] += 1
        self.carriers[verdict.program.carrier] += 1
        self.hand_overs += verdict.outcome.hand_overs
        self.refused += verdict.refused
        if verdict.injected:
            self.faults[verdict.injected] += 1
        if verdict.failure is not None:
            self.failures.append(told(seed, shrunk(verdict), options))

    def __iadd__(self, other: Tally) -> Tally:
        self.seeds += other.seeds
        self.kinds += other.kinds
        self.carriers += other.carriers
        self.hand_overs += other.hand_overs
        self.faults += other.faults
        self.refused += other.refused
        self.failures += other.failures
        return self

    def lines(self) -> Iterator[str]:
        yield f"{self.seeds:,} seeds, in which all ranks refused {self.refused:,} calls"
        yield f"by kind: {_counted(self.kinds)}"
        yield f"by network: {_counted(self.carriers)}"
        yield f"{self.hand_overs:,} hand-overs, at each of which a deadlock was looked for"
        yield f"faults injected: {_counted(self.faults) or 'none'}"
        yield f"{len(self.failures)} failures"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.most_common())


def shrunk(verdict: Verdict) -> Verdict:
    """A smaller program that fails in the same way."""
    failure = verdict.failure
    assert failure is not None

    def fails_so(program: object) -> bool:
        other = run(program).failure  # type: ignore[arg-type]
        return other is not None and other.kind == failure.kind

    return run(shrink(verdict.program, fails_so))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(1)
    if options.seed is not None:
        return _replay(options.seed, options.carrier)
    tally = _all(options)
    print("\n".join(tally.lines()))
    problems = 0 if options.seeds else sweep(list(points()), options.processes, FAULTS_SHARE * options.minutes)
    if options.coverage:
        print(table(range(options.first, options.first + options.coverage)))
    return 1 if tally.failures or problems else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, help="replay one seed")
    parser.add_argument("--seeds", type=int, help="as many seeds; without it as many as --minutes allow")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--carrier", choices=CARRIERS, help="one kind of network alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--coverage", type=int, default=200, help="seeds that coverage is measured of; 0: none")
    return parser.parse_args(arguments)


def _replay(seed: int, carrier: Carrier | None) -> int:
    """Print what a seed draws, and its failure shrunk."""
    print(draw(seed, carrier))
    verdict = run(draw(seed, carrier))
    print(f"trace {verdict.outcome.trace}, {verdict.outcome.hand_overs} hand-overs")
    if verdict.failure is None:
        print("right")
        return 0
    print(f"\n{verdict.failure}\n\nshrunk, {told(seed, shrunk(verdict), _drawn_with(carrier))}")
    return 1


def _drawn_with(carrier: Carrier | None) -> str:
    return f" --carrier {carrier}" if carrier else ""


def _all(options: argparse.Namespace) -> Tally:
    """Seeds side by side, until there were enough, or time is over, or too much has failed."""
    warm_up()
    gc.freeze()
    last = None if options.seeds is None else options.first + options.seeds
    until = time.monotonic() + 60 * (1 - FAULTS_SHARE) * options.minutes if last is None else float("inf")
    context = multiprocessing.get_context("fork")
    counter, results = context.Value("q", options.first), context.Queue()
    processes = [
        context.Process(target=_work, args=(number, counter, last, until, options.carrier, results))
        for number in range(options.processes)
    ]
    for process in processes:
        process.start()
    tally = _collect(results, len(processes), options.seeds)
    for process in processes:
        process.terminate()
        process.join()
    return tally


def _collect(results: Any, running: int, seeds: int | None) -> Tally:
    """Add up what processes send, and print failures as they come."""
    tally = Tally()
    with tqdm(total=seeds, unit=" seeds") as progress:
        while running and len(tally.failures) < MOST_FAILURES:
            done: Tally | None = results.get()
            running -= done is None
            if done is not None:
                tally += done
                progress.update(done.seeds)
                for text in done.failures:
                    tqdm.write(text, sys.stdout)
    return tally


def _work(number: int, counter: Any, last: int | None, until: float, carrier: Carrier | None, results: Any) -> None:
    """Take seeds, a chunk at a time; None stands for the end.

    A process keeps to one core: its threads run one at a time, and waking one on another core takes longer.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    while time.monotonic() < until:
        with counter.get_lock():
            start, counter.value = counter.value, counter.value + CHUNK
        seeds = range(start, start + CHUNK if last is None else min(start + CHUNK, last))
        if not seeds:
            break
        tally = Tally()
        for seed in seeds:
            tally.add(seed, run(draw(seed, carrier)), _drawn_with(carrier))
        results.put(tally)
        gc.collect()
    results.put(None)


if __name__ == "__main__":
    sys.exit(main())
