"""Collect the errors and warnings of the package from its source, as a page of the reference, and print it if run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "lowlevel_zero"
HEAD = """# Errors and warnings

All errors and warnings of the package by symptom, collected from its source. Words in braces stand for values of your
run: names of parameters, ranks, numbers. [When something goes wrong](../when-something-goes-wrong.md) explains the
most common ones.
"""
# Symptoms, and the files or folders whose messages belong to each.
SYMPTOMS = {
    "The optimizer can't be constructed": (
        "bookkeeping/parameter_store.py",
        "communication/grid.py",
        "communication/process_groups.py",
        "construction",
        "experts",
        "lives.py",
        "loss_scaler.py",
        "optim",
        "options.py",
    ),
    "Backward or step raises or warns": (
        "backward.py",
        "colossalai_names.py",
        "bookkeeping/sharded_parameter.py",
        "bookkeeping/shown_gradients.py",
        "bookkeeping/step_state.py",
        "communication/progress.py",
        "communication/shard_group.py",
        "diagnostics/guards.py",
        "diagnostics/untrained.py",
        "offload",
        "optimizer.py",
        "reducer.py",
        "sharded_optimizer.py",
        "stepper.py",
    ),
    "Reading, editing or clipping p.grad raises": ("clipping.py", "gradients"),
    "Gradients are infinite or NaN": ("diagnostics/bad_numbers.py",),
    "Ranks differ, wait for each other, or end": (
        "communication/agreement.py",
        "communication/backends",
        "communication/failed_ranks.py",
        "diagnostics/stall_report.py",
        "diagnostics/verification.py",
    ),
    "A checkpoint isn't saved or loaded": ("checkpoint",),
    "A state dict isn't loaded": ("state",),
    "An estimate or a plan fails": ("layout", "planning"),
    "An optimizer of your own doesn't train alike": ("testing.py",),
    "DeepSpeed's names raise": ("deepspeed",),
    "ColossalAI's Booster raises or warns": ("plugin",),
    "A trainer raises": ("trainers",),
}
# Messages that no user meets: of internal errors, and reasons that other messages contain.
INTERNAL = ("AssertionError", "TransportError", "UnpicklingError")
INTERNAL_FILES = ("communication/memory_file.py", "communication/work.py", "partition.py")


class Message(NamedTuple):
    """A message with the kind of its error, or ``warning``."""

    kind: str
    text: str

    @property
    def parts(self) -> tuple[str, str]:
        """Return the message without its remedy, and the remedy; if it has none, to pass the expected value."""
        start = max(self.text.find(word) for word in ("got ", "found ", "expected "))
        for remedy in re.finditer(r": (?=[^{%])|\. (?=[A-Z])", self.text):
            if remedy.start() > start and " " in self.text[: remedy.start()]:
                return self.text[: remedy.start()], self.text[remedy.end() :]
        expected = re.search("expected (.+), (?:got|found) ", self.text)
        if expected is not None and self.kind not in ("RuntimeError", "AssertionError"):
            return self.text, f"pass {expected[1]}"
        has_reason = self.text.endswith("}") or self.kind == "AssertionError"
        return self.text, "read the reason in the message" if has_reason else ""


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


def constants_of(tree: ast.Module, others: Mapping[str, str]) -> dict[str, str]:
    """Return the text of the strings that a file gives a name, some of which are made of ``others``."""
    found: dict[str, str] = {}
    for each in tree.body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            found[each.targets[0].id] = text_of(each.value, {**others, **found})
    return found


def messages_of(tree: ast.Module, others: Mapping[str, str] = MappingProxyType({})) -> Iterator[Message]:
    """Yield the messages that a file raises or warns with; ``others``: text that other files have given a name."""
    own = constants_of(tree, others)
    constants = {**others, **own}
    told = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = ast.unparse(node.func)
        text = text_of(node.args[0], constants)
        kind = name.rsplit(".", 1)[-1]
        told.add(text)
        if kind == "Refusal":
            yield Message("RuntimeError", "{name}: " + text.replace("{}", "{...}"))
        elif " " in text and (kind.endswith("Error") or kind == "LostRank"):
            yield Message(kind, text)
        elif " " in text and name in ("_log.warning", "warnings.warn", "log.warning"):
            yield Message("warning", text)
    for text in own.values():  # filled in by a variable
        if "expected " in text and not any(text.replace("{}", "{...}") in each for each in told):
            yield Message("RuntimeError", text)


def symptom_of(file: str) -> str:
    """Return the symptom whose messages are in a file of the package."""
    folders = [folder.as_posix() for folder in Path(file).parents]
    (found,) = (title for title, files in SYMPTOMS.items() if {file, *folders} & {*files})
    return found


def page() -> str:
    """Return the page: one table for each symptom."""
    found: dict[str, dict[Message, None]] = {title: {} for title in SYMPTOMS}
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))
    }
    public = {
        name: text
        for tree in trees.values()
        for name, text in constants_of(tree, {}).items()
        if name.isupper() and text
    }
    for file, tree in trees.items():
        messages = [each for each in messages_of(tree, public) if _is_for_users(each, file)]
        if messages:
            found[symptom_of(file)].update(dict.fromkeys(messages))
    lines = [HEAD]
    for title, of_title in found.items():
        rows = (f"| {_cell(m.parts[0])} | {_cell(m.parts[1])} | {m.kind} |" for m in sorted(of_title))
        lines += [f"## {title}\n", "| message | what to do | kind |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _is_for_users(message: Message, file: str) -> bool:
    """Return whether a message has words of its own, and isn't an internal error."""
    own_words = re.sub(r"\{.*?\}|%[\d.]*[sdg]", "", message.text)
    is_internal = message.kind in INTERNAL or file in INTERNAL_FILES
    return " " in own_words.strip(" :;.") and (not is_internal or file == "testing.py")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    print(page())
