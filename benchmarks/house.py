"""The size of the package: lines by room, imports that climb or circle, and functions called in one step.

    python -m benchmarks.house

The story is the files at the top of the package and in ``bookkeeping/``. Every other folder is a room.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from importlib import import_module
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

# The most lines that rooms may have together.
BUDGETS = {("story",): 4000, ("communication/",): 2200, ("checkpoint/", "state/"): 2500}
TOTAL = 15_000
# The most calls of the package's functions: in a step of one parameter, with the functions and files that they are in,
# and for each further bucket and parameter.
CALLS = {"calls": 200, "functions": 95, "files": 16, "a bucket": 45, "a parameter": 4}


def place_of(path: Path) -> str:
    """Return the room of a file, given as a path within the package, or the name of a file at the top."""
    return f"{path.parts[0]}/" if len(path.parts) > 1 else path.stem


def lines_by_room() -> dict[str, int]:
    """Return the lines of the story and of each room."""
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        place = place_of(path.relative_to(PACKAGE))
        room = place if place.endswith("/") and place != "bookkeeping/" else "story"
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(lines)


def climbing() -> list[str]:
    """Return what import-linter prints about broken contracts in pyproject.toml; nothing if none is broken."""
    done = subprocess.run([_LINTER, "--no-logo"], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else (done.stdout + done.stderr).splitlines()


def in_circles() -> list[str]:
    """Return the modules that import themselves by way of others."""
    graph = import_module("grimp").build_graph(PACKAGE.name)
    edges = ((module, each) for module in graph.modules for each in graph.find_modules_directly_imported_by(module))
    return sorted({module for module, each in edges if graph.chain_exists(importer=each, imported=module)})


class Calls(NamedTuple):
    """The calls of the package's functions on rank 0 of two.

    Attributes:
        step: by file and name, in a training step of one parameter.
        a_bucket, a_parameter: for each further bucket and parameter.
    """

    step: Counter[str]
    a_bucket: float
    a_parameter: float

    def figures(self) -> dict[str, float]:
        """Return the figures by their names in ``CALLS``."""
        files = {name.split(":")[0] for name in self.step}
        return {
            "calls": self.step.total(),
            "functions": len(self.step),
            "files": len(files),
            "a bucket": self.a_bucket,
            "a parameter": self.a_parameter,
        }


def count_calls() -> Calls:
    """Count the calls of one step in trainings of small stacks of layers on two processes."""
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
        if step == 3:  # the first steps have taught the order of gradients
            threading.setprofile(look)
            sys.setprofile(look)
        optimizer.backward(model(torch.randn(4, width)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    sys.setprofile(None)
    threading.setprofile(None)
    return seen


def report(calls: Calls | None = None) -> str:
    """Return all figures beside their budgets."""
    rooms = lines_by_room()
    rows = [(name, lines, 0) for name, lines in sorted(rooms.items())]
    rows += [(" + ".join(names), sum(map(rooms.__getitem__, names)), most) for names, most in BUDGETS.items()]
    rows += [("the package", sum(rooms.values()), TOTAL)]
    lines = ["lines".rjust(42) + "at most".rjust(10), *(_row(*row) for row in rows)]
    circles = in_circles()
    lines += ["", *(climbing() or ["imports that climb: none"])]
    lines += [f"modules in import circles: {', '.join(circles) or 'none'}"]
    if calls is not None:
        lines += ["", "functions of the package called".ljust(42) + "at most".rjust(10)]
        lines += [_row(name, round(figure, 1), CALLS[name]) for name, figure in calls.figures().items()]
    return "\n".join(lines)


def _row(name: str, figure: float, most: float) -> str:
    over = "  over" if most and figure > most else ""
    return f"{name:30}{figure:12,}{most or '':>10}{over}"


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("--functions", action="store_true", help="list the functions of one parameter's step")
    options = parser.parse_args()
    calls = count_calls()
    print(report(calls))
    if options.functions:
        print("\n" + "\n".join(f"{count:4} {name}" for name, count in calls.step.most_common()))


if __name__ == "__main__":
    main()
