"""The house in figures: lines by room, arrows that climb, functions called in one step. ``python -m benchmarks.house``.

The story is what stands at the top of the package and in ``bookkeeping/``; every other folder is a room.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer

PACKAGE = Path(__file__).parents[1] / "lowlevel_zero"
_LINTER = Path(sys.executable).parent / "lint-imports"

# Lines that a room is to have at most; the story: files at the top and bookkeeping.
BUDGETS = {
    "story": 3500,
    "communication/": 1600,
    "optim/": 600,
    "state/": 750,
    "checkpoint/": 1300,
    "diagnostics/": 850,
    "experts/": 250,
    "offload/": 150,
    "gradients/": 500,
    "layout/": 250,
    "planning/": 450,
    "plugin/": 900,
    "deepspeed/": 450,
    "trainers/": 400,
}
TOTAL, TOP_FILES = 11_000, 14
# Calls of the package's functions: in one parameter's step, of how many functions in how many files; a bucket; a
# parameter.
CALLS = {"calls": 200, "functions": 90, "files": 14, "a bucket": 45, "a parameter": 4}


def place_of(path: Path) -> str:
    """What the tables above call a file of the package, given as a path within it."""
    return f"{path.parts[0]}/" if len(path.parts) > 1 else path.stem


def lines_by_room() -> dict[str, int]:
    """Lines of the story and of each room."""
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        place = place_of(path.relative_to(PACKAGE))
        room = place if place.endswith("/") and place != "bookkeeping/" else "story"
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(lines)


def climbing() -> list[str]:
    """What import-linter says of the contracts in pyproject.toml that are broken; empty: all imports fall."""
    done = subprocess.run([_LINTER, "--no-logo"], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else (done.stdout + done.stderr).splitlines()


class Calls(NamedTuple):
    """The package's functions called in one training step on rank 0 of two, by file and name."""

    step: Counter[str]
    a_bucket: float
    a_parameter: float

    def figures(self) -> dict[str, float]:
        """By the names that ``CALLS`` has."""
        files = {name.split(":")[0] for name in self.step}
        return {
            "calls": self.step.total(),
            "functions": len(self.step),
            "files": len(files),
            "a bucket": self.a_bucket,
            "a parameter": self.a_parameter,
        }


def count_calls() -> Calls:
    """Train small stacks of layers on two processes, and count one step's calls in each."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), nprocs=2)
        return torch.load(Path(folder) / "calls", weights_only=False)  # type: ignore[no-any-return]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    one, few = _step(1, 1), _step(20, 20).total()
    many, in_buckets = _step(60, 60).total(), _step(60, 20).total()
    if rank == 0:
        torch.save(Calls(one, (in_buckets - many) / 2, (many - few) / 40), Path(folder) / "calls")
    dist.barrier()
    dist.destroy_process_group()


def _step(layers: int, layers_a_bucket: int) -> Counter[str]:
    torch.manual_seed(0)
    width = 32
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = LowLevelZeroOptimizer(
        torch.optim.AdamW(model.parameters(), fused=True),
        model=model,
        partition_grad=True,
        reduce_bucket_size=layers_a_bucket * width * width,
    )
    seen: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            seen[f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_name}"] += 1

    for step in range(4):
        if step == 3:  # the first ones have taught the order of gradients
            threading.setprofile(look)
            sys.setprofile(look)
        optimizer.backward(model(torch.randn(4, width)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    sys.setprofile(None)
    threading.setprofile(None)
    return seen


def report(calls: Calls | None = None) -> str:
    """All figures beside their budgets."""
    rooms = lines_by_room()
    top = len(list(PACKAGE.glob("*.py")))
    rows = [(name, rooms.get(name, 0), most) for name, most in BUDGETS.items()]
    rows += [(name, count, 0) for name, count in rooms.items() if name not in BUDGETS]
    rows += [("the package", sum(rooms.values()), TOTAL), ("files at the top", top, TOP_FILES)]
    lines = ["lines".rjust(32) + "at most".rjust(10), *(_row(*row) for row in rows)]
    found = climbing()
    lines += ["", *(found or ["arrows that climb: none"])]
    if calls is not None:
        lines += ["", "functions of the package called".ljust(32) + "at most".rjust(10)]
        lines += [_row(name, round(figure, 1), CALLS[name]) for name, figure in calls.figures().items()]
    return "\n".join(lines)


def _row(name: str, figure: float, most: float) -> str:
    over = "  over" if most and figure > most else ""
    return f"{name:20}{figure:12,}{most or '':>10}{over}"


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("--functions", action="store_true", help="list the functions of one parameter's step")
    options = parser.parse_args()
    calls = count_calls()
    print(report(calls))
    if options.functions:
        print("\n" + "\n".join(f"{count:4} {name}" for name, count in calls.step.most_common()))


if __name__ == "__main__":
    main()
