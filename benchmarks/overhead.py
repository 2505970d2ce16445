"""Host time per parameter and step that sharding adds: ``python -m benchmarks.overhead --help``.

A model of thousands of tiny parameters trains beside a plain one, in alternating rounds of one process: the plain one's
backward and ``zero_grad``, and the step of the same optimizer over tensors of a slice's size. What ours takes beyond
that is the overhead. The other ranks are not there, and collectives take no time. Packing and unpacking buffers is part
of the overhead, and told beside it: it moves bytes. "The rest" doesn't, but at many ranks tiny parameters lie far
apart, each in a storage with a slice for every rank, which caches feel. The last column is its ratio to the first
world size of several ranks.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping import bucket_store
from lowlevel_zero.communication import flat_buffers
from tests.support.ranks import run_ranks

from .fake import Calls, fake_world, watched
from .machine import header, load
from .output import RESULTS, publish, refuse_unkept
from .peers.peer import DTYPES
from .picture import Curve, draw_curves
from .report import Spread
from .rounds import settle
from .tables import TABLES

_PACKING = (bucket_store.pack, flat_buffers.unpack)


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        parameters: of the model.
        elements: of each parameter.
        dtype: of the model.
        stage: 1 or 2.
        implementation: of AdamW: fused or foreach.
        world_sizes: simulated ranks, one optimizer each.
        rounds: all world sizes and the plain ones in turn, so often.
        steps: measured steps of a turn.
    """

    parameters: int
    elements: int
    dtype: str
    stage: int
    implementation: str
    world_sizes: list[int]
    rounds: int
    steps: int


def main(arguments: list[str] | None = None) -> None:
    """Measure; print a table, or with ``--profile`` where the time goes; write JSON."""
    options = _parse(arguments)
    case = Case(**{name: getattr(options, name) for name in Case.__dataclass_fields__})
    refuse_unkept(options.out)
    facts = header()
    settle()
    if options.profile:
        (told,) = run_ranks(_profile, 1, case, options.profile, timeout=options.timeout, init=False)
        print(told)
        return
    (rows,) = run_ranks(_measure, 1, case, timeout=options.timeout, init=False)
    facts["load average after"] = load()
    run = {name: getattr(case, name) for name in ("parameters", "elements", "dtype", "stage", "implementation")}
    content = {"header": facts, "run": run, "rows": rows}
    publish(options.out, content, TABLES["overhead"](content).text(), _draw)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--parameters", type=int, default=2000, help="of the model")
    parser.add_argument("--elements", type=int, default=8, help="of each parameter")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the model")
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2)
    parser.add_argument("--implementation", choices=("fused", "foreach"), default="fused", help="of AdamW")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 8, 64, 512, 4096], help="simulated")
    parser.add_argument("--rounds", type=int, default=15, help="all in turn, so often")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a turn")
    parser.add_argument("--profile", type=int, metavar="LINES", default=0, help="cProfile's top lines of the last size")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for all of it")
    parser.add_argument("--out", type=Path, default=RESULTS / "scratch-overhead.json", help="JSON")
    return parser.parse_args(arguments)


