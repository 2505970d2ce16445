"""The commands of ``python -m lowlevel_zero``: consolidate and inspect a checkpoint, and plan a run.

Each raises ``ValueError``, ``OSError`` or ``ImportError`` where it can't do what it is to.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint.consolidate import MODEL, OPTIMIZER, bytes_to_do, consolidate, not_tensors
from ..checkpoint.folders import locate
from ..checkpoint.saved import SavedCheckpoint
from .description import as_text, describe
from .plan_command import add_plan_arguments, plan
from .quantities import whole_number
from .saved_layout import layout_in

_PAUSE = 10.0  # seconds between lines of progress, where none can be redrawn


class Command(NamedTuple):
    """A sub-command: its name, its purpose in a few words, its arguments and the function that runs it."""

    name: str
    does: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def _consolidate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help=f"directory to make, with {MODEL} and {OPTIMIZER} in it")
    parser.add_argument("--force", action="store_true", help="replace OUT, if it holds nothing but such files")


def _consolidate(options: argparse.Namespace) -> None:
    checkpoint = _open(options.checkpoint)
    with _progress(bytes_to_do(checkpoint)) as bar:
        done = (lambda count: None) if bar is None else bar.update
        consolidate(checkpoint, options.out, force=options.force, done=done)
    print(f"wrote {options.out / MODEL} and {options.out / OPTIMIZER}")
    if not_tensors(checkpoint):
        print(f"left out, since safetensors holds tensors alone: {', '.join(not_tensors(checkpoint))}")
    if checkpoint.manifest.excluded:
        print(f"not in it, since it was saved with exclude_frozen: {', '.join(checkpoint.manifest.excluded)}")


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="for machines: one JSON object")
    parser.add_argument("--check", action="store_true", help="read every file first, and compare it with its checksum")
    text = "lay it out for so many ranks (those that saved it)"
    parser.add_argument("--world-size", metavar="N", type=whole_number, help=text)


def _inspect(options: argparse.Namespace) -> None:
    checkpoint = _open(options.checkpoint)
    if options.check:
        checkpoint.manifest.check_files(checkpoint.path)
    found, layout = describe(checkpoint), layout_in(checkpoint, options.world_size)
    if options.json:
        print(json.dumps({**found, "layout": layout.as_dict()}, default=str, indent=1))
    else:
        print(f"{as_text(found)}\n\n{layout.table()}")


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    text = "a checkpoint, or a directory of checkpoints, of which the newest whole one is taken"
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help=text)


def _open(path: Path) -> SavedCheckpoint:
    """Return the checkpoint at ``path``, or the newest whole one in it, which a line on stderr names."""
    found = locate(path)
    if found != path:
        print(f"{path}: the newest whole checkpoint is {found}", file=sys.stderr)
    checkpoint = SavedCheckpoint(found)
    checkpoint.manifest.check_files(found, verify=False)
    return checkpoint


def _progress(total: int) -> Any:
    """Return tqdm's bar over ``total`` bytes, on stderr; None where it isn't installed."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ModuleNotFoundError:
        return nullcontext()
    pause = 0.2 if sys.stderr.isatty() else _PAUSE
    return tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, mininterval=pause, dynamic_ncols=True)


CONSOLIDATE = Command(
    "consolidate", "turn a checkpoint into files that load without this package", _consolidate_arguments, _consolidate
)
INSPECT = Command("inspect", "print what is in a checkpoint, and who owns what", _inspect_arguments, _inspect)
PLAN = Command("plan", "tell the memory that a run would take, or the time of its steps", add_plan_arguments, plan)
COMMANDS = (CONSOLIDATE, INSPECT, PLAN)
