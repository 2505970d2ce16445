"""The tables of ``docs/options.md``, made from the options themselves; run as a module, this writes the page anew."""

from __future__ import annotations

import re
from pathlib import Path

from lowlevel_zero.options import GROUPS, ZeroOptions, abouts

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_TABLE = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- /options -->)", re.DOTALL)


def written(page: str) -> str:
    """Return the page with its tables made anew."""
    return _TABLE.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", page)


def table(name: str) -> str:
    """Return the table of a group of options, or of those outside of groups."""
    group = GROUPS.get(name, ZeroOptions)
    lines = [f"| {'keyword' if group is ZeroOptions else f'`{group.__name__}` | keyword'} | default | meaning |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for each, about in abouts(group).items():
        keyword = "" if group is ZeroOptions else f" {f'`{about.keyword}`' if about.keyword else ''} |"
        lines.append(f"| `{each}` |{keyword} `{getattr(group, each)!r}` | {_text(about.text)} |")
    return "\n".join([*lines, ""])


def _text(text: str) -> str:
    text = re.sub(r"2\*\*(\d+)", lambda power: "2" + power[1].translate(_RAISED), text)
    return text.replace("``", "`").rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
