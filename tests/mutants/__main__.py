"""Make one mistake after another in a copy of the package, and see which test notices: ``make mutants``.

Each mistake of the table is made alone. The tests that should see it run first, and if none does the others, until
one fails. A mistake that no test sees is a missing test; one whose text isn't found any more is an error of the table.

``--simulated`` and ``--drawn`` show mistakes to seeds of simulated ranks instead: a table's, and random ones.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.mutants import drawn, seeds
from tests.mutants.simulated import MISTAKES
from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
TREES = ("lowlevel_zero", "tests", "examples", "benchmarks", "docs")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
SIDE_BY_SIDE = ("-n", "auto", "--maxprocesses", "8", "--dist", "worksteal")
SEARCHED = 1000  # seeds for each mistake that is drawn
FAILED = re.compile(r"^(?:SUB)?(?:FAILED|ERROR).*?(tests/.+?)(?: - .*)?$", flags=re.MULTILINE)


class Caught(NamedTuple):
    """Which test saw a mistake, and after how many seconds; None: none did."""

    test: str | None
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.simulated:
        return _simulated(options)
    if options.drawn:
        return _drawn(options)
    chosen = [mutant for mutant in MUTANTS if options.only in f"{mutant.breaks} {mutant.file}"]
    lost = [f"{mutant.file}: found {found} times: {mutant.old!r}" for mutant in chosen if (found := count(mutant)) != 1]
    if lost:
        print("\n".join(["expected each text once:", *lost]), file=sys.stderr)
        return 2
    survivors = 0
    print("| mistake | caught by | seconds |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = _copied(Path(folder))
        for mutant in chosen:
            with _made(mutant, copy):
                caught = _caught(mutant, copy, options.likely)
            survivors += caught.test is None
            print(f"| {mutant.breaks} | {caught.test or 'NOBODY'} | {caught.seconds:.0f} |", flush=True)
    print(f"\n{len(chosen) - survivors} of {len(chosen)} were seen")
    return 1 if survivors else 0


def _simulated(options: argparse.Namespace) -> int:
    """Make the mistakes that simulated ranks must show."""
    chosen = [mistake for mistake in MISTAKES if options.only in mistake.breaks]
    if found := seeds.lost(chosen, ROOT / "lowlevel_zero"):
        print("\n".join(["expected each text once:", *found]), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        unseen = seeds.table(chosen, _copied(Path(folder)), options.search)
    print(f"\n{len(chosen) - unseen} of {len(chosen)} were shown")
    return 1 if unseen else 0


def _drawn(options: argparse.Namespace) -> int:
    """Make mistakes that nobody has written down, and tell which of them seeds of simulated ranks show."""
    search = options.search or SEARCHED
    mistakes = drawn.draw(ROOT / "lowlevel_zero", options.drawn, options.seed)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        survivors = drawn.table(mistakes, _copied(Path(folder)), search)
    print(f"\n{len(mistakes) - survivors} of {len(mistakes)} were shown within {search} seeds")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mistakes in whose line or file this text is")
    parser.add_argument("--likely", action="store_true", help="run the tests alone that should see it, not all")
    parser.add_argument("--simulated", action="store_true", help="mistakes that seeds of simulated ranks must show")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="N random changes, for these seeds to show")
    parser.add_argument("--seed", type=int, default=0, help="draws others of them")
    parser.add_argument("--search", type=int, default=0, help="of both: look for the first of so many seeds")
    return parser.parse_args(arguments)


def count(mutant: Mutant) -> int:
    return (ROOT / "lowlevel_zero" / mutant.file).read_text().count(mutant.old)


def _copied(folder: Path) -> Path:
    for name in TREES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    return folder


@contextmanager
def _made(mutant: Mutant, copy: Path) -> Iterator[None]:
    place = copy / "lowlevel_zero" / mutant.file
    right = place.read_text()
    place.write_text(right.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        place.write_text(right)


def _caught(mutant: Mutant, copy: Path, likely_alone: bool) -> Caught:
    began = time.monotonic()
    test = _first_failure(copy, mutant.likely.split())
    if test is None and not likely_alone:
        test = _first_failure(copy, [*SIDE_BY_SIDE, "tests"])
    return Caught(test, time.monotonic() - began)


def _first_failure(copy: Path, arguments: Sequence[str]) -> str | None:
    """The first test that fails, of those of the copy; a run that breaks off in another way counts too."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    failed = FAILED.search(done.stdout)
    return failed[1] if failed else f"pytest itself, by exit code {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
