"""Makes the golden files: ``python -m tests.golden.make checkpoints`` and ``python -m tests.golden.make curves``.

The checkpoints are of format 1, and only the code that wrote format 1 makes them: later code must load them as they
are. ``format-1/made_by.json`` names that code's commit, its version and torch's. Of a later format make a folder of
its own beside.

The curves may be made anew when a change of the numbers is meant; say then in the commit why they changed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lowlevel_zero import __version__
from lowlevel_zero.checkpoint import save_checkpoint
from tests.support.ranks import run_ranks

from .checkpoints import EXTRA, FORMAT_1, WRITERS, Saved, build
from .curves import CURVES, OPTIMIZERS, RANKS, RUNS, Curve, curve_of, together


def make_checkpoints() -> None:
    """``format-1/KIND``, a checkpoint; ``KIND.pt``, all that was held then, and the masters after one more step."""
    FORMAT_1.mkdir(exist_ok=True)
    made_by = _made_by()
    for kind, world_size in WRITERS.items():
        whole = run_ranks(_save, world_size, kind)[0]
        written = json.loads((FORMAT_1 / kind / "lowlevel_zero.json").read_text())["format"]
        if written != 1:
            sys.exit(f"expected format 1, this code writes format {written}: use the code named in made_by.json")
        torch.save(whole, FORMAT_1 / f"{kind}.pt")
    (FORMAT_1 / "made_by.json").write_text(json.dumps(made_by, indent=1) + "\n")


def _save(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    saved = Saved.start(build(kind))
    saved.until_saved(rank, world_size)
    save_checkpoint(FORMAT_1 / kind, saved.model, saved.optimizer, scheduler=saved.scheduler, extra=EXTRA)
    at_save = saved.whole()
    saved.one_more(rank, world_size)
    return {"saved": at_save, "later": saved.masters()}


def make_curves() -> None:
    """``curves.json``."""
    made_by = _made_by()
    curves = run_ranks(_train_all, RANKS)
    runs = [
        {"run": asdict(run), **{name: asdict(together([rank[at][name] for rank in curves])) for name in OPTIMIZERS}}
        for at, run in enumerate(RUNS)
    ]
    CURVES.write_text(json.dumps({"made_by": made_by, "runs": runs}, indent=1) + "\n")


def _train_all(rank: int, world_size: int) -> list[dict[str, Curve]]:
    return [{name: curve_of(rank, world_size, run, name) for name in OPTIMIZERS} for run in RUNS]


def _made_by() -> dict[str, str]:
    if _git("status", "--porcelain", "--", "lowlevel_zero"):
        sys.exit("expected the package as it was committed: commit it first, so that its commit can be named")
    return {
        "lowlevel_zero": __version__,
        "commit": _git("log", "-1", "--format=%H", "--", "lowlevel_zero"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _git(*command: str) -> str:
    root = Path(__file__).parents[2]
    return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("checkpoints", "curves"))
    torch.set_num_threads(1)
    {"checkpoints": make_checkpoints, "curves": make_curves}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
