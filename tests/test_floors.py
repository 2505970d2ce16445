"""The house: imports only fall, one folder talks to the other ranks, one package knows ColossalAI."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "lowlevel_zero"

# From the ground up: a file imports files of rows above its own in this table, never one of its own row (but
# the files of a package listed as "name.*" share one place, and import each other as they like).
HOUSE = (
    ("floor 0, under the others", ("optim.trial", "optim.lamb", "communication.__init__")),
    (
        "floor 0",
        (
            "partition",
            "alignment",
            "loss_scaler",
            "options",
            "wrapping",
            "version",
            "streams",
            "deepspeed.config",
            "optim.__init__",
            "optim.elementwise",
            "optim.newton_schulz",
            "optim.work_shares",
            "planning.state_sizes",
            "planning.text",
            "planning.pictures",
            "module_names",
        ),
    ),
    ("floor 0, for those who watch", ("communication.progress", "communication.process_group", "later_read")),
    ("floor 0, for those who are left", ("communication.lost_ranks",)),
    ("floor 1, without wires", ("communication.mail", "communication.byte_messages", "communication.groups")),
    ("floor 1, under the others", ("communication.transport", "communication.arena")),
    ("floor 1, for what comes after", ("communication.sequel",)),
    (
        "floor 1, without the backend's collectives",
        (
            "communication.exchange",
            "communication.staging",
            "communication.levels",
            "communication.compression",
        ),
    ),
    ("floor 1, without messages", ("communication.shared_memory",)),
    (
        "floor 1, beside the collectives",
        (
            "communication.watchdog",
            "communication.roll_call",
            "communication.hosts",
        ),
    ),
    ("floor 1", ("communication.collectives",)),
    ("floor 1, over the collectives", ("flat_shards", "global_names", "communication.two_levels")),
    ("floor 1, distrustful", ("communication.checked_group",)),
    ("floor 2, at the bottom", ("bookkeeping.offload", "bookkeeping.storages")),
    ("floor 2, below the records", ("bookkeeping.gradient_sum", "bookkeeping.awaited")),
    (
        "floor 2, under the stores",
        ("bookkeeping.parameter_store", "bookkeeping.bucket_plan", "bookkeeping.wire"),
    ),
    (
        "floor 2, the stores",
        (
            "bookkeeping.learnt_plan",
            "bookkeeping.gradient_sync",
            "bookkeeping.gradient_store",
            "bookkeeping.gather_store",
        ),
    ),
    ("floor 2, over the stores", ("bookkeeping.bucket_store",)),
    ("floor 2, its public names", ("bookkeeping.__init__",)),
    ("floor 3, at the bottom", ("optim.muon", "calls", "guards", "planning.layout", "construction")),
    ("floor 3, under the others", ("unused_parameters", "grad_norm", "optim.whole_steps")),
    ("floor 3", ("state", "reducer")),
    ("floor 3, over the reducer", ("families", "assignment")),
    ("floor 3, thin over the others", ("sharding", "stepping", "sharded_state", "bad_numbers", "verification")),
    ("floor 3, over stepping", ("planning.memory",)),
    ("floor 3, its public names", ("planning.__init__",)),
    ("floor 3, thinner still", ("state_methods", "group_methods", "gradient_methods", "caller_names")),
    ("floor 4", ("optimizer",)),
    ("floor 5, under the others", ("owners",)),
    ("floor 5", ("checkpoint.*", "accessors")),
    ("floor 5, its public names", ("deepspeed.__init__",)),
    ("floor 6, the plugin", ("plugin.*",)),
    ("the public names", ("__init__",)),
    (
        "floor 6, the command line's own",
        ("planning.commands.__init__", "planning.commands.command", "planning.commands.plan_picture"),
    ),
    ("floor 6, its commands", ("planning.commands.plan", "planning.commands.checkpoints")),
    ("floor 6, the command line", ("__main__",)),
)
ROWS = {file: row for row, (_, files) in enumerate(HOUSE) for file in files}

# Who may use which of torch.distributed's functions that talk to other ranks or make groups; None: all.
TALKERS: dict[str, frozenset[str] | None] = {
    "communication.collectives": None,
    "communication.transport": frozenset(
        {"all_reduce", "reduce_scatter_single", "all_gather_single", "all_to_all_single"}
    ),
    "communication.groups": frozenset({"_new_process_group_helper"}),
}
TALK = re.compile(
    r"_?(all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|gather|scatter|i?send|i?recv)\w*"
    r"|reduce|batch_isend_irecv|(monitored_)?barrier|_coalescing_manager"
    r"|(init|destroy)_process_group|init_device_mesh|new_(sub)?group\w*|_new_process_group_helper|(split|shrink)_group"
)
CHECKPOINT_IO = "torch.distributed.checkpoint."

COLOSSALAI_PACKAGE = "plugin.*"


class Source(NamedTuple):
    """One file of the package."""

    name: str  # "partition", "bookkeeping.wire", "bookkeeping.__init__"
    tree: ast.Module

    @property
    def place(self) -> str:
        """Its entry in the tables: the file's, or its whole package's."""
        family = self.name.split(".")[0] + ".*"
        return family if family in ROWS else self.name

    @property
    def folder(self) -> list[str]:
        return [PACKAGE, *self.name.split(".")[:-1]]


def violations(package: Path) -> list[str]:
    """What in the sources under ``package`` breaks the house's rules, one line each."""
    sources = [_read(path, package) for path in sorted(package.rglob("*.py"))]
    places = {source.name: source.place for source in sources}
    found = [line for source in sources for line in _unknown(source)]
    known = [source for source in sources if source.place in ROWS]
    found += [line for source in known for line in _climbs(source, places)]
    found += [line for source in known for line in _talks(source)]
    return found + [line for source in known for line in _colossalai(source)]


