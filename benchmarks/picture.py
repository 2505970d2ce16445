"""The pictures: bars for contestants side by side, curves over world sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_OURS, _OTHERS = "tab:orange", "tab:gray"
_STYLES = ("-o", "--s", ":^", "-.v")


def draw_steps(figure: Any, content: Mapping[str, Any]) -> None:
    """Whole-step time relative to the baseline, and bytes held, side by side."""
    rows = list(content["contestants"].values())[::-1]
    figure.set_size_inches(11, 1.2 + 0.42 * len(rows))
    time, memory = figure.subplots(1, 2, sharey=True)
    names = [row["title"] for row in rows]
    colors = [_color(name) for name in names]
    _draw_time(time, names, rows, colors)
    held = [sum(row["held after backward"].values()) / row["elements"] for row in rows]
    after = [sum(row["held after step"].values()) / row["elements"] for row in rows]
    memory.barh(names, held, color=colors, alpha=0.4)
    memory.barh(names, after, color=colors, height=0.4)
    memory.set_xlabel("bytes per parameter and rank (pale: after backward)")


def _color(name: str) -> str:
    return _OURS if name.startswith("ours") else _OTHERS


def _draw_time(axes: Any, names: list[str], rows: list[dict[str, Any]], colors: list[str]) -> None:
    """Ratios with whiskers from least to most; seconds where there is no baseline."""
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


def draw_bars(figure: Any, bars: Mapping[str, float], label: str) -> None:
    """One bar a name."""
    figure.set_size_inches(8, 1.2 + 0.35 * len(bars))
    axes = figure.subplots()
    names = list(bars)[::-1]
    axes.barh(names, [bars[name] for name in names], color=[_color(name) for name in names])
    axes.set_xlabel(label)


class Curve(NamedTuple):
    """One line: a point for each x."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def draw_curves(figure: Any, panels: Mapping[str, Sequence[Curve]], label: str) -> None:
    """A panel for each quantity, with a curve a name; ``label`` says what x is, in powers of two."""
    figure.set_size_inches(4.2 * len(panels), 4.2)
    for axes, (quantity, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for number, curve in enumerate(curves):
            axes.plot(curve.xs, curve.ys, _STYLES[number % len(_STYLES)], label=curve.name)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(label)
        axes.set_title(quantity, fontsize=9)
        axes.legend(fontsize=8)
