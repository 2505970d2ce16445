"""The output of every benchmark: a table on the terminal, JSON, and a picture if matplotlib is installed."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .machine import is_dirty

RESULTS = Path(__file__).parent / "results"

Draw = Callable[[Any, Mapping[str, Any]], None]


def refuse_unkept(path: Path) -> None:
    """Raise ``SystemExit`` where a result would be kept of a tree that no commit has: nobody could repeat it."""
    if path.resolve().parent == RESULTS.resolve() and not path.name.startswith("scratch") and is_dirty():
        raise SystemExit(
            f"{path.name}: expected a clean tree for a result that is kept: commit, or choose another --out"
        )


def heading(header: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """What was run, and on what."""
    return "\n".join(f"{name:20} {value}" for name, value in {**run, **header}.items())


def publish(path: Path, content: Mapping[str, Any], table: str, draw: Draw | None = None) -> None:
    """Print the table under its heading and write ``content``; ``draw(figure, content)`` makes the picture.

    ``content`` has a ``header`` and a ``run``, which the heading shows, and whatever was measured.
    """
    print(f"{heading(content['header'], content['run'])}\n\n{table}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")
    if draw is not None:
        _picture(path.with_suffix(".png"), content, draw)


def _picture(path: Path, content: Mapping[str, Any], draw: Draw) -> None:
    try:
        plotting = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as missing:
        print(f"no picture, which needs {missing.name}: pip install matplotlib", file=sys.stderr)
        return
    figure = plotting.Figure(figsize=(8, 5), dpi=150, layout="constrained")
    draw(figure, content)
    title = ", ".join(f"{name} {value}" for name, value in content["run"].items())
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.savefig(path)
