"""Collect the errors and warnings of the package from its source, as a page of the reference."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "lowlevel_zero"
HEAD = """# Errors and warnings

Every error and warning of the package, collected from its source. An error tells what was expected, what it got, and
what to do. Words in braces stand for what your run has there: names of parameters, ranks, numbers.
"""
ROOMS = {
    "": "The optimizer",
    "bookkeeping": "The optimizer",
    "checkpoint": "Checkpoints",
    "communication": "Ranks and communication",
    "deepspeed": "DeepSpeed's names",
    "diagnostics": "Diagnostics",
    "experts": "Experts",
    "gradients": "Gradients between backward and step",
    "layout": "Planning and layout",
    "offload": "Offload",
    "optim": "Which optimizers",
    "planning": "Planning and layout",
    "plugin": "The Booster plugin",
    "state": "States",
    "trainers": "Trainers",
}


class Message(NamedTuple):
    """A message with the kind of its error, or ``warning``."""

    kind: str
    text: str

    @property
    def parts(self) -> tuple[str, str]:
        """What happened, and what to do: the text behind the first colon that follows ``got`` or ``found``."""
        got = max(self.text.find("got "), self.text.find("found "))
        at = self.text.find(": ", got)
        return (self.text, "") if got < 0 or at < 0 else (self.text[:at], self.text[at + 2 :])


def text_of(node: ast.expr, constants: dict[str, str]) -> str:
    """Return the text of a string expression, with what is filled in as ``{name}``; empty for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(each, constants) or "{" + _name(each) + "}" for each in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, constants) + text_of(node.right, constants)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return text_of(node.func.value, constants).replace("{}", "{...}")
    return constants.get(node.id, "") if isinstance(node, ast.Name) else ""


def _name(value: ast.expr) -> str:
    source = ast.unparse(value.value if isinstance(value, ast.FormattedValue) else value)
    return source if source.replace(".", "").replace("_", "").isalnum() and len(source) < 24 else "..."


def messages_of(tree: ast.Module) -> Iterator[Message]:
    """Yield the messages that a file raises or warns with."""
    constants: dict[str, str] = {}
    for each in tree.body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            constants[each.targets[0].id] = text_of(each.value, constants)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = ast.unparse(node.func)
        text = text_of(node.args[0], constants)
        kind = name.rsplit(".", 1)[-1]
        if " " in text and kind.endswith("Error"):
            yield Message(kind, text)
        elif " " in text and name in ("_log.warning", "warnings.warn", "log.warning"):
            yield Message("warning", text)


def page() -> str:
    """Return the page: one table for each part of the package."""
    found: dict[str, dict[Message, None]] = {title: {} for title in ROOMS.values()}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""
        found[ROOMS[room]].update(dict.fromkeys(messages_of(ast.parse(path.read_text()))))
    lines = [HEAD]
    for title, messages in found.items():
        if messages:
            rows = (f"| {_cell(m.parts[0])} | {_cell(m.parts[1])} | {m.kind} |" for m in sorted(messages))
            lines += [f"## {title}\n", "| message | what to do | kind |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
