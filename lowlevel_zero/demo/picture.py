"""The picture of the loss curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .progress import optional
from .summary import Summary

SMOOTHNESS = 25  # the smoothed loss looks back over one in so many of the steps
BLUE, ORANGE, GREY = "#1f5fa8", "#d9660a", "#777777"


def smoothed(losses: Sequence[float]) -> list[float]:
    """An exponential moving average, corrected for its start as Adam's moments are."""
    memory = 1 - min(1.0, SMOOTHNESS / len(losses))
    average, result = 0.0, []
    for count, loss in enumerate(losses, start=1):
        average = memory * average + (1 - memory) * loss
        result.append(average / (1 - memory**count))
    return result


def draw(summary: Summary, path: Path) -> None:
    """The losses over the steps, and the baselines as levels to fall below: a PNG at ``path``."""
    optional("matplotlib").use("Agg")
    pyplot = optional("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=150, layout="constrained")
    _levels(axes, summary.baselines)
    _curves(axes, summary.train, summary.validation)
    _frame(axes, summary)
    figure.savefig(path)
    pyplot.close(figure)


def _levels(axes: Any, baselines: dict[str, float]) -> None:
    at_the_right = {"xy": (1, 0), "xytext": (0, 3), "textcoords": "offset points", "ha": "right"}
    for name, loss in baselines.items():
        axes.axhline(loss, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        place = at_the_right | {"xy": (1, loss), "xycoords": ("axes fraction", "data")}
        axes.annotate(f"{name} {loss:.2f}", **place, color=GREY, fontsize=9)


def _curves(axes: Any, train: Sequence[float], validation: Sequence[tuple[int, float]]) -> None:
    steps = range(1, len(train) + 1)
    axes.plot(steps, train, color=BLUE, linewidth=0.8, alpha=0.25)
    axes.plot(steps, smoothed(train), color=BLUE, linewidth=2, label="training, smoothed")
    points = zip(*validation, strict=True)
    axes.plot(*points, "o-", color=ORANGE, linewidth=1, markersize=5, label="validation")
    place = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(f"{validation[-1][1]:.2f}", validation[-1], **place, color=ORANGE, fontweight="bold")


def _frame(axes: Any, summary: Summary) -> None:
    size = f"{summary.parameters / 1e6:.1f} million parameters"
    axes.set_title(f"Byte-level GPT, {size}, {summary.name} on {summary.world_size} ranks", loc="left", fontsize=11)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("loss, nats a byte")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
