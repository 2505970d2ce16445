"""How much memory a rank takes at most, each contestant alone: ``python -m benchmarks.peak --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.ranks import run_ranks

from .gpt import SIZES
from .machine import header
from .output import RESULTS, publish, refuse_unkept
from .peers import CONTESTANTS, Setting, left_out, taking_part
from .peers.peer import DTYPES
from .picture import draw_bars
from .rounds import Course, run_course, settle
from .tables import TABLES


def main(arguments: list[str] | None = None) -> None:
    """Measure; print the table, write JSON and picture."""
    options = _parse(arguments)
    setting = Setting(options.size, options.dtype, options.micro_batches)
    names = [each.name for each in taking_part(setting, options.contestants)]
    refuse_unkept(options.out)
    facts = header()
    for line in left_out():
        print(line, file=sys.stderr)
    settle()
    rows = {name: _measure(name, setting, options) for name in names}
    run = {"ranks": options.world_size, **asdict(setting)}
    content = {"header": facts, "run": run, "contestants": rows}
    publish(options.out, content, TABLES["peak"](content).text(), _draw)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peak", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="25m", help="the model")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="bf16: with fp32 masters, for everybody")
    parser.add_argument("--micro-batches", type=int, default=1, help="backwards a step")
    parser.add_argument("--world-size", type=int, default=2, help="ranks")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="beside the baseline; all who suit")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one contestant")
    parser.add_argument("--out", type=Path, default=RESULTS / "scratch-peak.json", help="JSON, beside a picture")
    return parser.parse_args(arguments)


def _measure(name: str, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """A few steps; of the rank that takes most."""
    course = Course(setting, [name], rounds=1, steps=2, warm_up=3, keep=False)
    seen = run_ranks(run_course, options.world_size, course, timeout=options.timeout)
    peak, base = max((rank[name].peak_rss for rank in seen), key=lambda pair: pair[0])
    held = max(sum(rank[name].after_backward.values()) for rank in seen)
    return {"title": CONTESTANTS[name].title, "peak rss": peak, "before": base, "held after backward": held}


def _draw(figure: Any, content: Mapping[str, Any]) -> None:
    bars = {row["title"]: row["peak rss"] / 2**20 for row in content["contestants"].values()}
    draw_bars(figure, bars, "peak RSS of a rank, MiB")


if __name__ == "__main__":
    main()
