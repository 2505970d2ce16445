"""Random changes of the package are changes, and the same ones whenever they are drawn."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutants.drawn import FILES, draw, edits

PACKAGE = Path(__file__).parents[2] / "lowlevel_zero"
SOURCE = """
def f(self, x):
    if x < 1 and self.y:
        self.log.warning("%s", x == 2)
        self.count += 1
    self.g(flag=True)
    z = x is None
    self.z = "ä" if z else "b"
    raise ValueError(x > 3)
"""
CHANGED = {
    "if (x < 1 or self.y):",
    "if (self.y):",
    "if (x < 1):",
    "if (x <= 1) and self.y:",
    "if (not (x < 1 and self.y)):",
    "pass",  # in place of three statements
    "self.g(flag=(False))",
    "z = (x is not None)",
    'self.z = "ä" if (not (z)) else "b"',
}


def test_code_is_changed_and_neither_logs_nor_errors() -> None:
    changed = [each.applied(SOURCE) for each in edits(SOURCE)]
    lines = [set(text.splitlines()) - set(SOURCE.splitlines()) for text in changed]
    assert all(len(each) == 1 for each in lines)
    assert {line.strip() for each in lines for line in each} == CHANGED
    assert len(changed) == len(CHANGED) + 2


def test_every_change_of_the_package_is_code_and_another_one() -> None:
    for file in FILES:
        source = (PACKAGE / file).read_text()
        whole = ast.dump(ast.parse(source))
        for edit in edits(source)[::29]:
            assert ast.dump(ast.parse(edit.applied(source))) != whole


def test_a_seed_draws_the_same_changes() -> None:
    assert draw(PACKAGE, 5, seed=1) == draw(PACKAGE, 5, seed=1) != draw(PACKAGE, 5, seed=2)
