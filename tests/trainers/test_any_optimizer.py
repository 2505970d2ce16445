"""Many optimizers train over two ranks as in one process, as the table of a page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.any_optimizer import HEAD, cases, line, row

PAGE = Path(__file__).parents[2] / "docs" / "any-optimizer.md"


@pytest.mark.parametrize("case", list(cases()), ids=[name for name, *_ in cases()])
def test_the_table_of_the_page_is_what_comes_out(case: tuple[Any, ...]) -> None:
    text = PAGE.read_text()
    assert line(HEAD) in text
    assert line(row(*case)) in text


def test_the_table_has_nothing_else() -> None:
    rows = [each for each in PAGE.read_text().splitlines() if each.startswith("| `")]
    assert len(rows) == len(list(cases()))
