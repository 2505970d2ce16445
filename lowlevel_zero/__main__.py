"""The command line: ``python -m lowlevel_zero COMMAND``, thin over what the package does."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import __version__
from .checkpoint.consolidate import MODEL, OPTIMIZER, bytes_to_do, consolidate, refuse_existing
from .checkpoint.description import as_text, describe
from .checkpoint.folders import latest, locate
from .checkpoint.manifest import MANIFEST
from .checkpoint.progress import Progress
from .checkpoint.whole import WholeCheckpoint

# Exit codes: argparse's own for what can't be done, a shell's for Ctrl-C.
REFUSED, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Command:
    """A sub-command: what it is called, what it takes, what it does."""

    name: str
    does: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. What can't be done is one line on stderr, and code 2."""
    options = _parser().parse_args(arguments)
    command: Command = options.command
    try:
        command.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # who read the output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError) as refused:
        print(f"lowlevel_zero {command.name}: error: {' '.join(str(refused).split())}", file=sys.stderr)
        return REFUSED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lowlevel_zero",
        description="Tools for what lowlevel_zero leaves on disk. None needs a GPU, torchrun or a process group.",
        epilog="A command's own options: python -m lowlevel_zero COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"lowlevel_zero {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.does, description=f"{command.does}.".capitalize())
        command.add_arguments(own)
        own.set_defaults(command=command)
    return parser


# The commands.


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    told = "a checkpoint, or a directory of checkpoints, of which the newest whole one is taken"
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help=told)


def _open(path: Path) -> WholeCheckpoint:
    """The checkpoint ``path``, or the newest whole one in it, which is said then, out of the way of results."""
    found = path if (path / MANIFEST).exists() else latest(path) or locate(path)
    if found != path:
        print(f"{path}: the newest whole checkpoint is {found}", file=sys.stderr)
    return WholeCheckpoint(found)


def _consolidate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help=f"directory to make, with {MODEL} and {OPTIMIZER} in it")
    parser.add_argument("--force", action="store_true", help="replace OUT, if it holds nothing but such files")


def _consolidate(options: argparse.Namespace) -> None:
    refuse_existing(options.out, options.force)
    checkpoint = _open(options.checkpoint)
    with Progress(bytes_to_do(checkpoint)) as progress:
        consolidate(checkpoint, options.out, force=options.force, done=progress.add)
    print(f"wrote {options.out / MODEL} and {options.out / OPTIMIZER}")
    if checkpoint.not_tensors():
        print(f"left out, since safetensors holds tensors alone: {', '.join(checkpoint.not_tensors())}")


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="for machines: one JSON object")
    parser.add_argument("--check", action="store_true", help="read every file first, and compare it with its checksum")


def _inspect(options: argparse.Namespace) -> None:
    checkpoint = _open(options.checkpoint)
    if options.check:
        checkpoint.check_files()
    found = describe(checkpoint)
    print(json.dumps(asdict(found), default=str, indent=1) if options.json else as_text(found))


COMMANDS = (
    Command(
        "consolidate",
        "turn a checkpoint into files that load without this package",
        _consolidate_arguments,
        _consolidate,
    ),
    Command("inspect", "print what is in a checkpoint", _inspect_arguments, _inspect),
)

if __name__ == "__main__":
    sys.exit(main())
