"""The command line, ``python -m lowlevel_zero COMMAND``: consolidate and inspect a checkpoint, and plan a run."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from . import __version__
from .checkpoint.consolidate import MODEL, OPTIMIZER, bytes_to_do, consolidate, not_tensors
from .checkpoint.folders import locate
from .checkpoint.saved import SavedCheckpoint
from .planning.description import as_text, describe
from .planning.plan_command import add_plan_arguments, plan
from .planning.quantities import whole_number
from .planning.saved_layout import layout_in

_RUN = "python -m "
_PAUSE = 10.0  # seconds between lines of progress where no line can be redrawn

# Exit codes: argparse's own for an error, and a shell's for Ctrl-C.
_REFUSED, _INTERRUPTED = 2, 130


class Command(NamedTuple):
    """A sub-command: its name, its purpose in a few words, its arguments and the function that runs it."""

    name: str
    does: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def _consolidate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help=f"the directory to make, with {MODEL} and {OPTIMIZER}")
    parser.add_argument("--force", action="store_true", help="replace OUT if it holds nothing but such files")


def _consolidate(options: argparse.Namespace) -> None:
    """Write a checkpoint as one file of the model and one of the optimizer, with a progress bar."""
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
    """Add the options of ``inspect`` to its parser."""
    _add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="compare every file with its checksum first")
    text = "number of ranks to lay it out for (default: the ranks that saved it)"
    parser.add_argument("--world-size", metavar="N", type=whole_number, help=text)


def _inspect(options: argparse.Namespace) -> None:
    """Print a checkpoint's content and layout, as text or as JSON, after checking its files if asked to."""
    checkpoint = _open(options.checkpoint)
    if options.check:
        checkpoint.manifest.check_files(checkpoint.path)
    found, layout = describe(checkpoint), layout_in(checkpoint, options.world_size)
    in_json = {**found, "layout": layout.as_dict()}
    print(json.dumps(in_json, default=str, indent=1) if options.json else as_text(found, layout))


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    text = "a checkpoint, or a directory of checkpoints, whose newest whole one is used"
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help=text)


def _open(path: Path) -> SavedCheckpoint:
    """Open the checkpoint at ``path``, or the newest whole one in it, told on stderr; raise if a file isn't whole."""
    found = locate(path)
    if found != path:
        print(f"{path}: the newest whole checkpoint is {found}", file=sys.stderr)
    checkpoint = SavedCheckpoint(found)
    checkpoint.manifest.check_files(found, verify=False)
    return checkpoint


def _progress(total: int) -> Any:
    """Return a tqdm bar over ``total`` bytes, on stderr, or a context of None if tqdm isn't installed."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ModuleNotFoundError:
        return nullcontext()
    pause = 0.2 if sys.stderr.isatty() else _PAUSE
    return tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, mininterval=pause, dynamic_ncols=True)


COMMANDS = (
    Command(
        "consolidate",
        "turn a checkpoint into files that load without this package",
        _consolidate_arguments,
        _consolidate,
    ),
    Command("inspect", "print the contents of a checkpoint, and its split between ranks", _inspect_arguments, _inspect),
    Command("plan", "print the memory that a run takes, or the time of its steps", add_plan_arguments, plan),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 2 after an error, which is one line on stderr."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as of stderr: paths may have letters that it lacks
    try:
        options = _parser().parse_args(arguments)
        options.command.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return _INTERRUPTED
    except _Mistake as mistake:
        print(mistake, file=sys.stderr)
        return _REFUSED
    except (ValueError, TypeError, OSError, ImportError) as refused:
        print(f"lowlevel_zero {options.command.name}: error: {' '.join(str(refused).split())}", file=sys.stderr)
        return _REFUSED
    return 0


class _Mistake(Exception):
    """Raised for a mistake on the command line, with the line to print."""


class _Parser(argparse.ArgumentParser):
    """Raises ``_Mistake`` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise _Mistake(f"{self.prog.removeprefix(_RUN)}: error: {message.removeprefix('argument ')}")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with a subparser for each command."""
    parser = _Parser(
        prog=f"{_RUN}lowlevel_zero",
        description="Tools for lowlevel_zero's runs and checkpoints. They need no GPU, torchrun or process group.",
        epilog="Options of a command: python -m lowlevel_zero COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"lowlevel_zero {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.does, description=f"{command.does}.".capitalize())
        command.add_arguments(own)
        own.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
