"""The picture: whole-step time relative to the baseline, and bytes held, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(results: dict[str, Any], title: str, path: Path) -> None:
    """Write a PNG; needs matplotlib, and so ``ImportError`` where it isn't installed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.2 + 0.42 * len(results)), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    rows = list(results.values())[::-1]
    names = [row["title"] for row in rows]
    colors = ["tab:orange" if row["title"].startswith("ours") else "tab:gray" for row in rows]
    _draw_time(time, names, rows, colors)
    held = [sum(row["held after backward"].values()) / row["elements"] for row in rows]
    after = [sum(row["held after step"].values()) / row["elements"] for row in rows]
    memory.barh(names, held, color=colors, alpha=0.4, label="after backward")
    memory.barh(names, after, color=colors, height=0.4, label="after the step")
    memory.set_xlabel("bytes held per parameter and rank (pale: after backward)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def _draw_time(axes: Any, names: list[str], rows: list[dict[str, Any]], colors: list[str]) -> None:
    """Ratios with whiskers from least to most; milliseconds where there is no baseline."""
    spreads = [row["ratios"]["whole"] if row["ratios"] else row["seconds"]["whole"] for row in rows]
    medians = [spread["median"] for spread in spreads]
    whiskers = [
        [spread["median"] - spread["least"] for spread in spreads],
        [spread["most"] - spread["median"] for spread in spreads],
    ]
    axes.barh(names, medians, xerr=whiskers, color=colors, ecolor="black", capsize=2)
    if rows[0]["ratios"]:
        axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("whole step, relative to the baseline" if rows[0]["ratios"] else "whole step, seconds")
