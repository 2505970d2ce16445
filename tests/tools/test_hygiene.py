"""The house's rules: who is private and who talks, tests that may be moved, and mistakes that find their place.

No test stands on another, and whatever a test replaces in the package must be there: a plain assignment to a name
that is gone would go on passing. What import-linter holds of imports is not told here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from lowlevel_zero import partition
from tests.mutants.__main__ import count
from tests.mutants.drawn import FILES, draw, edits
from tests.mutants.seeds import lost
from tests.mutants.simulated import MISTAKES
from tests.mutants.table import MUTANTS
from tests.support.patching import patch_rank
from tests.support.ranks import run_ranks, run_ranks_expecting

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PACKAGE = ROOT / "lowlevel_zero"

# What talks to other ranks or makes groups.
TALK = re.compile(
    r"\bdist\.(all_reduce|all_gather\w*|all_to_all\w*|reduce\w*|broadcast\w*|gather\w*|scatter\w*"
    r"|i?send|i?recv|(monitored_)?barrier|batch_isend_irecv|new_(sub)?groups?\w*|(init|destroy)_process_group)\("
)
# torch's own have these names too.
TORCHS = {"_backend", "_buffers", "_modules", "_parameters", "_state", "_version"}


def private_attributes(tree: ast.AST) -> set[str]:
    """Names of what a file's classes keep to themselves: attributes that they set on ``self``, slots and methods."""
    found = {part.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in _functions(node)}
    found |= {node.attr for node in _attributes(tree) if ast.unparse(node.value) == "self"}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def foreign_privates(sources: dict[str, str]) -> list[str]:
    """Uses of a private attribute of another file's class, a line each."""
    trees = {name: ast.parse(source) for name, source in sources.items()}
    own = {name: private_attributes(tree) for name, tree in trees.items()}
    known = set().union(*own.values()) - TORCHS
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in trees.items()
        for node in _attributes(tree)
        if node.attr in known - own[name]
    ]


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [part for part in node.body if isinstance(part, ast.FunctionDef)]


def _attributes(tree: ast.AST) -> list[ast.Attribute]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]


SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_no_file_uses_another_s_private_attributes() -> None:
    assert foreign_privates(SOURCES) == []
    told = {"a.py": "class A:\n    def __init__(self):\n        self._x = 1", "b.py": "print(a._x)"}
    assert foreign_privates(told) == ["b.py:1: a._x"]


def test_communication_alone_talks_to_other_ranks() -> None:
    talkers = {name.split("/")[0] for name, source in SOURCES.items() if TALK.search(source)}
    # A checkpoint is written by a thread, over a group of its own; testing starts ranks of its own, beside plain torch.
    assert talkers == {"communication", "checkpoint", "testing.py"}


# ---- tests, and mistakes that are made on purpose ----

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
    assert lost(MISTAKES, PACKAGE) == []


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


# Random changes of the package are changes, and the same ones whenever they are drawn.

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


# The source distribution has what a stranger needs to test, document and cite the package.

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's list of files")
def test_the_sdist_has_what_is_tracked_and_its_tests_are_found(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    made = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], cwd=copy, capture_output=True, text=True, check=True
    )
    with tarfile.open(tmp_path / made.stdout.split()[-1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("lowlevel_zero-*/")
    missing = {name for name in tracked if not (unpacked / name).exists() and not name.startswith(".git")}
    assert missing == set()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/calls/test_module_names.py"]
    ran = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
