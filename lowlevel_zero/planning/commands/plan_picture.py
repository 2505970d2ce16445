"""The picture of a plan: a bar for each stage, with and without offload, cut by owner; a panel for each world size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from ..memory import Estimate
from ..pictures import figure_in, plotting
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
    """Draw the estimates, those of one world size after each other, into the file ``path``."""
    panels = [list(each) for _, each in groupby(found, key=lambda each: each.world_size)]
    largest = max(each.total for each in found)
    scale, unit = unit_of(largest)
    height = 1.3 + 0.45 * len(panels) + 0.32 * len(found)
    with figure_in(path, 9.5, height) as figure:
        ratios = [len(panel) + 1 for panel in panels]
        columns = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios})
        for axes, panel in zip(columns[:, 0], panels, strict=True):
            _draw_panel(axes, panel, scale)
        axes.set_xlim(0, largest / scale * _ROOM)
        axes.set_xlabel(f"{unit} per rank (in brackets: on the device + on the host, which is hatched)")
        patches = [plotting("patches").Patch(facecolor=color, label=owner) for owner, color in _COLORS.items()]
        place = {"loc": "outside upper left", "alignment": "left", "ncols": len(patches), "frameon": False}
        figure.legend(handles=patches, title=title, title_fontsize=11, fontsize=9, **place)


def _draw_panel(axes: Any, panel: Sequence[Estimate], scale: int) -> None:
    for at, each in enumerate(panel):
        end = 0.0
        for owner, size, on_host in _pieces(each):
            style = {"hatch": "////", "alpha": 0.55} if on_host else {}
            axes.barh(at, size / scale, left=end, color=_COLORS[owner], edgecolor="white", linewidth=0.5, **style)
            end += size / scale
        text = in_bytes(each.total)
        if each.cpu_offload:
            text += f" ({in_bytes(each.device)} + {in_bytes(each.host.total)})"
        axes.annotate(text, (end, at), (4, 0), textcoords="offset points", va="center", fontsize=8)
    labels = [f"stage {each.stage}{', offload' if each.cpu_offload else ''}" for each in panel]
    axes.set_yticks(range(len(panel)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_title(counted(panel[0].world_size, "rank"), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def _pieces(each: Estimate) -> list[tuple[str, int, bool]]:
    """Owner, bytes, and whether they are on the host: first what is on the device."""
    host = asdict(each.host)
    owners = asdict(each.owners())
    pieces = [(owner, size - host[owner], False) for owner, size in owners.items()]
    pieces += [(owner, size, True) for owner, size in host.items()]
    return [piece for piece in pieces if piece[1]]