def _read(path: Path, package: Path) -> Source:
    name = ".".join(path.relative_to(package).with_suffix("").parts)
    return Source(name, ast.parse(path.read_text(encoding="utf-8"), str(path)))


def _unknown(source: Source) -> Iterator[str]:
    if source.place not in ROWS:
        yield f"{source.name}: on no floor: add it to HOUSE in tests/test_floors.py"


def _climbs(source: Source, places: dict[str, str]) -> Iterator[str]:
    here = ROWS[source.place]
    for line, imported in _imports(source):
        target = _file_of(imported, places)
        if target is None or places[target] == source.place or places[target] not in ROWS:
            continue
        there = ROWS[places[target]]
        if there >= here:
            way = "beside" if there == here else "up"
            yield f"{source.name}:{line}: imports {way}: {target} ({HOUSE[there][0]}) from {HOUSE[here][0]}"


def _talks(source: Source) -> Iterator[str]:
    allowed = TALKERS.get(source.place, frozenset())
    for line, used in _names_used(source):
        function = used.rpartition(".")[2]
        if not used.startswith("torch.distributed.") or used.startswith(CHECKPOINT_IO):
            continue
        if TALK.fullmatch(function) and allowed is not None and function not in allowed:
            yield f"{source.name}:{line}: {used} belongs into communication/"


def _colossalai(source: Source) -> Iterator[str]:
    for line, imported in _imports(source):
        if imported.split(".")[0] == "colossalai" and source.place != COLOSSALAI_PACKAGE:
            yield f"{source.name}:{line}: imports {imported}, which {COLOSSALAI_PACKAGE} alone may"


def _file_of(dotted: str, places: dict[str, str]) -> str | None:
    """The package's file that ``dotted`` names or lies in, None for what isn't the package's."""
    first, *parts = dotted.split(".")
    if first != PACKAGE:
        return None
    for length in range(len(parts), -1, -1):
        for name in (".".join(parts[:length]), ".".join([*parts[:length], "__init__"])):
            if name in places:
                return name
    return None


def _imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that is imported, wherever in the file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute("." * node.level + (node.module or ""), source)
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and (name := _imported_by_call(node)):
            yield node.lineno, _absolute(name, source)


def _imported_by_call(call: ast.Call) -> str:
    """The literal name in ``importlib.import_module("name")``, else empty."""
    is_import = _dotted(call.func).rpartition(".")[2] in ("import_module", "__import__")
    if is_import and call.args and isinstance(call.args[0], ast.Constant):
        return str(call.args[0].value)
    return ""


def _absolute(name: str, source: Source) -> str:
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    folder = source.folder[: len(source.folder) - level + 1]
    return ".".join([*folder, name[level:]]).rstrip(".")


