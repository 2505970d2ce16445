"""The picture of a plan: a bar for each estimate, cut by owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..memory import Estimate
from ..pictures import figure_in
from ..text import counted, in_bytes, unit_of

_COLORS = {
    "parameters": "#1f5fa8",
    "gradients": "#d9660a",
    "masters": "#3f8f4f",
    "states": "#7b5aa6",
    "wires": "#999999",
}
_ROOM = 1.35  # of the longest bar, for the numbers at its end


def draw(found: Sequence[Estimate], title: str, path: Path) -> None:
    """Draw the estimates, one below the other, into the file ``path``."""
    largest = max(each.total for each in found)
    scale, unit = unit_of(largest)
    ends = [0.0] * len(found)
    with figure_in(path, 9.5, 1.5 + 0.32 * len(found)) as figure:
        axes = figure.add_subplot()
        for owner, color in _COLORS.items():
            sizes = [asdict(each.owners())[owner] / scale for each in found]
            axes.barh(range(len(found)), sizes, left=ends, color=color, edgecolor="white", linewidth=0.5, label=owner)
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        for at, each in enumerate(found):
            axes.annotate(_amount(each), (ends[at], at), (4, 0), textcoords="offset points", va="center", fontsize=8)
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
