"""How long optimizers take to construct: ``python -m benchmarks.construction --help``.

Models of many small parameters, and one of a billion elements, are wrapped in turn by this package, DDP, FSDP2 and
DeepSpeed, each round anew, on real ranks that share this machine. Then one process constructs ours as rank 0 of many
ranks that aren't there, whose collectives do nothing.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_ranks

from .counters import measured
from .fake import fake_world
from .machine import header, load
from .output import RESULTS, publish, refuse_unkept
from .peers import Setting
from .picture import draw_bars
from .rounds import settle
from .tables import TABLES

BLOCK = 100  # parameters that FSDP2 shards together, as those of a few layers


class Model(NamedTuple):
    """A model of ``parameters`` parameters of ``elements`` elements each."""

    parameters: int
    elements: int

    @property
    def suits_peers(self) -> bool:
        """Whether peers take part."""
        return self.parameters <= OF_PEERS and self.parameters * self.elements <= ELEMENTS_OF_PEERS

    def make(self) -> nn.Sequential:
        """Return it, in blocks."""
        counts = [min(BLOCK, self.parameters - at) for at in range(0, self.parameters, BLOCK)]
        return nn.Sequential(*(_Block(count, self.elements) for count in counts))


class _Block(nn.Module):
    def __init__(self, parameters: int, elements: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(elements) for _ in range(parameters))

    def forward(self) -> None:
        """FSDP2 asks for one."""


MODELS = (
    *(Model(1_000, 4_096), Model(10_000, 1_024), Model(100_000, 64)),
    *(Model(250, 1_000_000), Model(250, 4_000_000)),
)
# DDP takes a minute for 100,000 parameters, and DeepSpeed several times the memory of a model.
OF_PEERS = 10_000
ELEMENTS_OF_PEERS = 500_000_000


def main(arguments: list[str] | None = None) -> None:
    """Measure; print the table, write JSON and picture."""
    options = _parse(arguments)
    models = [Model(*map(int, text.split("x"))) for text in options.models]
    refuse_unkept(options.out)
    facts = header()
    settle()
    rows: list[dict[str, Any]] = []
    for model in models:
        for world_size in (options.ranks, *options.simulated):
            print(f"\r{model.parameters:,} parameters, {world_size} ranks ", end="", file=sys.stderr, flush=True)
            rows += _measured(model, world_size, options)
    print(file=sys.stderr)
    facts["load average after"] = load()
    content = {"header": facts, "run": {"ranks": options.ranks, "rounds": options.rounds}, "rows": rows}
    publish(options.out, content, TABLES["construction"](content).text(), _draw)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.construction", description=__doc__)
    models = [f"{model.parameters}x{model.elements}" for model in MODELS]
    parser.add_argument("--models", nargs="+", default=models, help="parameters x elements of each")
    parser.add_argument("--ranks", type=int, default=2, help="real ranks")
    parser.add_argument("--simulated", type=int, nargs="*", default=[64, 4096], help="ranks that aren't there")
    parser.add_argument("--rounds", type=int, default=2, help="constructions of each, in turn")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one model on so many ranks")
    parser.add_argument("--out", type=Path, default=RESULTS / "scratch-construction.json", help="JSON and picture")
    return parser.parse_args(arguments)


def _measured(model: Model, world_size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row a contestant, of the rank that took longest; ranks above the real ones are simulated."""
    if world_size == options.ranks:
        names = list(CONTESTANTS) if model.suits_peers else ["ours"]
        work = partial(_take_turns, model=model, names=names, rounds=options.rounds)
        seen = run_ranks(work, world_size, timeout=options.timeout)
    else:
        work = partial(_simulate, model=model, simulated=world_size, rounds=options.rounds)
        seen = run_ranks(work, 1, timeout=options.timeout, init=False)
    return [
        {"name": name, "ranks": world_size, **model._asdict(), **max((s[name] for s in seen), key=lambda of: of["cpu"])}
        for name in seen[0]
    ]


def _simulate(rank: int, world_size: int, model: Model, simulated: int, rounds: int) -> dict[str, dict[str, float]]:
    with fake_world(simulated):
        return _take_turns(rank, simulated, model, ["ours"], rounds)


def _take_turns(rank: int, world_size: int, model: Model, names: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Return by contestant seconds of wall time and of this process's cores, the median, and bytes of memory."""
    warnings.simplefilter("ignore")
    logging.getLogger("lowlevel_zero").setLevel(logging.WARNING)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(1 + rounds):
        for name in names:
            module, turn = model.make(), dict[str, float]()
            with measured(turn):
                made = CONTESTANTS[name](module)
            turns[name].append(turn)
            del made, module
    return {name: {key: median(turn[key] for turn in some[1:]) for key in some[0]} for name, some in turns.items()}


def _ours(module: nn.Module) -> object:
    return LowLevelZeroOptimizer(AdamW(module.parameters()), module, stage=2)


def _ddp(module: nn.Module) -> object:
    return DistributedDataParallel(module), AdamW(module.parameters())


def _fsdp2(module: nn.Module) -> object:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*module.children(), module):
        fully_shard(each, mesh=mesh)
    return AdamW(module.parameters())


def _deepspeed(module: nn.Module) -> object:
    from .peers.deepspeed_zero import initialized

    return initialized(module, AdamW(module.parameters()), Setting("25m", "fp32", 1), stage=2)


CONTESTANTS: dict[str, Callable[[nn.Module], object]] = {"ours": _ours, "ddp": _ddp, "fsdp2": _fsdp2}
if find_spec("deepspeed") is not None:
    CONTESTANTS["deepspeed"] = _deepspeed


def _draw(figure: Any, content: Mapping[str, Any]) -> None:
    """A bar a row: microseconds of computing a parameter."""
    bars = {
        f"{row['name']}, {row['parameters']:,} x {row['elements']:,}, {row['ranks']} ranks": 1e6
        * row["cpu"]
        / row["parameters"]
        for row in content["rows"]
    }
    draw_bars(figure, bars, "microseconds of computing a parameter")


if __name__ == "__main__":
    main()
