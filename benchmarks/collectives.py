"""gloo's native collectives beside ours, by message and shared memory: ``python -m benchmarks.collectives --help``."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.ranks import run_ranks

from .machine import header, load
from .output import RESULTS, publish, refuse_unkept
from .peers.peer import DTYPES
from .picture import Curve, draw_curves
from .report import Spread
from .rounds import settle
from .tables import TABLES

_RENAMED = hasattr(dist, "reduce_scatter_single")
_reduce_scatter = getattr(dist, "reduce_scatter_single" if _RENAMED else "reduce_scatter_tensor")
_all_gather = getattr(dist, "all_gather_single" if _RENAMED else "all_gather_into_tensor")


class Case(NamedTuple):
    """One collective on one buffer."""

    collective: str
    elements: int
    dtype: str


WAYS = ("native", "messages", "shared")
COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")


def main(arguments: list[str] | None = None) -> None:
    """Measure every case at every world size; print a table and write JSON."""
    options = _parse(arguments)
    refuse_unkept(options.out)
    facts = header()
    settle()
    cases = [Case(*key) for key in product(COLLECTIVES, options.elements, options.dtypes)]
    rows: list[dict[str, Any]] = []
    for world_size in options.world_sizes:
        seen = run_ranks(_measure, world_size, cases, options.rounds, timeout=options.timeout)
        rows += [_row(world_size, case, [rank[at] for rank in seen]) for at, case in enumerate(cases)]
    facts["load average after"] = load()
    content = {"header": facts, "run": {"rounds": options.rounds}, "rows": rows}
    publish(options.out, content, TABLES["collectives"](content).text(), _draw)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 3, 4], help="ranks")
    sizes = [2**14, 2**17, 2**20, 2**22, 24 * 2**20]
    parser.add_argument("--elements", type=int, nargs="+", default=sizes, help="of a whole buffer, all rows")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the buffer")
    parser.add_argument("--rounds", type=int, default=11, help="all ways in turn, so often")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one world size")
    parser.add_argument("--out", type=Path, default=RESULTS / "scratch-collectives.json", help="JSON")
    return parser.parse_args(arguments)


def _measure(rank: int, world_size: int, cases: list[Case], rounds: int) -> list[list[list[float]]]:
    """Seconds by round, of each way, of each case on this rank."""
    warnings.simplefilter("ignore")
    messages, shared = ShardGroup(), ShardGroup()
    shared.connect()
    return [_measure_one(messages, shared, case, rounds) for case in cases]


def _measure_one(messages: ShardGroup, shared: ShardGroup, case: Case, rounds: int) -> list[list[float]]:
    buffer = torch.ones(messages.size, -(-case.elements // messages.size), dtype=DTYPES[case.dtype])
    ways = (_native(messages, case, buffer), _ours(messages, case, buffer), _shared(shared, case, buffer))
    repeats = min(50, max(1, 2**18 // case.elements))
    seconds: list[list[float]] = [[] for _ in WAYS]
    for number in range(rounds + 1):
        for way, kept in zip(ways, seconds, strict=True):
            buffer.fill_(1)
            took = _timed(way, repeats)
            if number > 0:  # the first one warms up
                kept.append(took)
    return seconds


def _native(group: ShardGroup, case: Case, buffer: Tensor) -> Callable[[], object]:
    """gloo's own collective, straight from ``torch.distributed``."""
    if case.collective == "reduce_scatter":
        return lambda: _reduce_scatter(torch.empty_like(buffer[0]), buffer.view(-1))
    if case.collective == "all_gather":
        return lambda: _all_gather(buffer.view(-1), buffer[group.rank])
    return lambda: dist.all_reduce(buffer)


def _ours(group: ShardGroup, case: Case, buffer: Tensor) -> Callable[[], object]:
    start = getattr(group, case.collective)
    return lambda: start(buffer).wait()


def _shared(group: ShardGroup, case: Case, buffer: Tensor) -> Callable[[], object]:
    """As a step does it: buffers for reductions are packed into shared memory right away, and packing isn't timed."""
    if case.collective == "all_gather":
        return lambda: group.gather([buffer[group.rank]], [buffer]).wait()
    start = getattr(group, case.collective)
    return lambda: start(group.new_buffer(buffer.shape[1], buffer.dtype, buffer.device)).wait()


def _timed(way: Callable[[], object], repeats: int) -> float:
    """Seconds of one call, among all ranks in step."""
    dist.barrier()
    start = perf_counter()
    for _ in range(repeats):
        way()
    return (perf_counter() - start) / repeats


def _row(world_size: int, case: Case, seen: list[list[list[float]]]) -> dict[str, Any]:
    """The mean over ranks in each round, then the spread over rounds; ratios are to the native way."""
    rounds = [[fmean(one) for one in zip(*(rank[way] for rank in seen), strict=True)] for way in range(len(WAYS))]
    ratios = {
        way: Spread.of([mine / native for mine, native in zip(times, rounds[0], strict=True)])._asdict()
        for way, times in zip(WAYS[1:], rounds[1:], strict=True)
    }
    seconds = {way: median(times) for way, times in zip(WAYS, rounds, strict=True)}
    return {"ranks": world_size, **case._asdict(), "seconds": seconds, "ratios": ratios}


def _draw(figure: Any, content: Mapping[str, Any]) -> None:
    """The ratios, a panel a collective."""
    panels = {name: _curves([row for row in content["rows"] if row["collective"] == name]) for name in COLLECTIVES}
    draw_curves(figure, panels, "elements")
    for axes in figure.axes:
        axes.set_title(f"{axes.get_title()}: ours / native", fontsize=9)
        axes.axhline(1, color="black", linewidth=0.8)


def _curves(rows: list[dict[str, Any]]) -> list[Curve]:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for way, spread in row["ratios"].items():
            name = f"{way}, {row['ranks']} ranks, {row['dtype']}"
            points.setdefault(name, []).append((row["elements"], spread["median"]))
    return [Curve(name, *zip(*some, strict=True)) for name, some in points.items()]


if __name__ == "__main__":
    main()
