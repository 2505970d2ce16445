"""How much memory a rank takes at most in a step, each contestant alone: ``python -m benchmarks.peak --help``.

Beside it stands the least that a rank can take: its parameters, gradients, masters and states, and what forward and
backward need beside them, which is measured where nothing is sharded nor sent ("floor").
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from lowlevel_zero.layout import layout_of
from tests.support.ranks import run_ranks

from .counters import forget_peak, resident
from .gpt import SIZES, make_batches
from .machine import header
from .output import RESULTS, publish, refuse_unkept
from .peers import CONTESTANTS, Setting, left_out, taking_part
from .peers.ours import Ours
from .peers.peer import DTYPES
from .picture import draw_bars
from .rounds import settle
from .tables import TABLES

FLOOR = "floor"
WARM_UP, STEPS = 3, 2


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
    elements = sum(p.numel() for p in setting.fp32_model().parameters())
    run = {"ranks": options.world_size, **asdict(setting), "elements": elements}
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


class Peaks(NamedTuple):
    """Bytes that one rank has taken beside what it had before it made the contestant.

    Attributes:
        start: at most until the steps are all alike, construction included.
        forward: at most in a forward pass, beyond what is held between steps; of the floor alone.
        step: at most in later steps, without the memory of other ranks that this one looks at.
        after_backward, after_step: held, by the contestant's account.
        buffer: of its largest bucket; 0: it doesn't tell.
    """

    start: float
    forward: float
    step: float
    after_backward: int
    after_step: int
    buffer: int


def _peaks(rank: int, world_size: int, name: str, setting: Setting) -> Peaks:
    """Train a few steps on this rank."""
    CONTESTANTS[name].prepare()
    batches = make_batches(SIZES[setting.size], setting.micro_batches, rank)
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    peer = CONTESTANTS[name].make(setting)
    for _ in range(WARM_UP):
        peer.forward_backward(batches)
        after_backward = sum(peer.held().values())
        peer.step()
    after_step = sum(peer.held().values())
    start = resident("VmHWM") - before
    forward = 0.0
    if name == FLOOR:
        forget_peak()
        peer.model(batches[0])
        forward = resident("VmHWM") - before - after_step
    forget_peak()
    for _ in range(STEPS):
        peer.forward_backward(batches)
        peer.step()
    step, buffer = resident("VmHWM") - before, 0
    if isinstance(peer, Ours):
        step -= max(0, resident("RssShmem") - peer.held()["bucket_buffers"])
        buffer = max(each.buffer_bytes for each in layout_of(peer.optimizer).buckets)
    return Peaks(start, forward, step, after_backward, after_step, buffer)


def _measure(name: str, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the rank that takes most."""
    seen = run_ranks(_peaks, options.world_size, name, setting, timeout=options.timeout)
    return {"title": CONTESTANTS[name].title, **max(seen, key=lambda peaks: peaks.step)._asdict()}


def _draw(figure: Any, content: Mapping[str, Any]) -> None:
    bars = {row["title"]: row["step"] / 2**20 for row in content["contestants"].values()}
    draw_bars(figure, bars, "peak of a step, MiB")


if __name__ == "__main__":
    main()