class Tiny(nn.Module):
    """Parameters whose backward is next to nothing: one concatenation."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        each = torch.ones(case.elements, dtype=DTYPES[case.dtype])
        self.all = nn.ParameterList(nn.Parameter(each.clone()) for _ in range(case.parameters))

    def forward(self) -> Tensor:
        """A 0-d loss."""
        return torch.cat(list(self.all)).sum()


class Pair:
    """Our optimizer at one simulated world size, and the plain training that it is compared with."""

    def __init__(self, case: Case, world_size: int) -> None:
        self.world_size = world_size
        self._make_ours(case)
        self._plain = Tiny(case)
        size = -(-case.elements // world_size)
        slices = [nn.Parameter(torch.ones(size)) for _ in range(case.parameters)]
        for each in slices:
            each.grad = torch.ones_like(each)
        self._slices = _adamw(slices, case)

    def _make_ours(self, case: Case) -> None:
        group = dist.new_group(list(range(self.world_size)))
        self._model = Tiny(case)
        self.optimizer = LowLevelZeroOptimizer(
            _adamw(list(self._model.parameters()), case),
            partition_grad=case.stage == 2,
            dp_process_group=group,
            model=self._model,
        )

    def ours(self) -> None:
        """One step."""
        self.optimizer.backward(self._model())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain(self) -> None:
        """One step of the plain one, and of the optimizer over slices."""
        torch.autograd.backward(self._plain())
        self._slices.step()
        for p in self._plain.all:
            p.grad = None


def _adamw(parameters: list[nn.Parameter], case: Case) -> AdamW:
    fused = case.implementation == "fused"
    return AdamW(parameters, lr=1e-4, fused=fused, foreach=not fused)


def _measure(rank: int, world_size: int, case: Case) -> list[dict[str, Any]]:
    """A row a world size, in this process alone."""
    warnings.simplefilter("ignore")
    seen: dict[int, list[dict[str, float]]] = {size: [] for size in case.world_sizes}
    with fake_world(max(case.world_sizes)) as collectives, watched(*_PACKING) as packing:
        pairs = [Pair(case, size) for size in case.world_sizes]
        for number in range(case.rounds + 1):
            for each in pairs:
                turn = _turn(each, case, collectives, packing)
                if number > 0:  # the first one warms up
                    seen[each.world_size].append(turn)
    several = next((size for size in case.world_sizes if size > 1), case.world_sizes[0])
    return [_row(size, turns, seen[several]) for size, turns in seen.items()]


def _turn(pair: Pair, case: Case, collectives: Calls, packing: Calls) -> dict[str, float]:
    """Microseconds per parameter and step."""
    unit = 1e6 / case.parameters
    pair.plain()  # whatever another left in the caches
    plain = _timed(pair.plain, case.steps) * unit
    pair.ours()
    collectives.reset()
    packing.reset()
    ours = _timed(pair.ours, case.steps) * unit
    moving = packing.seconds / case.steps * unit
    return {
        "ours": ours,
        "plain": plain,
        "overhead": ours - plain,
        "packing": moving,
        "the rest": ours - plain - moving,
        "collectives": collectives.count / case.steps,
    }


def _timed(step: Callable[[], None], steps: int) -> float:
    start = process_time()
    for _ in range(steps):
        step()
    return (process_time() - start) / steps


def _row(world_size: int, turns: list[dict[str, float]], first: list[dict[str, float]]) -> dict[str, Any]:
    overheads = [turn["overhead"] for turn in turns]
    ratios = [mine["the rest"] / turn["the rest"] for mine, turn in zip(turns, first, strict=True)]
    return {
        "world size": world_size,
        **{name: median(turn[name] for turn in turns) for name in turns[0]},
        "spread": Spread.of(overheads)._asdict(),
        "to the first": Spread.of(ratios)._asdict(),
    }


def _draw(figure: Any, content: Mapping[str, Any]) -> None:
    """What a parameter adds, over the world size."""
    rows = content["rows"]
    sizes = [row["world size"] for row in rows]
    names = ("overhead", "packing", "the rest")
    curves = [Curve(f"ours: {name}", sizes, [row[name] for row in rows]) for name in names]
    draw_curves(figure, {"microseconds per parameter and step": curves}, "simulated ranks")
    figure.set_size_inches(6, 4.2)


def _profile(rank: int, world_size: int, case: Case, lines: int) -> str:
    """Where the last world size's steps spend their time, by the functions' own time."""
    warnings.simplefilter("ignore")
    with fake_world(max(case.world_sizes)):
        pair = Pair(case, case.world_sizes[-1])
        pair.ours()
        pair.ours()
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(case.steps):
            pair.ours()
        profile.disable()
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(lines)
    per = f"{case.steps} steps of {case.parameters} parameters at {pair.world_size} ranks, profiler included\n"
    return per + out.getvalue()


if __name__ == "__main__":
    main()
