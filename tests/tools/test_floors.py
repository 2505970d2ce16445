"""The house's rules beside those of imports, which import-linter holds: privacy, and who talks to other ranks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lowlevel_zero"
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
