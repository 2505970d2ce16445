"""Text for people: tables with aligned columns, and amounts in units of their size."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..partition import Owned

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LISTED = 16  # ranks in a message, at most


def aligned(rows: Sequence[tuple[str, ...]], right: Collection[int]) -> str:
    """Return rows as lines with columns two spaces apart; the columns in ``right`` are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(f"  {line}".rstrip() for line in lines)


def unit_of(count: int) -> tuple[int, str]:
    """Return the size and the name of the largest unit, such as MiB, that is at most ``count`` bytes."""
    power = min(max(0, count.bit_length() - 1) // 10, len(_UNITS) - 1)
    return 1024**power, _UNITS[power]


def in_bytes(count: int) -> str:
    """Return a number of bytes in the unit of its size, as in ``12.3 GiB``."""
    scale, unit = unit_of(count)
    size = count / scale
    return f"{size:,.{0 if scale == 1 else 2 if size < 9.995 else 1}f} {unit}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, as in ``1 rank`` and ``1,024 ranks``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as in ``16x8``."""
    return "x".join(map(str, shape)) or "scalar"


def dtype_text(dtype: torch.dtype) -> str:
    """Return a dtype without its module, as in ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def shares_text(shares: Sequence[Owned]) -> str:
    """Return text: the elements that each rank owns whole, and how far the fullest and busiest are from the mean."""
    elements, work = zip(*shares, strict=True)
    counts = ", ".join(f"{count:,}" for count in elements[:_LISTED])
    more = f" and {counted(len(shares) - _LISTED, 'rank')} more" if len(shares) > _LISTED else ""
    fullest, busiest = (max(each) * len(each) / (sum(each) or 1) for each in (elements, work))
    return f"the ranks own {counts}{more} elements, the fullest {fullest:.2f} of the mean, the busiest {busiest:.2f}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: a run as ``0-7``, others as ``0,4``."""
    run = range(ranks[0], ranks[-1] + 1)
    return f"{run[0]}-{run[-1]}" if len(ranks) > 1 and list(ranks) == list(run) else ",".join(map(str, ranks))
