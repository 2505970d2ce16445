"""The cost of saving and loading beside FSDP2 with torch.distributed.checkpoint: ``python -m benchmarks.checkpoints``.

Both alternate in the same rounds, and all that was written before is on the disk when one begins. Each figure is the
least of all rounds on the rank that needed most. Three more are of this package alone: a copy of what a rank writes, a
save beside a few and beside many older checkpoints, and the bytes of 8-bit states.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from lowlevel_zero.communication.shard_group import ShardGroup
from tests.support.ranks import run_ranks

from . import counters
from .machine import header
from .output import RESULTS, publish, refuse_unkept
from .rounds import settle
from .tables import TABLES

OURS, FSDP2 = "ours", "fsdp2"
SAVE, ASYNC_SAVE, STALL, LOAD, RESHARD = "save", "async save", "stall of an async save", "load", "load on other ranks"
FEW, MANY = 3, 1000  # older checkpoints beside a save
# What a save may exchange with: agreements, and collectives of objects.
EXCHANGES: tuple[tuple[Any, str], ...] = (
    (ShardGroup, "all_reduce_max"),
    (ShardGroup, "all_gather_object"),
    (dist, "all_gather_object"),
    (dist, "gather_object"),
    (dist, "broadcast_object_list"),
    (dist, "scatter_object_list"),
)
SMALL = (4, 256)  # layers and width of a model whose saves show what is beside them


@dataclass(frozen=True)
class Sizes:
    """What is saved: matrices of ``width`` squared elements, and two states of each, in fp32.

    Attributes:
        layers: matrices.
        width: rows and columns of one.
        ranks: ranks that save.
        load_ranks: ranks that load what those have saved.
        rounds: how often each is measured.
    """

    layers: int
    width: int
    ranks: int
    load_ranks: int
    rounds: int


class Ours:
    """This package at stage 2."""

    def __init__(self, sizes: Sizes) -> None:
        self.model = make_model(sizes)
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer = LowLevelZeroOptimizer(inner, model=self.model, stage=2)
        self.optimizer.backward(loss(self.model, sizes))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[Tensor]:
        """Return what this rank writes."""
        records = list(self.optimizer.sharded_parameters)
        states = [each for r in records for each in self.optimizer.optim.state[r.p32].values() if each.dim()]
        return [*(record.row for record in records), *states]

    def save(self, path: Path) -> None:
        """Save, and return when all is on the disk."""
        save_checkpoint(path, self.model, self.optimizer)

    def start_saving(self, path: Path) -> Callable[[], object]:
        """Start saving, and return what waits for it."""
        return save_checkpoint(path, self.model, self.optimizer, async_save=True).wait

    def load(self, path: Path) -> None:
        """Load."""
        load_checkpoint(path, self.model, self.optimizer)


class Fsdp2:
    """FSDP2, whose states ``dcp`` saves and loads in place."""

    def __init__(self, sizes: Sizes) -> None:
        self.model = make_model(sizes)
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        loss(self.model, sizes).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def save(self, path: Path) -> None:
        """Save, and return when all is on the disk."""
        dcp.save(self._state(), checkpoint_id=path)

    def start_saving(self, path: Path) -> Callable[[], object]:
        """Start saving, and return what waits for it."""
        return dcp.async_save(self._state(), checkpoint_id=path).result  # type: ignore[union-attr, return-value]

    def load(self, path: Path) -> None:
        """Load into the tensors that are there."""
        dcp.load(self._state(), checkpoint_id=path)


MAKE: dict[str, Callable[[Sizes], Any]] = {OURS: Ours, FSDP2: Fsdp2}


def make_model(sizes: Sizes) -> nn.Sequential:
    """Return matrices, one after another."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(sizes.layers)))


def loss(model: nn.Module, sizes: Sizes) -> Tensor:
    """Return a loss that all matrices have a gradient of."""
    output: Tensor = model(torch.ones(1, sizes.width)).square().mean()
    return output


@contextmanager
def measured(into: dict[str, float]) -> Iterator[None]:
    """Measure the body as ``counters.measured`` does, when all that was written before is on the disk."""
    if dist.get_rank() == 0:
        os.sync()
    with counters.measured(into):
        yield


Figures = dict[str, dict[str, dict[str, float]]]  # by operation, contestant and kind


def save_and_load(rank: int, world_size: int, sizes: Sizes, folder: Path) -> Figures:
    """Measure saving, and loading on the same ranks; leave one checkpoint of each contestant."""
    made = {name: make(sizes) for name, make in MAKE.items()}
    found: Figures = {}
    for at in range(sizes.rounds + 1):  # the first round isn't counted
        for name in (OURS, FSDP2) if at % 2 else (FSDP2, OURS):
            one, path = made[name], folder / f"{name}-{at}"
            figures: dict[str, dict[str, float]] = {each: {} for each in (SAVE, ASYNC_SAVE, STALL, LOAD)}
            with measured(figures[SAVE]):
                one.save(path)
            with measured(figures[ASYNC_SAVE]):
                with measured(figures[STALL]):
                    wait = one.start_saving(folder / f"{name}-async")
                wait()
            with measured(figures[LOAD]):
                one.load(path)
            if at:
                _keep_least(found, name, figures)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder / f"{name}-async")
                if at < sizes.rounds:
                    shutil.rmtree(path)
    found[STALL]["copy"] = _copied(made[OURS].tensors(), sizes.rounds)
    return found


