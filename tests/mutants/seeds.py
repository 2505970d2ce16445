"""Make mistakes in a copy of the package, one after the other, and see which seed of simulated ranks shows each.

make mutants ARGS="--simulated"                   each seed of the table must fail, and without the mistake pass
make mutants ARGS="--simulated --search 2000"     look for the first such seed instead
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.simulated import Mistake

# Prints the first of some seeds that fails, or nothing.
_FIRST = """
import sys, torch
from tests.simulation.draw import draw
from tests.simulation.run import run
torch.set_num_threads(1)
for seed in map(int, sys.argv[1].split(",")):
    if run(draw(seed)).failure is not None:
        print(seed)
        break
"""


def lost(mistakes: Iterable[Mistake], package: Path) -> list[str]:
    """Return the changes whose text isn't there once."""
    return [
        f"{change.file}: found {found} times: {change.old!r}"
        for mistake in mistakes
        for change in mistake.changes
        if (found := (package / change.file).read_text().count(change.old)) != 1
    ]


@contextmanager
def made(mistake: Mistake, package: Path) -> Iterator[None]:
    """Make a mistake in a copy of the package."""
    right = {change.file: (package / change.file).read_text() for change in mistake.changes}
    try:
        for change in mistake.changes:
            place = package / change.file
            place.write_text(place.read_text().replace(change.old, change.new))
        yield
    finally:
        for file, text in right.items():
            (package / file).write_text(text)


def table(mistakes: Sequence[Mistake], copy: Path, search: int) -> int:
    """Print a row for each mistake, with the seed that shows it; return how many no seed has shown."""
    unseen = 0
    print("| mistake | seed | seconds |\n|---|---|---|")
    for mistake in mistakes:
        began = time.monotonic()
        seeds = range(search) if search else [] if mistake.seed is None else [mistake.seed]
        seed = _first_shown(mistake, copy, seeds)
        unseen += seed is None
        print(f"| {mistake.breaks} | {'NONE' if seed is None else seed} | {time.monotonic() - began:.0f} |", flush=True)
    return unseen


def _first_shown(mistake: Mistake, copy: Path, seeds: Sequence[int]) -> int | None:
    """Return the first seed that fails by the mistake, and not without it."""
    left = list(seeds)
    while left:
        with made(mistake, copy / "lowlevel_zero"):
            seed = first_failing(copy, left)
        if seed is None or first_failing(copy, [seed]) is None:
            return seed
        left = left[left.index(seed) + 1 :]
    return None


def first_failing(copy: Path, seeds: Sequence[int], timeout: float | None = None) -> int | None:
    """Return the first seed that fails in a copy of the package, if one does; ``timeout``: seconds for all of them."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _FIRST, ",".join(map(str, seeds))]
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=True, timeout=timeout
    )
    return int(done.stdout) if done.stdout else None
