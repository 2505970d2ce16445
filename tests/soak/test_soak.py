"""Long runs: memory stays flat, nothing is left open, and the numbers are the oracle's."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from mmap import mmap
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.tensor  # here once, not in every forked rank
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import save_checkpoint
from tests.support.oracle import Odd, parameters_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.soak

LAYERS = 6
MICRO_BATCHES = 2
MAX_NORM = 0.5
PATTERNS = 10


@dataclass(frozen=True)
class Soak:
    """A run of so many steps; it saves, and its memory is measured, every so many."""

    world_size: int = 2
    steps: int = 2000
    save_every: int = 100
    measure_every: int = 50
    shared_memory: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Odd(layers=LAYERS).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    """Half of the layers are dropped, by each rank others; patterns recur, since plans are kept for those seen."""
    generator = torch.Generator().manual_seed(rank + 10 * (micro + 10 * step))
    x = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    pattern = random.Random(rank + 10 * (micro + 10 * (step % PATTERNS)))
    out: Tensor = model(x, {layer for layer in range(LAYERS + 1) if pattern.random() < 0.5})
    return (out - x[:, :3].sin()).square().mean() / MICRO_BATCHES


# ---- the oracle ----


class Outcome(NamedTuple):
    """The parameters in the end, and the norm of each step's gradients."""

    parameters: dict[str, Tensor]
    norms: list[float]


def train_alone(soak: Soak) -> Outcome:
    model = model_of(0)
    optimizer = optimizer_of(model)
    norms = []
    for step in range(1, soak.steps + 1):
        for micro in range(MICRO_BATCHES):
            for rank in range(soak.world_size):
                (loss_of(model, step, micro, rank) / soak.world_size).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(parameters_of(model), norms)


# ---- what a process holds ----


class Held(NamedTuple):
    """What of the system's a process has open: files by what they are, threads, and mapped anonymous files."""

    files: list[str]
    threads: int
    python_threads: list[str]
    mapped: list[str]

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        return cls(
            sorted(_files()),
            len(list(Path("/proc/self/task").iterdir())),
            sorted(thread.name for thread in threading.enumerate()),
            re.findall(r"/memfd:\S*", Path("/proc/self/maps").read_text()),
        )


def _files() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            yield re.sub(r"\[\d+\]", "", os.readlink(entry))  # sockets and pipes without their numbers
        except FileNotFoundError:  # the one that listed them
            continue


class Memory(NamedTuple):
    """Bytes that are resident, what the allocator has but doesn't use given back; and Python's objects."""

    resident: int
    objects: int

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), len(gc.get_objects()))


# ---- a rank ----


class Report(NamedTuple):
    """What a rank has to tell.

    Attributes:
        memory: as it was measured.
        before, during, after: what was held before it joined a process group, after the last step, and when group and
            optimizer had gone.
    """

    outcome: Outcome
    memory: list[Memory]
    before: Held
    during: Held
    after: Held

    def growth(self, what: str) -> float:
        """Of one of memory's attributes: from the second quarter's median to the last one's, in parts of it."""
        quarter = len(self.memory) // 4
        sizes = [getattr(each, what) for each in self.memory]
        early, late = median(sizes[quarter : 2 * quarter]), median(sizes[-quarter:])
        return float(late / early - 1)


def train_rank(rank: int, world_size: int, soak: Soak, folder: str) -> Report:
    """Joins a process group of its own, trains, and leaves."""
    if not soak.shared_memory:
        os.environ["LOWLEVEL_ZERO_SHARED_MEMORY"] = "0"
    logging.disable()  # pytest keeps every record, and torch's checkpoints make many
    _once(rank, world_size, soak, f"{folder}/once")  # what torch keeps for good, it has now
    before = _held_when(_has_nothing_of_ours)
    outcome, memory, during = _once(rank, world_size, soak, f"{folder}/soak", soak.steps)
    return Report(outcome, memory, before, during, _held_when(lambda held: held == before))


def _has_nothing_of_ours(held: Held) -> bool:
    """Tell whether this package's threads and memory of an earlier process group have gone by themselves."""
    return not held.mapped and not any(name.startswith("lowlevel_zero") for name in held.python_threads)


def _held_when(settled: Callable[[Held], bool], patience: float = 20.0) -> Held:
    """Return what is held once it has settled, since threads end by themselves, or when patience ends."""
    deadline = time.monotonic() + patience
    while not settled(held := Held.now()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


def _once(rank: int, world_size: int, soak: Soak, folder: str, steps: int = 2) -> tuple[Outcome, list[Memory], Held]:
    dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=world_size)
    try:
        return _train(rank, soak, folder, steps)
    finally:
        dist.destroy_process_group()


def _train(rank: int, soak: Soak, folder: str, steps: int) -> tuple[Outcome, list[Memory], Held]:
    model = model_of(rank)
    optimizer = LowLevelZeroOptimizer(optimizer_of(model), model=model, clip_grad_norm=MAX_NORM, **soak.options)
    memory: list[Memory] = []
    norms = []
    for step in range(1, steps + 1):
        for micro in range(MICRO_BATCHES):
            optimizer.backward(loss_of(model, step, micro, rank))
        optimizer.step()
        norms.append(cast(float, optimizer.get_grad_norm()))
        optimizer.zero_grad()
        if step % soak.measure_every == 0:
            memory.append(Memory.now())
        if step % soak.save_every == 0 or step == steps:
            save_checkpoint(f"{folder}/step-{step}", model, optimizer, extra={"step": step}, keep=2)
    return Outcome(parameters_of(model), norms), memory, Held.now()


# ---- the runs ----


WAYS = {
    "stage 1": Soak(world_size=4),
    "stage 2": Soak(options={"partition_grad": True, "reduce_bucket_size": 100}),
    "messages": Soak(shared_memory=False, options={"partition_grad": True}),
    "overlapped gathers": Soak(options={"overlap_allgather": True, "reduce_bucket_size": 100}),
}


def check(soak: Soak, folder: Path, timeout: float) -> None:
    expected = train_alone(soak)
    reports = run_ranks(train_rank, soak.world_size, soak, str(folder), init=False, timeout=timeout)
    for report in reports:
        for name, value in expected.parameters.items():
            torch.testing.assert_close(report.outcome.parameters[name], value, rtol=1e-6, atol=1e-8)
        assert report.outcome.norms == pytest.approx(expected.norms, rel=1e-6)  # Adam hides a factor, and clipping too
        assert report.after == report.before
        assert bool(report.during.mapped) == soak.shared_memory
        assert report.growth("resident") < 0.01
        assert report.growth("objects") < 0.01


@pytest.mark.parametrize("way", ["stage 2", "messages"])
def test_a_short_run(way: str, tmp_path: Path) -> None:
    check(replace(WAYS[way], steps=60, measure_every=5, save_every=15), tmp_path, timeout=60)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_a_long_run(way: str, tmp_path: Path) -> None:
    check(WAYS[way], tmp_path, timeout=1700)


@pytest.mark.parametrize("what", ["file", "thread", "memory"])
def test_what_stays_open_would_show(what: str) -> None:
    before = Held.now()
    with ExitStack() as stack:
        if what == "file":
            stack.enter_context(open(os.devnull))
        elif what == "thread":
            stop = threading.Event()
            stack.callback(stop.set)
            threading.Thread(target=stop.wait).start()
        else:
            file = os.memfd_create("held")
            os.ftruncate(file, 4096)
            stack.enter_context(mmap(file, 4096))
            os.close(file)
        assert Held.now() != before
