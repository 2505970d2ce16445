"""Tests that may be moved, and that fail when what they test has moved.

No test stands on another, conftest stands on nothing of the package, and whatever a test replaces in the package must
be there: a plain assignment to a name that is gone would go on passing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
REMEDY = "use monkeypatch.setattr, or tests.support.patching in a forked rank"


def faults(source: str, name: str = "test_a.py") -> list[str]:
    """What is wrong with a file of the tests, by line."""
    tree = ast.parse(source)
    found = [*_imports(tree, name), *_assignments(tree), *_patches(tree)]
    return [f"{name}:{line}: {what}" for line, what in sorted(found)]


def _imports(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    at_collection = set(_outside_functions(tree))
    for node in ast.walk(tree):
        for module in _imported(node):
            if any(part.startswith("test_") for part in module.split(".")):
                yield node.lineno, f"imports {module}: what tests share belongs into tests/support"
            elif name == "conftest.py" and node in at_collection and module.split(".")[0] in ("lowlevel_zero", "tests"):
                yield node.lineno, f"imports {module} at collection: import it in the fixture"


def _imported(node: ast.AST) -> list[str]:
    """Modules, and what is taken from them, which may be modules too."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = ("tests." if node.level else "") + (node.module or "")
        return [f"{module}.{alias.name}" for alias in node.names]
    return []


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _outside_functions(child)


def _assignments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    package = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias, module in zip(node.names, _imported(node), strict=True)
        if module.split(".")[0] == "lowlevel_zero"
    }
    for node in ast.walk(tree):
        for target in _targets(node):
            root, *names = _chain(target)
            own = {"self", "cls"} & {root}
            if root in package or any(name.startswith("_") for name in names[len(own) :]):
                yield target.lineno, f"assigns {ast.unparse(target)}: {REMEDY}"


def _targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that a statement binds or deletes."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
        yield node


def _chain(target: ast.expr) -> list[str]:
    """The names of ``a.b[0].c().d``, the first one first; empty for what isn't a name."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Attribute):
        return [*_chain(target.value), target.attr]
    if isinstance(target, ast.Subscript):
        return _chain(target.value)
    return _chain(target.func) if isinstance(target, ast.Call) else [""]


def _patches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called, name = _chain(node.func), node.args[1] if len(node.args) > 1 else None
            if called == ["setattr"] and isinstance(name, ast.Constant) and str(name.value).startswith("_"):
                yield node.lineno, f"sets {name.value}: {REMEDY}"
            elif called[-1] in ("setattr", "delattr") and any(keyword.arg == "raising" for keyword in node.keywords):
                yield node.lineno, "raising=...: what is replaced must be there"


def test_the_tests_are_clean() -> None:
    files = sorted(TESTS.rglob("*.py"))
    assert [fault for path in files for fault in faults(path.read_text(encoding="utf-8"), path.name)] == []


CLEAN = [
    "from tests.support.ranks import run_ranks",
    "class A:\n    def f(self):\n        self._x = self.y = 1\n        self._x.y = 1",
    "import torch\ntorch.backends.cudnn.allow_tf32 = False\nmodel.weight.data = x\nx.grad = None",
    "from lowlevel_zero import rounds\nmonkeypatch.setattr(rounds, '_x', 1)\nname = rounds._x",
    "monkeypatch.delenv('RANK', raising=False)",
    "setattr(model, 'weight', x)",
]
UNCLEAN = {
    "from tests.test_b import f": "imports tests.test_b.f",
    "from tests import test_b": "imports tests.test_b",
    "from .test_b import f": "imports tests.test_b.f",
    "def f():\n    import tests.test_b as b": "2: imports tests.test_b",
    "optimizer._families[0].reducer.on = 1": "assigns optimizer._families[0].reducer.on",
    "f(x)._y()[0].z = 1": "assigns f(x)._y()[0].z",
    "a, x._b = 1, 2": "assigns x._b",
    "x._b &= 2": "assigns x._b",
    "del x._b": "assigns x._b",
    "class A:\n    def f(self):\n        self.x._y = 1": "3: assigns self.x._y",
    "from lowlevel_zero.communication import grid as l\nl.f = 1": "2: assigns l.f",
    "import lowlevel_zero.rounds\nlowlevel_zero.rounds.f = 1": "2: assigns lowlevel_zero.rounds.f",
    "from lowlevel_zero.optim import Lamb\nLamb.step = 1": "2: assigns Lamb.step",
    "setattr(x, '_y', 1)": "sets _y",
    "monkeypatch.setattr(x, 'y', 1, raising=False)": "raising=",
}


def test_the_rules_leave_others_alone() -> None:
    for source in CLEAN:
        assert faults(source) == []
    assert faults("import pytest\ndef f():\n    from lowlevel_zero import rounds", "conftest.py") == []


def test_a_broken_rule_is_reported() -> None:
    for source, expected in UNCLEAN.items():
        (found,) = faults(source)
        assert expected in found
    for module in ("lowlevel_zero.rounds", "lowlevel_zero", "tests.support.internals"):
        for source in (f"from {module} import x", f"if True:\n    import {module}"):
            (found,) = faults(source, "conftest.py")
            assert "at collection" in found


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
