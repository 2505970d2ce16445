"""Whole training steps, side by side: ``python -m benchmarks.step --help``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ranks import run_ranks

from . import picture
from .gpt import SIZES
from .machine import header, load
from .peers import BASELINE, CONTESTANTS, Setting, left_out, taking_part
from .peers.peer import DTYPES
from .report import heading, summarise, table
from .rounds import Course, Record, fits, run_course, settle

_SCRATCH = Path(__file__).parent / "results" / "scratch-step.json"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write JSON and picture."""
    options = _parse(arguments)
    setting = Setting(options.size, options.dtype, options.micro_batches)
    names = options.alone.split() or [each.name for each in taking_part(setting, options.contestants)]
    course = _course(options, setting, names)
    run = {"ranks": options.world_size, **asdict(setting), "rounds": course.rounds, "steps a round": course.steps}
    facts = header()
    for line in left_out():
        print(line, file=sys.stderr)
    settle()
    seen = run_ranks(run_course, options.world_size, course, timeout=options.timeout)
    facts["load average after"] = load()
    results = summarise(seen, setting, BASELINE[options.dtype])
    print(f"{heading(facts, run)}\n\n{table(results)}")
    if options.alone:
        print(f"\npeak RSS: {_peaks(seen, names[0])}")
        results[names[0]]["peak rss"] = [record[names[0]].peak_rss for record in seen]
    _write(options.out, {"header": facts, "run": run, "baseline": BASELINE[options.dtype], "contestants": results})


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="25m", help="the model")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="bf16: with fp32 masters, for everybody")
    parser.add_argument("--micro-batches", type=int, default=1, help="backwards a step")
    parser.add_argument("--world-size", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a turn")
    parser.add_argument("--warm-up", type=int, default=4, help="steps after construction that aren't measured")
    parser.add_argument(
        "--contestants", nargs="+", metavar="NAME", help="beside the baseline: " + ", ".join(CONTESTANTS)
    )
    parser.add_argument("--alone", metavar="NAME", default="", choices=CONTESTANTS, help="no other; tells its peak RSS")
    parser.add_argument(
        "--patience", type=int, default=0, help="repeat a turn so often while others use more than 0.2 cores"
    )
    parser.add_argument(
        "--keep", choices=("auto", "yes", "no"), default="auto", help="all contestants in memory at once"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for all of it")
    parser.add_argument("--out", type=Path, default=_SCRATCH, help="JSON; the picture goes beside it")
    return parser.parse_args(arguments)


def _course(options: argparse.Namespace, setting: Setting, names: list[str]) -> Course:
    keep = options.keep == "yes" or (options.keep == "auto" and fits(setting, len(names), options.world_size))
    return Course(setting, names, options.rounds, options.steps, options.warm_up, keep, options.patience)


def _peaks(seen: list[dict[str, Record]], name: str) -> str:
    """Of each rank, and how much of it came after the start."""
    peaks = [record[name].peak_rss for record in seen]
    return ", ".join(f"{peak / 2**20:.0f} MiB ({(peak - base) / 2**20:.0f} since the start)" for peak, base in peaks)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    title = ", ".join(f"{name} {value}" for name, value in content["run"].items())
    try:
        picture.draw(content["contestants"], title, path.with_suffix(".png"))
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
