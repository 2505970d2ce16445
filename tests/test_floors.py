"""The house: imports only fall, the core knows no room, one folder talks to the other ranks, one knows ColossalAI."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lowlevel_zero"
# A room imports the core (the files at the top, bookkeeping/ and communication/) and rooms before it in this order.
ROOMS = (
    "optim",
    "state",
    "diagnostics",
    "planning",
    "deepspeed",
    "accessors",
    "checkpoint",
    "trainers",
    "planning.commands",
    "plugin",
    "__init__",
    "__main__",
)
# The one place of the core that may name rooms.
DOOR = "construction"
# Files whose rooms they still name themselves: none shall be left.
STILL: tuple[str, ...] = ()
# Private attributes of torch's modules, which have namesakes here.
TORCHS = {"_parameters", "_buffers"}
# What talks to other ranks or makes groups: communication/ alone may use it of torch.distributed.
TALK = re.compile(
    r"_?(all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|gather|scatter|i?send|i?recv)\w*"
    r"|reduce|batch_isend_irecv|(monitored_)?barrier|_coalescing_manager"
    r"|(init|destroy)_process_group|init_device_mesh|new_(sub)?group\w*|_new_process_group_helper|(split|shrink)_group"
)


def faults(package: Path) -> list[str]:
    """What in the sources under ``package`` breaks a rule, one line each."""
    paths = {".".join(path.relative_to(package).with_suffix("").parts): path for path in package.rglob("*.py")}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in sorted(paths.items())}
    falls: dict[str, set[str]] = {name: set() for name in trees}
    found = []
    for name, tree in trees.items():
        for line, dotted in _imports(tree, name):
            target = _file_of(dotted, trees)
            if dotted.split(".")[0] == "colossalai" and _room(name) != "plugin":
                found.append(f"{name}:{line}: imports {dotted}, which plugin/ alone may")
            if (
                target is None
                or target == name
                or (name == DOOR and _room(target))
                or (_level(target) > _level(name) and name in STILL)
            ):
                continue
            if _level(target) > _level(name):
                found.append(f"{name}:{line}: imports up: {target}")
            else:
                falls[name].add(target)
        if not name.startswith("communication."):
            found += [f"{name}:{line}: {what} belongs into communication/" for line, what in _talk(tree, name)]
    return found + [f"in a circle: {' -> '.join(circle)}" for circle in _circles(falls)]


def strange_privates(package: Path) -> list[str]:
    """Uses of another object's private attribute that no class of the same file has, one line each."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    of_file = {path: set(_private_names(tree)) for path, tree in trees.items()}
    known = set().union(*of_file.values()) - TORCHS
    return [
        f"{path.relative_to(package)}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in known - of_file[path] and not _is_own(node)
    ]


def _private_names(tree: ast.Module) -> Iterator[str]:
    """Private attributes that a file's classes assign or define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_own(node) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if node.attr[0] == "_" else []
        elif isinstance(node, ast.ClassDef):
            yield from (
                each.name for each in node.body if isinstance(each, ast.FunctionDef) and re.match("_[a-z]", each.name)
            )


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _room(name: str) -> str:
    """The room of a file; empty: it is the core's."""
    return next((room for room in reversed(ROOMS) if name == room or name.startswith(f"{room}.")), "")


def _level(name: str) -> int:
    return ROOMS.index(_room(name)) if _room(name) else -1


def _file_of(dotted: str, files: dict[str, ast.Module]) -> str | None:
    """The package's file that ``dotted`` names or lies in; None: it isn't the package's."""
    parts = dotted.split(".")
    names = (".".join(parts[1:stop]) for stop in range(len(parts), 0, -1))
    found = (each for name in names for each in (name, f"{name}.__init__".lstrip(".")) if each in files)
    return next(found, None) if parts[0] == PACKAGE else None


