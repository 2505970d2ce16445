"""Mistakes drawn at random: small changes of the package's code, which seeds of simulated ranks should show.

A change negates a condition, turns a comparison around, drops one operand of an ``and`` or ``or``, exchanges the two,
flips a constant, or leaves out a call or an assignment (DeMillo, Lipton and Sayward, 1978). Survivors have to be read:
some changes show in messages and times alone, or nowhere. The others ask for a call that programs should make, or a
result that the judge should compare.
"""

from __future__ import annotations

import ast
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.seeds import first_failing, made
from tests.mutants.simulated import Change, Mistake

# Where reductions, steps and agreements are decided on.
FILES = (
    *("optimizer.py", "reducer.py", "stepper.py"),
    *(f"bookkeeping/{name}.py" for name in ("bucket_store", "gather_store", "gradient_store", "gradient_sync")),
    *(f"bookkeeping/{name}.py" for name in ("sharded_parameter", "shown_gradients", "unused_parameters")),
    *("communication/agreement.py", "communication/shard_group.py", "gradients/calls.py"),
)
PATIENCE = 300.0  # seconds that the seeds of one mistake may take: in some, a rank goes round for ever
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_LEFT_ALONE = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)  # texts, and what can't be
_LOGS = {"debug", "info", "warning"}


class Edit(NamedTuple):
    """One change of a file's text.

    Attributes:
        node: the code that is replaced.
        new: what stands there instead.
    """

    node: ast.expr | ast.stmt
    new: str

    def applied(self, source: str) -> str:
        """Return the changed source."""
        lines = source.encode().splitlines(keepends=True)
        first, last = self.node.lineno - 1, (self.node.end_lineno or 0) - 1
        before, after = lines[first][: self.node.col_offset], lines[last][self.node.end_col_offset :]
        return b"".join([*lines[:first], before, self.new.encode(), after, *lines[last + 1 :]]).decode()

    def __str__(self) -> str:
        old = " ".join(ast.unparse(self.node).split())
        return f"«{old[:90]}» is «{self.new[:90]}»"


def edits(source: str) -> list[Edit]:
    """All changes of a file."""
    return list(_within(ast.parse(source)))


def _within(parent: ast.AST) -> Iterator[Edit]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, _LEFT_ALONE) or _is_log(node):
            continue
        if isinstance(node, ast.expr):
            yield from (Edit(node, f"({new})") for new in _other_values(node))
        elif isinstance(node, ast.stmt) and _can_go(node):
            yield Edit(node, "pass")
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield Edit(node.test, f"(not ({ast.unparse(node.test)}))")
        yield from _within(node)


def _other_values(node: ast.expr) -> Iterator[str]:
    """Yield what an expression may be instead."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.unparse(ast.Compare(node.left, [_TURNED[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BoolOp):
        yield ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
        for at in range(len(node.values)):
            left = [*node.values[:at], *node.values[at + 1 :]]
            yield ast.unparse(left[0] if len(left) == 1 else ast.BoolOp(node.op, left))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)


def _can_go(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):  # names that are read later would be missing
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(node, ast.AugAssign)


def _is_log(node: ast.AST) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOGS


def draw(package: Path, count: int, seed: int) -> list[Mistake]:
    """Draw so many changes of ``FILES``; the same seed draws the same from the same code."""
    sources = {file: (package / file).read_text() for file in FILES}
    every = [(file, edit) for file, source in sources.items() for edit in edits(source)]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    return [
        Mistake(f"{file}:{edit.node.lineno}: {edit}", (Change(file, sources[file], edit.applied(sources[file])),), None)
        for file, edit in chosen
    ]


def table(mistakes: Sequence[Mistake], copy: Path, search: int) -> int:
    """Print a row for each mistake, with what shows it; return how many survive so many seeds."""
    survivors = 0
    print("| change | shown by | seconds |\n|---|---|---|")
    for mistake in mistakes:
        began = time.monotonic()
        with made(mistake, copy / "lowlevel_zero"):
            shown = _shown(copy, search)
        survivors += not shown
        cells = mistake.breaks.replace("|", "\\|"), shown or "NOTHING", f"{time.monotonic() - began:.0f}"
        print(f"| {' | '.join(cells)} |", flush=True)
    return survivors


def _shown(copy: Path, search: int) -> str:
    """Return what shows the mistake that has been made: a seed, an error at the import, or a run without an end."""
    try:
        seed = first_failing(copy, range(search), PATIENCE)
    except subprocess.CalledProcessError:
        return "an error"
    except subprocess.TimeoutExpired:
        return f"no end in {PATIENCE:.0f} s"
    return "" if seed is None else f"seed {seed}"
