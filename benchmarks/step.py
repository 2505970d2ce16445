"""Whole training steps, side by side: ``python -m benchmarks.step --help``."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import run_ranks

from .gpt import SIZES
from .machine import header, load
from .output import RESULTS, publish, refuse_unkept
from .peers import BASELINE, CONTESTANTS, Setting, left_out, taking_part, unpack
from .peers.peer import DTYPES
from .picture import draw_steps
from .report import strangers, summarise, table
from .rounds import Course, fits, run_course, settle

# How far apart losses of the same training may be, relatively: the fp32 ones by the order of sums, the bf16 ones by
# where a library rounds. On CUDA the order of sums within a kernel is anybody's.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}
ON_CUDA = {"fp32": 1e-4, "bf16": 1e-2}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write JSON and picture."""
    options = _parse(arguments)
    setting = Setting(options.size, options.dtype, options.micro_batches, options.device)
    backend, tolerance = _on(options.device, options.world_size)
    if options.older:
        unpack(options.older)
    names = options.alone.split() or [each.name for each in taking_part(setting, options.contestants)]
    course = _course(options, setting, names)
    refuse_unkept(options.out)
    run = {"ranks": options.world_size, **asdict(setting), "rounds": course.rounds, "steps a round": course.steps}
    facts = header()
    for line in left_out():
        print(line, file=sys.stderr)
    settle()
    seen = run_ranks(run_course, options.world_size, course, timeout=options.timeout, backend=backend)
    facts["load average after"] = load()
    usual = BASELINE[options.dtype]
    baseline = options.baseline or usual
    results = summarise(seen, setting, baseline)
    odd = strangers(results, usual, tolerance[options.dtype])
    content = {"header": facts, "run": run, "baseline": baseline, "odd": odd, "contestants": results}
    publish(options.out, content, table(results) + _peaks(results), draw_steps)
    if odd:
        raise SystemExit("\n".join(odd))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="25m", help="the model")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="bf16: with fp32 masters, for everybody")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU a rank, over NCCL")
    parser.add_argument("--micro-batches", type=int, default=1, help="backwards a step")
    parser.add_argument("--world-size", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a turn")
    parser.add_argument("--warm-up", type=int, default=4, help="steps after construction that aren't measured")
    parser.add_argument(
        "--contestants", nargs="+", metavar="NAME", help="beside the baseline: " + ", ".join(CONTESTANTS)
    )
    parser.add_argument("--baseline", metavar="NAME", default="", choices=CONTESTANTS, help="to whom ratios are taken")
    parser.add_argument("--alone", metavar="NAME", default="", choices=CONTESTANTS, help="no other; tells its peak RSS")
    parser.add_argument(
        "--patience", type=int, default=3, help="repeat a turn so often while others take more than 2%% of the machine"
    )
    parser.add_argument("--older", metavar="COMMIT", default="", help="whose tree the contestants named older-* are")
    parser.add_argument(
        "--keep", choices=("auto", "yes", "no"), default="auto", help="all contestants in memory at once"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for all of it")
    parser.add_argument("--out", type=Path, default=RESULTS / "scratch-step.json", help="JSON, beside a picture")
    return parser.parse_args(arguments)


def _on(device: str, ranks: int) -> tuple[str, dict[str, float]]:
    """The backend on which ranks of ``device`` meet, and how far apart losses may be there."""
    if device == "cpu":
        return "gloo", TOLERANCE
    # Without starting CUDA in this process: ranks are forked.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < ranks:
        raise SystemExit(f"--device cuda: expected a GPU for each of {ranks} ranks, found {there}: choose --world-size")
    os.environ["DS_ACCELERATOR"] = "cuda"
    return "cpu:gloo,cuda:nccl", ON_CUDA


def _course(options: argparse.Namespace, setting: Setting, names: list[str]) -> Course:
    fit = setting.device == "cpu" and fits(setting, len(names), options.world_size)
    keep = options.keep == "yes" or (options.keep == "auto" and fit)
    return Course(setting, names, options.rounds, options.steps, options.warm_up, keep, options.patience)


def _peaks(results: dict[str, Any]) -> str:
    """Where there is one contestant alone: of each rank, and how much of it came after the start."""
    (row, *_) = results.values()
    pairs = [(peak / 2**20, (peak - base) / 2**20) for peak, base in row["peak rss"] or ()]
    told = ", ".join(f"{peak:.0f} MiB ({since:.0f} since the start)" for peak, since in pairs)
    return f"\n\npeak RSS: {told}" if told else ""


if __name__ == "__main__":
    main()