def _names_used(source: Source) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of what is imported by name or reached through an imported module."""
    origin = dict(_bindings(source))
    yield from _imports(source)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = _dotted(node).partition(".")
            if root in origin and rest:
                yield node.lineno, f"{origin[root]}.{rest}"


def _bindings(source: Source) -> Iterator[tuple[str, str]]:
    """The file's own name of each import, and the full one."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute("." * node.level + (node.module or ""), source)
            yield from ((alias.asname or alias.name, f"{origin}.{alias.name}") for alias in node.names)


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` as text; empty where the expression is not a plain chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


# The tests.


def test_the_house_stands() -> None:
    package = Path(__file__).parents[1] / PACKAGE
    assert (package / "partition.py").exists(), "the test looks in the wrong place"
    assert violations(package) == []


def test_no_file_has_two_places() -> None:
    assert len(ROWS) == sum(len(files) for _, files in HOUSE)


def test_every_place_is_a_file_s() -> None:
    package = Path(__file__).parents[1] / PACKAGE
    places = {_read(path, package).place for path in package.rglob("*.py")}
    assert places == set(ROWS)


def _house(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / PACKAGE / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / PACKAGE


DIST = "import torch.distributed as dist\n"
LEGAL = {
    "partition": "import math",
    "communication/collectives": DIST + "from ..partition import EvenSplit\ndist.all_reduce(None)",
    "bookkeeping/wire": "from ..communication.collectives import ShardGroup",
    "bookkeeping/gather_store": "from .wire import pack\nfrom . import wire",
    "optimizer": DIST + "from .bookkeeping import gather_store\ndist.get_rank()",
    "checkpoint": "import torch.distributed.checkpoint as dcp\ndcp.utils._broadcast_plan()",
    "plugin/boosted": "import colossalai\nfrom ..optimizer import LowLevelZeroOptimizer",
    "__init__": "from .optimizer import LowLevelZeroOptimizer",
    "planning/commands/plan": "import math",
    "__main__": DIST + "from lowlevel_zero import x\nfrom .planning.commands.plan import PLAN\ndist.get_rank()",
}
CLIMBS = [
    ("partition", "from .optimizer import x", "partition:1: imports up: optimizer (floor 4) from floor 0"),
    ("partition", "from . import optimizer", "partition:1: imports up: optimizer"),
    ("partition", "import lowlevel_zero.optimizer as o", "partition:1: imports up: optimizer"),
    ("partition", "from lowlevel_zero import optimizer", "partition:1: imports up: optimizer"),
    ("partition", "from . import LowLevelZeroOptimizer", "partition:1: imports up: __init__"),
    ("partition", "def f():\n    from .optimizer import x", "partition:2: imports up: optimizer"),
    ("partition", "if TYPE_CHECKING:\n    from .optimizer import x", "partition:2: imports up: optimizer"),
    ("partition", "importlib.import_module('.optimizer')", "partition:1: imports up: optimizer"),
    ("options", "from .partition import EvenSplit", "options:1: imports beside: partition (floor 0)"),
    ("bookkeeping/wire", "from .gather_store import x", "wire:1: imports up: bookkeeping.gather_store"),
    ("bookkeeping/wire", "from ..optimizer import x", "wire:1: imports up: optimizer"),
    ("bookkeeping/gradient_store", "from .gather_store import x", "imports beside: bookkeeping.gather_store"),
    ("optimizer", "from .planning.commands.plan import PLAN", "optimizer:1: imports up: planning.commands.plan"),
]
TALKS = [
    ("state", DIST + "dist.all_reduce(x)", "state:2: torch.distributed.all_reduce belongs into communication"),
    ("state", DIST + "f = dist.all_gather_object", "state:2: torch.distributed.all_gather_object"),
    ("state", "import torch\ntorch.distributed.barrier()", "state:2: torch.distributed.barrier"),
    ("state", "from torch import distributed as d\nd.new_group()", "state:2: torch.distributed.new_group"),
    ("state", "from torch.distributed import send", "state:1: torch.distributed.send"),
    (
        "planning/commands/plan",
        DIST + "dist.broadcast_object_list(x)",
        "planning.commands.plan:2: torch.distributed.broadcast_",
    ),
]
STRANGERS = [
    ("gossip", "", "gossip: on no floor: add it to HOUSE"),
    ("optimizer", "import colossalai.booster", "optimizer:1: imports colossalai.booster, which plugin.*"),
    ("optimizer", "def f():\n    from colossalai import x", "optimizer:2: imports colossalai.x"),
]


def test_a_legal_house_passes(tmp_path: Path) -> None:
    assert violations(_house(tmp_path, LEGAL)) == []


@pytest.mark.parametrize(("file", "source", "expected"), CLIMBS + TALKS + STRANGERS)
def test_a_broken_rule_is_reported(tmp_path: Path, file: str, source: str, expected: str) -> None:
    found = violations(_house(tmp_path, LEGAL | {file: source}))
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize("function", ["all_reduce", "reduce", "reduce_scatter_tensor", "isend", "new_group"])
def test_collectives_are_known_by_name(function: str) -> None:
    assert TALK.fullmatch(function)


@pytest.mark.parametrize("function", ["get_rank", "is_initialized", "ReduceOp", "ProcessGroup", "Work"])
def test_what_asks_nobody_is_free(function: str) -> None:
    assert not TALK.fullmatch(function)
