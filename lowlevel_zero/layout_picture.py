"""The picture of a layout: bucket by bucket a wire, a line a rank, with who owns which part of what."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .partition import EvenSplit
from .pictures import figure_in, plotting

# A light and a darker tint for neighbours, by param group.
_TINTS = (
    ("#4c86c0", "#86b2dc"),
    ("#dd8438", "#f0b27c"),
    ("#5a9e57", "#99cb94"),
    ("#8a69ae", "#b9a2d2"),
    ("#a8624e", "#cf9c8c"),
)
_PADDING = "#e9e9e9"
_WIDTH, _TALLEST = 12.0, 20.0  # inches
_GAP = 0.25  # between lanes, of a lane
_MOST_LABELS = 40
_MOST_LINES = 8  # between ranks
_MOST_EDGES = 200  # around parts of a lane: with more there would be nothing else to see


class Block(NamedTuple):
    """One parameter's columns of a wire."""

    name: str
    offset: int
    split: EvenSplit
    group: int


class Lane(NamedTuple):
    """One bucket's wire.

    Attributes:
        title: what stands beside it.
        ranks: whose rows it has.
        row: columns.
        blocks: the slices; what is left blank fills the row.
    """

    title: str
    ranks: int
    row: int
    blocks: Sequence[Block]


class _Patch(NamedTuple):
    """A rectangle: columns from ``left`` on, ranks ``first`` to ``stop`` of a lane."""

    left: int
    width: int
    first: int
    stop: int
    color: str


def draw(lanes: Sequence[Lane], title: str, path: str | os.PathLike[str]) -> None:
    """Draw the wires, each as wide and as high as the others, into the file ``path``."""
    most = max(lane.ranks for lane in lanes)
    height = min(_TALLEST, 1.4 + len(lanes) * min(1.2, 0.3 + 0.1 * most))
    with figure_in(path, _WIDTH, height) as figure:
        axes = figure.add_subplot()
        for at, lane in enumerate(lanes):
            _draw_lane(axes, at * (1 + _GAP), lane)
        _frame(axes, lanes, title)
        _legend(axes, lanes)


def _draw_lane(axes: Any, top: float, lane: Lane) -> None:
    patches = list(_patches(lane))
    edge = 0.5 if len(patches) < _MOST_EDGES else 0.0
    collection = plotting("collections").PolyCollection(
        [_corners(patch, top, lane) for patch in patches],
        facecolors=[patch.color for patch in patches],
        edgecolors="white",
        linewidths=edge,
    )
    axes.add_collection(collection, autolim=False)
    if lane.ranks <= _MOST_LINES:
        axes.hlines([top + rank / lane.ranks for rank in range(1, lane.ranks)], 0, 1, "white", linewidths=0.5)
    middle = top + (0.5 / lane.ranks if lane.ranks <= _MOST_LINES else 0.5)
    for block in lane.blocks:
        width = block.split.slice_size / lane.row
        if width > 0.0085 * len(block.name):
            center = block.offset / lane.row + width / 2
            axes.text(center, middle, block.name, ha="center", va="center", fontsize=7, clip_on=True)


def _patches(lane: Lane) -> Iterator[_Patch]:
    """A block's owners, the padding of the rank that meets its end, and ranks that have nothing else of it."""
    for at, block in enumerate(lane.blocks):
        color = _TINTS[block.group % len(_TINTS)][at % 2]
        size, numel = block.split.slice_size, block.split.numel
        whole, rest = divmod(numel, size)
        yield _Patch(block.offset, size, 0, whole, color)
        if rest:
            yield _Patch(block.offset, rest, whole, whole + 1, color)
            yield _Patch(block.offset + rest, size - rest, whole, whole + 1, _PADDING)
        if whole + bool(rest) < lane.ranks:
            yield _Patch(block.offset, size, whole + bool(rest), lane.ranks, _PADDING)


def _corners(patch: _Patch, top: float, lane: Lane) -> list[tuple[float, float]]:
    left, right = patch.left / lane.row, (patch.left + patch.width) / lane.row
    upper, lower = top + patch.first / lane.ranks, top + patch.stop / lane.ranks
    return [(left, upper), (right, upper), (right, lower), (left, lower)]


def _frame(axes: Any, lanes: Sequence[Lane], title: str) -> None:
    shown = range(0, len(lanes), -(-len(lanes) // _MOST_LABELS))
    axes.set_yticks([at * (1 + _GAP) + 0.5 for at in shown], [lanes[at].title for at in shown], fontsize=8)
    axes.set_ylim(len(lanes) * (1 + _GAP), -_GAP)
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.set_xlabel("a wire's row; a bucket's lines are its ranks, the first on top")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _legend(axes: Any, lanes: Sequence[Lane]) -> None:
    groups = sorted({block.group for lane in lanes for block in lane.blocks})
    named = [(f"param group {group}", _TINTS[group % len(_TINTS)][0]) for group in groups]
    handles = [
        plotting("patches").Patch(facecolor=color, label=label) for label, color in (*named, ("padding", _PADDING))
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
