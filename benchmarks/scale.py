"""From 8 ranks to thousands, on one machine: ``python -m benchmarks.scale --help``.

This process is rank 0 of a fake process group, whose collectives do nothing at once. So what is left is the host's own
time, which should not grow with the ranks, the bytes that a rank holds, and how many collectives it asks for. Values
are nobody's.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from tests.support.ranks import run_ranks

from .fake import Calls, fake_world, make_finite
from .gpt import SIZES, make_batches
from .machine import header, load
from .output import RESULTS, publish, refuse_unkept
from .peers import CONTESTANTS, Peer, Setting
from .peers.peer import DTYPES
from .picture import Curve, draw_curves
from .rounds import settle
from .tables import TABLES

NAMES = ("ours-1", "ours-2", "fsdp2")


def main(arguments: list[str] | None = None) -> None:
    """Measure every world size in a process of its own; print the table, write JSON and picture."""
    options = _parse(arguments)
    setting = Setting(options.size, options.dtype, 1)
    refuse_unkept(options.out)
    facts = header()
    settle()
    rows: list[dict[str, Any]] = []
    for world_size in options.world_sizes:
        print(f"\r{world_size} ranks ", end="", file=sys.stderr, flush=True)
        work = partial(
            _measure, setting=setting, simulated=world_size, names=options.contestants, rounds=options.rounds
        )
        (seen,) = run_ranks(work, 1, timeout=options.timeout, init=False)
        rows += seen
    print(file=sys.stderr)
    facts["load average after"] = load()
    run = {"size": options.size, "dtype": options.dtype, "rounds": options.rounds}
    content = {"header": facts, "run": run, "rows": rows}
    publish(options.out, content, TABLES["scale"](content).text(), _draw)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="25m", help="the model")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the model; bf16: with fp32 masters")
    sizes = [8, 32, 128, 512, 1024, 2048, 4096]
    parser.add_argument("--world-sizes", type=int, nargs="+", default=sizes, help="simulated ranks")
    parser.add_argument("--contestants", nargs="+", default=list(NAMES), choices=NAMES, help="who takes part")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each, in turn")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one world size")
    parser.add_argument("--out", type=Path, default=RESULTS / "scratch-scale.json", help="JSON, beside a picture")
    return parser.parse_args(arguments)


def _measure(
    rank: int, world_size: int, setting: Setting, simulated: int, names: list[str], rounds: int
) -> list[dict[str, Any]]:
    """A row a contestant, in a process of its own."""
    warnings.simplefilter("ignore")
    batches = make_batches(SIZES[setting.size], 1, rank)
    with fake_world(simulated) as calls:
        peers = {name: CONTESTANTS[name].make(setting) for name in names}
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for number in range(2 + rounds):
            for name, peer in peers.items():
                turn = _turn(peer, batches, calls)
                if number >= 2:  # states and buckets are made in the first ones
                    turns[name].append(turn)
        return [_row(name, simulated, turns[name], setting) for name in names]


def _turn(peer: Peer, batches: list[Any], calls: Calls) -> dict[str, float]:
    """One step: milliseconds of this process's cores, bytes held, collectives."""
    make_finite(peer.model)
    calls.reset()
    marks = [process_time()]
    peer.forward_backward(batches)
    marks.append(process_time())
    after_backward = sum(peer.held().values())
    marks.append(process_time())
    peer.step()
    marks.append(process_time())
    return {
        "forward and backward ms": 1e3 * (marks[1] - marks[0]),
        "step ms": 1e3 * (marks[3] - marks[2]),
        "bytes after backward": after_backward,
        "bytes after step": sum(peer.held().values()),
        "collectives": calls.count,
    }


def _row(name: str, world_size: int, turns: list[dict[str, float]], setting: Setting) -> dict[str, Any]:
    elements = sum(p.numel() for p in setting.fp32_model().parameters())
    measured = {key: median(turn[key] for turn in turns) for key in turns[0]}
    return {"name": name, "title": CONTESTANTS[name].title, "world size": world_size, "elements": elements, **measured}


_COLUMNS = ("forward and backward ms", "step ms", "bytes after backward", "bytes after step", "collectives")


def _draw(figure: Any, content: Mapping[str, Any]) -> None:
    """A panel a column, over the world size."""
    draw_curves(figure, {column: _curves(content["rows"], column) for column in _COLUMNS}, "simulated ranks")


def _curves(rows: list[dict[str, Any]], column: str) -> list[Curve]:
    points: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        points.setdefault(row["title"], []).append(row)
    return [
        Curve(title, [row["world size"] for row in some], [row[column] for row in some])
        for title, some in points.items()
    ]


if __name__ == "__main__":
    main()
