"""The reference renders what is public, and nothing else."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import lowlevel_zero

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = DOCS / "reference"


def rendered() -> list[ModuleType]:
    pages = [page.read_text() for page in REFERENCE.glob("*.rst")]
    names = [
        name for page in pages for name in re.findall(r"^\.\. automodule:: (\S+)\n   :members:$", page, re.MULTILINE)
    ]
    return [*map(importlib.import_module, names)]


def public(module: ModuleType) -> dict[int, str]:
    """Return the classes and functions that ``:members:`` renders of a module, by identity."""
    own = [name for name, it in vars(module).items() if not name.startswith("_") and it_is_of(it, module)]
    found = {name: getattr(module, name) for name in getattr(module, "__all__", own)}
    return {id(it): name for name, it in found.items() if inspect.isclass(it) or inspect.isfunction(it)}


def it_is_of(it: object, module: ModuleType) -> bool:
    return getattr(it, "__module__", None) == module.__name__


def test_what_a_module_exports_is_rendered() -> None:
    names = [each.name for each in pkgutil.walk_packages(lowlevel_zero.__path__, "lowlevel_zero.")]
    exporting = [lowlevel_zero, *(m for m in map(importlib.import_module, names) if hasattr(m, "__all__"))]
    shown = {key for module in rendered() for key in public(module)}
    missing = {f"{m.__name__}.{name}" for m in exporting for key, name in public(m).items() if key not in shown}
    assert missing == set()


def test_what_is_rendered_has_a_docstring() -> None:
    for module in rendered():
        for name in public(module).values():
            assert inspect.getdoc(getattr(module, name)), f"{module.__name__}.{name}"


def test_messages_are_collected_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    source = """
LATE = "expected one call, got a late one: call it once ({})"
def f(name, n):
    raise RuntimeError(f"{name}: " + LATE.format(n))
    _log.warning("a rank is late")
"""
    messages = importlib.import_module("messages")
    late, rank = messages.messages_of(ast.parse(source))
    assert late.parts == ("{name}: expected one call, got a late one", "call it once ({...})")
    assert rank == ("warning", "a rank is late")
    page = messages.page()
    assert "## A checkpoint isn't saved or loaded" in page
    assert "call optimizer.step(), not optimizer.optim.step()" in page
    rows = re.findall(r"^\| (.*) \| (.*) \| (\w+) \|$", page, flags=re.MULTILINE)
    assert len(rows) > 250
    assert [what for what, remedy, kind in rows if kind.endswith("Error") and not remedy] == []


def test_pictures_are_those_that_the_code_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    pictures = importlib.import_module("pictures")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main()
    for kept in (DOCS / "pictures").glob("*.svg"):
        drawn = (tmp_path / kept.name).read_text()
        # matplotlib's releases differ in details of layout; texts and numbers of shapes are the picture's own
        assert re.findall(r">([^<>]+)</text>", drawn) == re.findall(r">([^<>]+)</text>", kept.read_text()), kept.name
        assert drawn.count("<path") == kept.read_text().count("<path"), kept.name
