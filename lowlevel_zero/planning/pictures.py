"""Pictures, drawn by matplotlib where that is installed: a figure in a file, and a plan's bars."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..layout.text import counted, in_bytes, unit_of
from .memory import OWNERS, Estimate

_COLORS = dict(zip(OWNERS, ("#1f5fa8", "#d9660a", "#3f8f4f", "#7b5aa6", "#999999"), strict=True))
_ROOM = 1.35  # of the longest bar, for the numbers at its end


@contextmanager
def figure_in(path: str | os.PathLike[str], width: float, height: float) -> Iterator[Any]:
    """Yield a ``matplotlib.figure.Figure`` of ``width`` and ``height`` inches, and write it to ``path`` at the end.

    The suffix of ``path`` says in which format. ``pyplot`` and its user's settings stay untouched.

    Raises:
        ModuleNotFoundError: matplotlib isn't installed.
        ValueError: a format that matplotlib doesn't know.
        OSError: it can't be written there.
    """
    try:
        plotting = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"a picture needs {missing.name}: pip install 'lowlevel-zero[cli]', or leave the picture out"
        ) from None
    figure = plotting.Figure(figsize=(width, height), dpi=150, layout="constrained")
    yield figure
    figure.savefig(path)


def draw_estimates(found: Sequence[Estimate], title: str, path: Path) -> None:
    """Draw a bar for each estimate, cut by owner, one below the other, into the file ``path``."""
    largest = max(each.total for each in found)
    scale, unit = unit_of(largest)
    ends = [0.0] * len(found)
    with figure_in(path, 9.5, 1.5 + 0.32 * len(found)) as figure:
        axes = figure.add_subplot()
        for owner, color in _COLORS.items():
            sizes = [getattr(each, owner) / scale for each in found]
            bars = axes.barh(range(len(found)), sizes, left=ends, color=color, label=owner.replace("_", " "))
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        axes.bar_label(bars, [_amount(each) for each in found], padding=4, fontsize=8)
        axes.set_yticks(range(len(found)), [_name(each) for each in found], fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, largest / scale * _ROOM)
        axes.set_xlabel(f"{unit} per rank (in brackets: on the device + on the host)")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper left", title=title, ncols=len(_COLORS), frameon=False)


def _name(each: Estimate) -> str:
    return f"{counted(each.world_size, 'rank')}, stage {each.stage}{', offload' if each.cpu_offload else ''}"


def _amount(each: Estimate) -> str:
    where = f" ({in_bytes(each.device)} + {in_bytes(each.host.total)})" if each.cpu_offload else ""
    return f"{in_bytes(each.total)}{where}"
