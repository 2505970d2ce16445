"""The optimizer's step on one GPU, as one of W ranks: ``python -m benchmarks.cuda --help``.

The other ranks are a fake process group's: collectives do nothing at once, so what is left is what this rank's own GPU
and host do in a step of a bf16 model with fp32 masters. Beside it: the time in which the bytes that must move could be
copied on this very GPU, and ColossalAI's own optimizer. ``--device cpu`` tries all but what CUDA alone can tell.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_ranks

from .fake import Calls, fake_world, make_finite
from .gpt import GPT, SIZES, make_batches
from .machine import header, load
from .output import RESULTS, publish, refuse_unkept
from .peers.peer import adamw
from .picture import draw_bars
from .tables import TABLES

# Bytes that a step must move for each element that a rank owns (gradient, master, two states, row), and to copy the
# gathered rows out into each parameter.
OWNED, COPIED = 30, 4
NAMES = ("ours-1", "ours-2", "colossalai-1", "colossalai-2")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")


@dataclass(frozen=True)
class Case:
    """One optimizer at one simulated world size."""

    name: str
    world_size: int
    size: str
    steps: int
    device: str


def main(arguments: list[str] | None = None) -> None:
    """Measure every case in a process of its own; print the table, write JSON and picture."""
    options = _parse(arguments)
    # This process must not touch the device, or those that it forks couldn't.
    gpu, bandwidth = _in_a_process(options.timeout, _look_at, options.device, options.copied)
    names = [name for name in options.contestants if name.startswith("ours") or find_spec("colossalai")]
    if len(names) < len(options.contestants):
        print("colossalai is not installed, and so left out: make peers", file=sys.stderr)
    refuse_unkept(options.out)
    facts = header() | {"device": gpu}
    rows = []
    for world_size in options.world_sizes:
        for name in names:
            case = Case(name, world_size, options.size, options.steps, options.device)
            try:
                rows.append(_beside_floor(_in_a_process(options.timeout, _measure, case), bandwidth))
            except (AssertionError, TimeoutError) as error:  # one that fails keeps no other from being measured
                print(f"{name} of {world_size} ranks is left out: {error}", file=sys.stderr)
    facts["load average after"] = load()
    run = {"size": options.size, "dtype": "bf16", "steps": options.steps, "copies, GB/s": round(bandwidth / 1e9, 1)}
    content = {"header": facts, "run": run, "rows": rows}
    publish(options.out, content, TABLES["cuda"](content).text(), _draw)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script")
    parser.add_argument("--size", choices=SIZES, default="1b", help="the model")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 8, 64], help="simulated ranks")
    parser.add_argument("--contestants", nargs="+", default=list(NAMES), choices=NAMES, help="who takes part")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each")
    parser.add_argument("--copied", type=int, default=2**30, help="bytes that are copied to measure the bandwidth")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one case")
    parser.add_argument("--out", type=Path, default=RESULTS / "scratch-cuda.json", help="JSON, beside a picture")
    return parser.parse_args(arguments)


def _in_a_process(timeout: float, work: Any, *args: Any) -> Any:
    (told,) = run_ranks(_called, 1, work, args, timeout=timeout, init=False)
    if told is None:
        raise SystemExit("expected a GPU that torch can use, found none: --device cpu tries what a CPU can tell")
    return told


def _called(rank: int, world_size: int, work: Any, args: tuple[Any, ...]) -> Any:
    warnings.simplefilter("ignore")
    return work(*args)


# ---- what the device is ----


def _look_at(device: str, copied: int) -> tuple[str, float] | None:
    """The device's name and the bytes it reads and writes a second in a large copy; None if it isn't there."""
    if device == "cuda" and not torch.cuda.is_available():
        return None
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [_seconds(device, lambda: target.copy_(source)) for _ in range(10)]
    return torch.cuda.get_device_name() if device == "cuda" else "cpu", 2 * copied / median(seconds[2:])


def _seconds(device: str, work: Any) -> float:
    """Of the device."""
    if device == "cpu":
        start = perf_counter()
        work()
        return perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    work()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


# ---- one optimizer ----


class Trainee:
    """A model of one rank's on the device, and the optimizer whose step is measured."""

    def __init__(self, case: Case) -> None:
        size = SIZES[case.size]
        with torch.device(case.device):
            self.model = GPT(size).to(torch.bfloat16)
        self.elements = sum(p.numel() for p in self.model.parameters())
        self.optimizer = _make_optimizer(case.name, self.model)
        (self._batch,) = (batch.to(case.device) for batch in make_batches(size, 1, 0))

    def backward(self) -> None:
        """Forward and backward."""
        self.optimizer.backward(self.model(self._batch))

    def step(self) -> None:
        """What is measured."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        self.optimizer.zero_grad()


def _make_optimizer(name: str, model: GPT) -> Any:
    whose, stage = name.rsplit("-", 1)
    inner: Optimizer = adamw(model.parameters())
    if whose == "ours":
        return LowLevelZeroOptimizer(inner, partition_grad=stage == "2", model=model)
    return import_module(".peers.colossal", __package__).low_level_zero(inner, int(stage))


def _measure(case: Case) -> dict[str, Any]:
    """A row: medians over the steps, and what one step more shows under the profiler."""
    with fake_world(case.world_size) as calls:
        trainee = Trainee(case)
        turns = [_turn(trainee, case, calls) for _ in range(3 + case.steps)][3:]
        row = {key: median(turn[key] for turn in turns) for key in turns[0]}
        told = _told_by_cuda(trainee) if case.device == "cuda" else {}
    return {"name": case.name, "world size": case.world_size, "elements": trainee.elements, **row, **told}


def _turn(trainee: Trainee, case: Case, calls: Calls) -> dict[str, float]:
    """One step: the device's milliseconds, and the host's until it has asked for everything."""
    make_finite(trainee.model)
    trainee.backward()
    calls.reset()
    host = 0.0

    def step() -> None:
        nonlocal host
        start = perf_counter()
        trainee.step()
        host = perf_counter() - start

    seconds = _seconds(case.device, step)
    collectives = calls.count
    trainee.zero_grad()
    return {"step ms": 1e3 * seconds, "host ms": 1e3 * host, "collectives": collectives}


def _told_by_cuda(trainee: Trainee) -> dict[str, float]:
    """Launches, host synchronisations and memory of one step more."""
    torch.cuda.reset_peak_memory_stats()
    trainee.backward()
    torch.cuda.synchronize()
    trainee.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    trainee.zero_grad()
    after = torch.cuda.memory_allocated()
    trainee.backward()
    synchronisations = _synchronisations(trainee)
    trainee.zero_grad()
    trainee.backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        trainee.step()
    trainee.zero_grad()
    launches = sum(event.name.startswith(_LAUNCHES) for event in profiled.events())
    told = {"launches": launches, "synchronisations": synchronisations, "peak bytes": peak, "bytes after": after}
    return told | (_asleep(trainee.optimizer) if isinstance(trainee.optimizer, LowLevelZeroOptimizer) else {})


def _asleep(optimizer: LowLevelZeroOptimizer) -> dict[str, float]:
    """How long states take to the host and back, once memory there has been pinned, and what stays on the device."""
    optimizer.offload_states()
    optimizer.reload_states()
    down = _seconds("cuda", optimizer.offload_states)
    asleep = torch.cuda.memory_allocated()
    return {"bytes asleep": asleep, "sleep ms": 1e3 * down, "wake ms": 1e3 * _seconds("cuda", optimizer.reload_states)}


def _synchronisations(trainee: Trainee) -> int:
    """How often torch warns in a step that the host waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainee.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


# ---- for people ----


def _beside_floor(row: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """With the time in which the bytes that must move could be copied; they don't where a rank is alone."""
    gathered = COPIED if row["world size"] > 1 else 0
    floor = 1e3 * row["elements"] * (OWNED / row["world size"] + gathered) / bandwidth
    return {**row, "copying ms": floor, "to copying": row["step ms"] / floor}


def _draw(figure: Any, content: Mapping[str, Any]) -> None:
    bars = {f"{row['name']}, {row['world size']} ranks": row["to copying"] for row in content["rows"]}
    draw_bars(figure, bars, "the step's time to that of copying the bytes that must move")


if __name__ == "__main__":
    main()
