"""Makes the golden file ``curves.json``: ``python -m tests.golden.make``.

Make the curves anew when a change of the numbers is meant, and say in the commit why they changed.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from lowlevel_zero import __version__
from tests.support.ranks import run_ranks

from .curves import CURVES, RANKS, RUNS, curves_of, together


def make_curves() -> None:
    """Write ``curves.json``."""
    made_by = _made_by()
    curves = map(together, zip(*run_ranks(curves_of, RANKS), strict=True))
    runs = [{"run": asdict(run), **curve._asdict()} for run, curve in zip(RUNS, curves, strict=True)]
    CURVES.write_text(json.dumps({"made_by": made_by, "runs": runs}, indent=1) + "\n")


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_curves()
