"""Which lines and branches of the story a sample of seeds runs through: measured apart, since measuring is slow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
STORY = ("lowlevel_zero/*.py", "lowlevel_zero/bookkeeping/*.py")


class Measured(NamedTuple):
    """One file: how many of its statements and branches were run, of how many."""

    file: str
    lines: int
    all_lines: int
    branches: int
    all_branches: int

    @classmethod
    def total(cls, files: Sequence[Measured]) -> Measured:
        sums = [sum(each[at] for each in files) for at in range(1, 5)]  # type: ignore[misc]
        return cls("all", *sums)

    def __str__(self) -> str:
        lines, branches = (f"{100 * part / max(1, whole):3.0f}%" for part, whole in (self[1:3], self[3:5]))
        return f"{self.file:40} {lines} of {self.all_lines:5} lines  {branches} of {self.all_branches:4} branches"


def table(seeds: range) -> str:
    """What the seeds cover, file by file, as measured in a process of its own."""
    command = [sys.executable, "-m", "tests.simulation.coverage_of_story", str(seeds.start), str(seeds.stop)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout or f"coverage of the story: not measured, since {done.stderr.strip().splitlines()[-1]}"


def _measure(seeds: range) -> Iterator[Measured]:
    import coverage

    measuring = coverage.Coverage(data_file=None, branch=True, include=list(STORY), concurrency="thread")
    measuring.start()
    from tests.simulation.draw import draw
    from tests.simulation.run import run  # what it imports is measured too

    for seed in seeds:
        run(draw(seed))
    measuring.stop()
    for file in sorted(measuring.get_data().measured_files()):
        numbers = measuring._analyze(file).numbers
        yield Measured(
            str(Path(file).relative_to(ROOT)),
            numbers.n_statements - numbers.n_missing,
            numbers.n_statements,
            numbers.n_branches - numbers.n_missing_branches,
            numbers.n_branches,
        )


def main() -> None:
    """Print the table of the seeds that the arguments name."""
    start, stop = map(int, sys.argv[1:])
    files = list(_measure(range(start, stop)))
    print(f"coverage of the story by {stop - start} seeds:")
    print("\n".join(map(str, [*files, Measured.total(files)])))


if __name__ == "__main__":
    main()