def _imports(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that is imported, wherever in the file."""
    folder = [PACKAGE, *name.split(".")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = [*(folder[: -node.level] if node.level else []), *filter(None, [node.module])]
            yield from ((node.lineno, ".".join([*origin, alias.name])) for alias in node.names)


def _talk(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    """Uses of what talks to other ranks, by import or as an attribute of torch.distributed."""
    for line, dotted in _imports(tree, name):
        if re.fullmatch(rf"torch\.distributed\.({TALK.pattern})", dotted):
            yield line, dotted
    for node in ast.walk(tree):
        of_torch = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "torch.distributed")
        if of_torch and TALK.fullmatch(node.attr):
            yield node.lineno, ast.unparse(node)


def _circles(falls: dict[str, set[str]]) -> Iterator[list[str]]:
    """Files that import each other: what is left when those that import nothing that is left have been taken away."""
    left = {name: set(targets) for name, targets in falls.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    if left:
        walk = [next(iter(left))]
        while walk[-1] not in walk[:-1]:
            walk.append(next(iter(left[walk[-1]] & left.keys())))
        yield walk[walk.index(walk[-1]) :]


def test_the_house_stands() -> None:
    package = Path(__file__).parents[1] / PACKAGE
    assert (package / "optimizer.py").exists(), "the test looks in the wrong place"
    assert faults(package) == []
    assert all((package / f"{name.replace('.', '/')}.py").exists() for name in STILL)


def test_private_attributes_are_their_own_files() -> None:
    assert strange_privates(Path(__file__).parents[1] / PACKAGE) == []


def test_a_strange_private_attribute_is_reported(tmp_path: Path) -> None:
    house = _house(tmp_path, {"a": "class A:\n    def __init__(self):\n        self._x = 1", "b": "print(a._x)"})
    assert strange_privates(house) == ["b.py:1: a._x"]


LEGAL = {
    "partition": "import math",
    "communication/collectives": "import torch.distributed as dist\nfrom ..partition import x\ndist.all_reduce(None)",
    "bookkeeping/storages": "from ..communication.collectives import x",
    "construction": "def rooms():\n    from .state import whole",
    "optimizer": "import torch.distributed as dist\nfrom . import construction\ndist.get_rank()",
    "state/__init__": "",
    "state/whole": "from ..optimizer import x",
    "checkpoint/saving": "import torch.distributed.checkpoint as dcp\nfrom ..state.whole import x",
    "plugin/boosted": "import colossalai\nfrom ..checkpoint import saving",
    "__init__": "from .optimizer import x",
}
ILLEGAL = [
    ("reducer", "from .state import whole", "reducer:1: imports up: state.whole"),
    ("reducer", "def f():\n    import lowlevel_zero.state", "reducer:2: imports up: state.__init__"),
    ("reducer", "from . import x", "reducer:1: imports up: __init__"),
    ("bookkeeping/storages", "from ..plugin.boosted import x", "bookkeeping.storages:1: imports up: plugin.boosted"),
    ("state/whole", "from lowlevel_zero.checkpoint import saving", "state.whole:1: imports up: checkpoint.saving"),
    ("partition", "from .bookkeeping.storages import x", "in a circle: "),
    ("optimizer", "import colossalai.booster", "optimizer:1: imports colossalai.booster"),
    ("state/whole", "import torch.distributed as dist\ndist.all_reduce(x)", "state.whole:2: dist.all_reduce belongs"),
    ("state/whole", "import torch\ntorch.distributed.barrier()", "state.whole:2: torch.distributed.barrier belongs"),
    ("state/whole", "from torch.distributed import send", "state.whole:1: torch.distributed.send belongs"),
]


def _house(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / PACKAGE / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / PACKAGE


def test_a_legal_house_passes(tmp_path: Path) -> None:
    assert faults(_house(tmp_path, LEGAL)) == []


@pytest.mark.parametrize(("file", "source", "expected"), ILLEGAL)
def test_a_broken_rule_is_reported(tmp_path: Path, file: str, source: str, expected: str) -> None:
    (fault,) = faults(_house(tmp_path, LEGAL | {file: source}))
    assert fault.startswith(expected)
