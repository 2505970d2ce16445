"""Put the newest results into README.md and docs/benchmarks.md, between markers: ``python -m benchmarks.readme``.

A marker is a line ``<!-- bench: NAME -->``, and its block ends with ``<!-- /bench -->``; NAME is that of a part of
``make bench``, or ``bars``: how many hold, or ``peers``: what a reader asks first, of one part.
"""

from __future__ import annotations

import json
import re
from os.path import relpath
from pathlib import Path
from typing import Any

from . import bars
from .output import RESULTS
from .tables import TABLES, Table

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
    "ours-1-messages": "",
    "ours-2-messages": "",
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
    lines = [_told(content), "", *TABLES[name.split("-")[0]](content).markdown()]
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
    return "\n".join([*Table(titles, cells).markdown(), "", f"Measured by {_told(content)[:-1]}."])


def _peer(row: dict[str, Any], lacks: str) -> list[str]:
    held = sum(row["held after backward"].values()) / row["elements"]
    return [row["title"], f"{row['ratios']['whole']['median']:.2f}", f"{held:.1f}", lacks]


def _told(content: dict[str, Any]) -> str:
    """What made it, on what."""
    header = content["header"]
    run = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in content["run"].items())
    where = f"torch {header['torch']}, {header['cores']} cores of {header['cpu']}, {header['date'][:10]}"
    return f"`{header['command']}` ({run}; {where}):"


def _bars(folder: Path) -> str:
    return f"{bars.report(folder).splitlines()[-1]}."


if __name__ == "__main__":
    main()
