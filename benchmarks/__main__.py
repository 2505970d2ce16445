"""Run the benchmarks one after another, and judge them: ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch

from . import bars
from .output import RESULTS
from .peers import left_out
from .plan import PARTS, WHOLE, Part


def main(arguments: list[str] | None = None) -> None:
    """Each part in a process of its own; a part that fails doesn't keep the others from running."""
    options = _parse(arguments)
    chosen = [part for part in PARTS if _wanted(part, options)]
    if options.list:
        print("\n".join(f"{part.name:28} python -m {' '.join(part.command(options.quick))}" for part in chosen))
        return
    for line in left_out():
        print(line)
    folder = options.out or (RESULTS / "scratch-quick" if options.quick else RESULTS)
    failed = [part.name for part in chosen if not _run(part, options.quick, folder)]
    print("\n" + ("A quick look: these figures mean nothing.\n" if options.quick else "") + bars.report(folder))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="All benchmarks, laid out for 25 minutes on two quiet cores. Results: results/",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that all runs; figures mean nothing")
    parser.add_argument("--list", action="store_true", help="say what would run")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts, or how their names begin")
    for name, field in (("sizes", "size"), ("dtypes", "dtype"), ("micro-batches", "micro_batches"), ("ranks", "ranks")):
        values = sorted({getattr(whole, field) for whole in WHOLE})
        kind = type(values[0])
        parser.add_argument(f"--{name}", nargs="+", type=kind, default=values, choices=values, help="of whole steps")
    parser.add_argument("--out", type=Path, help="folder for JSON and pictures")
    return parser.parse_args(arguments)


def _wanted(part: Part, options: argparse.Namespace) -> bool:
    if options.only and not any(part.name.startswith(start) for start in options.only):
        return False
    for whole in WHOLE:
        if whole.part() == part:
            return (
                whole.size in options.sizes
                and whole.dtype in options.dtypes
                and whole.micro_batches in options.micro_batches
                and whole.ranks in options.ranks
            )
    if part.module == "hosts" and not options.only:  # for make hosts
        return False
    return part.module != "cuda" or options.quick or bool(options.only) or _has_gpu()


def _has_gpu() -> bool:
    there = torch.cuda.is_available()
    if not there:
        print("no GPU that torch can use: cuda is left out")
    return there


def _run(part: Part, quick: bool, folder: Path) -> bool:
    print(f"\n---- {part.name} ----", flush=True)
    command: Sequence[str] = [sys.executable, "-m", *part.command(quick), f"--out={folder / part.name}.json"]
    start = perf_counter()
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=False)
    print(f"{perf_counter() - start:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()
