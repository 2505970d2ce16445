"""Put the newest results into README.md and docs/benchmarks.md, between markers: ``python -m benchmarks.readme``.

A marker is a line ``<!-- bench: NAME -->``, and its block ends with ``<!-- /bench -->``; NAME is that of a part of
``make bench``, or ``bars``, or ``peers``: what a reader asks first, of one part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from os.path import relpath
from pathlib import Path
from typing import Any

from . import bars
from .output import RESULTS

_ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(<!-- bench: ([\w-]+) -->\n).*?(<!-- /bench -->)", flags=re.DOTALL)


PAGES = (_ROOT / "README.md", _ROOT / "docs" / "benchmarks.md")

# What the first table compares, by contestant: what each can't do, in a few words.
_PEERS_OF = "step-25m-fp32-1x-2r"
_PEERS = {
    "ddp": "shards nothing",
    "zro": "keeps all gradients on every rank; whole parameters are dealt out, so ranks hold unequal shares",
    "fsdp2": "turns parameters into `DTensor`s, module by module; a layer that drops on one rank alone hangs it",
    "deepspeed-2": "its engine owns the training loop; dropped layers still decay",
    "colossalai-2": "no `no_sync` in stage 2; sums gradients in 16 bits; made for GPUs (that check is left out here)",
    "ours-1": "",
    "ours-2": "",
    "ours-2-drop": "",
}


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), RESULTS, page.parent), encoding="utf-8")


def filled(text: str, folder: Path, base: Path = _ROOT) -> str:
    """``text`` with each marked block showing the result of its name in ``folder``; one without keeps what it has.

    ``base`` is the folder of the page, from which links go.
    """

    def fill(found: re.Match[str]) -> str:
        start, name, end = found.groups()
        told = _block(name, folder, base)
        return found.group() if told is None else f"{start}{told}\n{end}"

    return _BLOCK.sub(fill, text)


def _block(name: str, folder: Path, base: Path) -> str | None:
    if name == "bars":
        return _bars(folder) if any(folder.glob("*.json")) else None
    if name == "peers":
        return _peers(folder / f"{_PEERS_OF}.json")
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    lines = [_told(content), "", *_TABLES[name.split("-")[0]](content)]
    if path.with_suffix(".png").exists():
        lines += ["", f"![{name}]({relpath(path.with_suffix('.png'), base)})"]
    return "\n".join(lines)


def _peers(path: Path) -> str | None:
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content["contestants"]
    cells = [_peer(rows[name], lacks) for name, lacks in _PEERS.items() if name in rows]
    titles = ["", "time", "memory after backward, bytes a parameter", "what it can't do"]
    return "\n".join([*_markdown(titles, cells), "", f"Measured by {_told(content)[:-1]}."])


def _peer(row: dict[str, Any], lacks: str) -> list[str]:
    held = sum(row["held after backward"].values()) / row["elements"]
    return [row["title"], f"{row['ratios']['whole']['median']:.2f}", f"{held:.1f}", lacks]


def _told(content: dict[str, Any]) -> str:
    """What made it, on what."""
    header = content["header"]
    run = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in content["run"].items())
    where = f"torch {header['torch']}, {header['cores']} cores of {header['cpu']}, {header['date'][:10]}"
    return f"`{header['command']}` ({run}; {where}):"


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _steps(content: dict[str, Any]) -> list[str]:
    titles = ["", "time", "least to most", "ms", "bytes per parameter after backward, after step", "MB sent, told"]
    return _markdown(titles, [_step(row) for row in content["contestants"].values()])


def _step(row: dict[str, Any]) -> list[str]:
    spread = row["ratios"]["whole"]
    held = [sum(row[when].values()) / row["elements"] for when in ("held after backward", "held after step")]
    sent = [row[name] for name in ("sent bytes a step", "sent by its own account")]
    return [
        row["title"],
        f"{spread['median']:.2f}",
        f"{spread['least']:.2f} to {spread['most']:.2f}",
        f"{1e3 * row['seconds']['whole']['median']:.0f}",
        ", ".join(f"{value:.1f}" for value in held),
        ", ".join("-" if value is None else f"{value / 1e6:.0f}" for value in sent),
    ]


def _peaks(content: dict[str, Any]) -> list[str]:
    rows = content["contestants"].values()
    cells = [
        [row["title"], f"{row['peak rss'] / 2**20:.0f}", f"{(row['peak rss'] - row['before']) / 2**20:.0f}"]
        for row in rows
    ]
    return _markdown(["", "peak RSS of a rank, MiB", "of which since its start"], cells)


def _overheads(content: dict[str, Any]) -> list[str]:
    cells = [
        [f"{row['world size']:,}", *(f"{row[name]:.2f}" for name in ("plain", "overhead", "packing", "the rest"))]
        for row in content["rows"]
    ]
    titles = ["ranks", "plain, microseconds per parameter and step", "beyond that", "of it packing", "the rest"]
    return _markdown(titles, cells)


def _scales(content: dict[str, Any]) -> list[str]:
    cells = [
        [
            row["title"],
            f"{row['world size']:,}",
            f"{row['forward and backward ms']:.0f}",
            f"{row['step ms']:.1f}",
            f"{row['bytes after backward'] / row['elements']:.2f}",
            f"{row['collectives']:.0f}",
        ]
        for row in content["rows"]
    ]
    titles = ["", "ranks", "forward and backward, ms", "step, ms", "bytes per parameter after backward", "collectives"]
    return _markdown(titles, cells)


def _collectives(content: dict[str, Any]) -> list[str]:
    cells = [
        [
            row["collective"],
            str(row["ranks"]),
            row["dtype"],
            f"{row['elements']:,}",
            *(f"{1e3 * seconds:.2f}" for seconds in row["seconds"].values()),
            *(f"{spread['median']:.2f}" for spread in row["ratios"].values()),
        ]
        for row in content["rows"]
    ]
    first = content["rows"][0]
    times, ratios = [f"{way}, ms" for way in first["seconds"]], [f"{way} / native" for way in first["ratios"]]
    return _markdown(["", "ranks", "dtype", "elements", *times, *ratios], cells)


def _cuda(content: dict[str, Any]) -> list[str]:
    names = ("step ms", "copying ms", "to copying", "launches", "synchronisations")
    cells = [
        [row["name"], str(row["world size"]), *(f"{row[name]:.2f}" if name in row else "-" for name in names)]
        for row in content["rows"]
    ]
    return _markdown(["", "ranks", *names], cells)


_TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "step": _steps,
    "peak": _peaks,
    "overhead": _overheads,
    "scale": _scales,
    "collectives": _collectives,
    "cuda": _cuda,
}


def _bars(folder: Path) -> str:
    return f"```text\n{bars.report(folder)}\n```"


if __name__ == "__main__":
    main()
