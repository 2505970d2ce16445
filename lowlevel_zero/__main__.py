"""The command line: ``python -m lowlevel_zero COMMAND``, thin over what the package does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from .planning.commands import COMMANDS

RUN = "python -m "

# Exit codes: argparse's own for what can't be done, a shell's for Ctrl-C.
REFUSED, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. What can't be done is one line on stderr, and code 2."""
    try:
        options = _parser().parse_args(arguments)
        options.command.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # who read the output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return INTERRUPTED
    except _Mistake as mistake:
        print(mistake, file=sys.stderr)
        return REFUSED
    except (ValueError, OSError, ImportError) as refused:
        print(f"lowlevel_zero {options.command.name}: error: {' '.join(str(refused).split())}", file=sys.stderr)
        return REFUSED
    return 0


class _Mistake(Exception):
    """On the command line; the message is all that is to be printed."""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, as the commands do."""

    def error(self, message: str) -> NoReturn:
        raise _Mistake(f"{self.prog.removeprefix(RUN)}: error: {message.removeprefix('argument ')}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"{RUN}lowlevel_zero",
        description="Tools around lowlevel_zero's runs and what they leave on disk. None needs a GPU, torchrun or a "
        "process group.",
        epilog="A command's own options: python -m lowlevel_zero COMMAND --help",
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