def _copied(values: list[Tensor], rounds: int) -> dict[str, float]:
    """Measure a plain copy of ``values`` on all ranks at once, into memory that has been written before."""
    room = [torch.zeros_like(each) for each in values]
    copied: list[dict[str, float]] = []
    for _ in range(rounds):
        dist.barrier()  # as in a save, all ranks share the bandwidth of the memory
        with measured(figure := {}):
            for to, value in zip(room, values, strict=True):
                to.copy_(value)
        copied.append({**figure, "bytes": float(sum(each.nbytes for each in values))})
    return min(copied, key=lambda figure: figure["wall"])


def save_beside_others(rank: int, world_size: int, rounds: int, folder: Path) -> dict[str, float]:
    """Measure saves of a small model beside few and many older checkpoints, with ``keep``; count their exchanges."""
    one = Ours(Sizes(*SMALL, world_size, world_size, rounds))
    save_checkpoint(folder / "first", one.model, one.optimizer)
    if rank == 0:
        for count in (FEW, MANY):
            for at in range(count):
                shutil.copytree(folder / "first", folder / f"{count}" / f"step-{at}")
    seconds: dict[str, list[float]] = {}
    exchanges = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            nonlocal exchanges
            exchanges += 1
            return call(*args, **options)

        return counting

    for home, name in EXCHANGES:
        setattr(home, name, counted(getattr(home, name)))
    for at in range(10 * rounds):
        for count in (FEW, MANY):
            with measured(figure := {}):
                save_checkpoint(folder / f"{count}" / f"new-{at}", one.model, one.optimizer, keep=2 * MANY)
            seconds.setdefault(f"{count}", []).append(figure["wall"])
    saves = 20 * rounds
    return {name: sorted(each)[len(each) // 2] for name, each in seconds.items()} | {"exchanges": exchanges / saves}


def quantised_bytes(rank: int, world_size: int, folder: Path) -> dict[str, float]:
    """Return the bytes a parameter on the disk of 8-bit states, of each library that is installed."""
    found: dict[str, float] = {}
    for library, module in (("bitsandbytes", "bitsandbytes.optim"), ("torchao", "torchao.optim")):
        with suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make = importlib.import_module(module).AdamW8bit
            torch.compiler.set_stance("force_eager")
            model = make_model(sizes := Sizes(2, 1024, world_size, world_size, 1))
            optimizer = LowLevelZeroOptimizer(make(model.parameters()), model=model, stage=2)
            optimizer.backward(loss(model, sizes))
            optimizer.step()
            save_checkpoint(folder / library, model, optimizer)
            places = read_metadata(folder / library).storage_data.items()
            states = sum(place.length for index, place in places if index.fqn.startswith("optim."))
            found[library] = states / sum(p.numel() for p in model.parameters())
    return found


def load_elsewhere(rank: int, world_size: int, sizes: Sizes, folder: Path) -> Figures:
    """Measure loading on another number of ranks."""
    made = {name: make(sizes) for name, make in MAKE.items()}
    found: Figures = {}
    for at in range(sizes.rounds + 1):
        for name in (OURS, FSDP2) if at % 2 else (FSDP2, OURS):
            figures: dict[str, dict[str, float]] = {RESHARD: {}}
            with measured(figures[RESHARD]):
                made[name].load(folder / f"{name}-{sizes.rounds}")
            if at:
                _keep_least(found, name, figures)
    return found


def _keep_least(found: Figures, name: str, figures: Mapping[str, Mapping[str, float]]) -> None:
    for operation, of_kind in figures.items():
        least = found.setdefault(operation, {}).setdefault(name, dict(of_kind))
        least.update({kind: min(value, least[kind]) for kind, value in of_kind.items()})


def _of_worst_rank(by_rank: list[Figures]) -> Figures:
    first = by_rank[0]
    return {
        operation: {
            name: {kind: max(figures[operation][name][kind] for figures in by_rank) for kind in of_kind}
            for name, of_kind in by_name.items()
        }
        for operation, by_name in first.items()
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure; print the table and write JSON."""
    options = _parse(arguments)
    refuse_unkept(options.out)
    facts = header()
    settle()
    sizes = Sizes(options.layers, options.width, options.ranks, options.load_ranks, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        where = Path(folder)
        found = _of_worst_rank(run_ranks(save_and_load, sizes.ranks, sizes, where, timeout=options.timeout))
        found |= _of_worst_rank(run_ranks(load_elsewhere, sizes.load_ranks, sizes, where, timeout=options.timeout))
        beside, *_ = run_ranks(save_beside_others, sizes.ranks, sizes.rounds, where / "small", timeout=options.timeout)
        quantised, *_ = run_ranks(quantised_bytes, sizes.ranks, where / "quantised", timeout=options.timeout)
    run = {**asdict(sizes), "elements": sizes.layers * sizes.width**2, "bytes of a parameter": 4 * sizes.width**2}
    content = {"header": facts, "run": run, "operations": found, "beside": beside, "8 bits": quantised}
    publish(options.out, content, TABLES["checkpoints"](content).text())


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--layers", type=int, default=24, help="matrices")
    parser.add_argument("--width", type=int, default=2048, help="rows and columns of each")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that save")
    parser.add_argument("--load-ranks", type=int, default=3, help="ranks that load what those have saved")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--folder", type=Path, help="where to write checkpoints; else a temporary directory")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for all rounds")
    parser.add_argument("--out", type=Path, default=RESULTS / "scratch-checkpoints.json", help="JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
