"""Draw the pictures of the documentation from the package's own arithmetic: ``python docs/pictures.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from lowlevel_zero.partition import EvenSplit, WholeSplit
from lowlevel_zero.planning import estimate

FOLDER = Path(__file__).parent / "pictures"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
RANKS = len(COLOURS)
PARAMETERS = {"embedding": 20, "weight": 14, "bias": 3}
OWNERS = ("parameters", "gradients", "masters", "states")


def save(figure: plt.Figure, name: str) -> None:
    """Write a picture, the same bytes each time."""
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def cells(axes: Axes, y: float, numel: int, owner_of: list[int | None]) -> None:
    """Draw the elements of a flat parameter in the colours of their owners; padding is empty."""
    for at, owner in enumerate(owner_of):
        colour = "white" if owner is None else COLOURS[owner]
        axes.add_patch(plt.Rectangle((at, y), 0.92, 0.8, facecolor=colour, edgecolor="#888888", linewidth=0.6))
    axes.text(-0.5, y + 0.4, f"{numel} elements", ha="right", va="center", fontsize=8)


def splits() -> None:
    """Draw which rank owns which elements, by both splits."""
    figure, both = plt.subplots(2, 1, figsize=(8, 3.6))
    titles = ("split by elements: each rank owns a row of every parameter", "split by parameters: one rank owns each")
    for axes, title, whole in zip(both, titles, (False, True), strict=True):
        for y, (number, numel) in enumerate(enumerate(PARAMETERS.values())):
            split = WholeSplit(numel, RANKS, number) if whole else EvenSplit(numel, RANKS)
            owners: list[int | None] = [None] * split.padded_numel
            for rank in range(RANKS):
                start, stop = split.span(rank)
                owners[start:stop] = [rank] * (stop - start)
            cells(axes, -y, numel, owners)
        axes.set(xlim=(-4, 21), ylim=(-2.2, 1))
        axes.set_title(title, fontsize=10, loc="left")
        axes.axis("off")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS]
    figure.legend(handles, [f"rank {rank}" for rank in range(RANKS)], ncols=RANKS, loc="lower center", frameon=False)
    save(figure, "splits")


def memory() -> None:
    """Draw the bytes of a rank, by stage and number of ranks, for a bf16 model with fp32 masters and AdamW."""
    figure, axes = plt.subplots(figsize=(7, 3))
    labels, bottoms = [], []
    numel = 1.3e9
    for stage, ranks in ((0, 8), (1, 8), (1, 64), (2, 8), (2, 64)):
        told = estimate(numel, ranks, stage, "bf16", "adamw")
        labels.append("DDP, fp32 masters" if stage == 0 else f"stage {stage}, {ranks} ranks")
        bottoms.append([getattr(told, owner) / numel for owner in OWNERS])
    for at, owner in enumerate(OWNERS):
        left = [sum(each[:at]) for each in bottoms]
        axes.barh(labels, [each[at] for each in bottoms], left=left, color=COLOURS[at], label=owner)
    axes.invert_yaxis()
    axes.set_xlabel("bytes a parameter on each rank, after backward (without activations and bucket buffers)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "memory")


def step() -> None:
    """Draw the path of a gradient: from backward over a bucket and its reduction to the step and the gather."""
    stations = (
        ("backward", "p.grad", "whole, this rank's"),
        ("pack", "bucket", "buffer [ranks, row]"),
        ("reduce", "g", "own row of the sum"),
        ("step", "p32, state", "this rank's slice"),
        ("gather", "p", "whole, all ranks"),
    )
    figure, axes = plt.subplots(figsize=(9, 1.6))
    for at, (verb, tensor, shape) in enumerate(stations):
        axes.add_patch(plt.Rectangle((at * 3, 0), 2.1, 1.2, facecolor="#eef3f8", edgecolor=COLOURS[0]))
        axes.text(at * 3 + 1.05, 0.85, verb, ha="center", va="center", weight="bold")
        axes.text(at * 3 + 1.05, 0.5, tensor, ha="center", va="center", family="monospace", fontsize=9)
        axes.text(at * 3 + 1.05, 0.2, shape, ha="center", va="center", fontsize=7, color="#555555")
        if at:
            axes.annotate("", (at * 3, 0.6), (at * 3 - 0.9, 0.6), arrowprops={"arrowstyle": "->"})
    axes.set(xlim=(-0.1, 3 * len(stations) - 0.8), ylim=(-0.1, 1.3))
    axes.axis("off")
    save(figure, "step")


def main() -> None:
    """Draw all of them."""
    plt.rcParams.update({"svg.hashsalt": "lowlevel_zero", "svg.fonttype": "none", "font.size": 9})
    splits()
    memory()
    step()


if __name__ == "__main__":
    main()
