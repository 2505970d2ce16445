"""Tests that may be moved, and that fail when what they test has moved.

No test stands on another, and whatever a test replaces in the package must be there: a plain assignment to a name
that is gone would go on passing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowlevel_zero import partition
from tests.mutants.__main__ import count
from tests.mutants.seeds import lost
from tests.mutants.simulated import MISTAKES
from tests.mutants.table import MUTANTS
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks, run_ranks_expecting

TESTS = Path(__file__).parents[1]


# An import of one test by another, and a replacement of what may not be there.
LEANS = re.compile(r"^\s*(?:from|import) .*\btest_\w+|setattr\(.*raising=|^\s*setattr\(\w+, \"_", re.MULTILINE)


def test_no_test_stands_on_another_and_what_is_replaced_must_be_there() -> None:
    files = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    assert len(files) > 100
    found = {(path.stem, each) for path in files for each in LEANS.findall(path.read_text())}
    assert {(stem, each) for stem, each in found if stem not in each} == set()
    assert len(LEANS.findall("from tests.test_b import f\nmonkeypatch.setattr(x, 'y', 1, raising=False)")) == 2


def test_every_mistake_that_is_made_on_purpose_finds_its_place() -> None:
    """``make mutants`` takes an hour, and is seldom run: code that moves must take its mistake along."""
    assert [mutant.old for mutant in MUTANTS if count(mutant) != 1] == []
    assert lost(MISTAKES, TESTS.parent / "lowlevel_zero") == []


def test_a_forked_rank_replaces_what_is_there_and_nothing_else() -> None:
    def there(rank: int, world_size: int) -> int:
        patch_rank(partition, "EvenSplit", 3)
        return partition.EvenSplit

    def gone(rank: int, world_size: int) -> None:
        patch_rank(partition, "no_such_name", 3)

    assert run_ranks(there, 1, init=False) == [3]
    (error,) = run_ranks_expecting(gone, 1, init=False)
    assert error.type == "AttributeError"
    with pytest.raises(AssertionError, match="expected a forked rank"):
        patch_rank(partition, "EvenSplit", 3)
