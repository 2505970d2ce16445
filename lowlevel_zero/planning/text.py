"""What people read: tables whose columns are aligned, and amounts in units of their size."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def aligned(rows: Sequence[tuple[str, ...]], right: Collection[int]) -> str:
    """Rows as lines, columns two spaces apart; those in ``right`` end where their widest does."""
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
    """In which unit to tell so many bytes: how many bytes it is, and its name."""
    power = min(max(0, count.bit_length() - 1) // 10, len(_UNITS) - 1)
    return 1024**power, _UNITS[power]


def in_bytes(count: int) -> str:
    """A number of bytes in the unit of its size, as in ``12.3 GiB``."""
    scale, unit = unit_of(count)
    size = count / scale
    return f"{size:,.{0 if scale == 1 else 2 if size < 9.995 else 1}f} {unit}"


def counted(count: int, noun: str) -> str:
    """As in ``1 rank`` and ``1,024 ranks``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shape_text(shape: Sequence[int]) -> str:
    """As in ``16x8``."""
    return "x".join(map(str, shape)) or "scalar"


def ranks_text(ranks: Sequence[int]) -> str:
    """As in ``0-7`` or ``0,4``."""
    run = range(ranks[0], ranks[-1] + 1)
    return f"{run[0]}-{run[-1]}" if len(ranks) > 1 and list(ranks) == list(run) else ",".join(map(str, ranks))
