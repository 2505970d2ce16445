"""The commands that read a checkpoint: consolidate and inspect."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ...checkpoint.consolidate import MODEL, OPTIMIZER, bytes_to_do, consolidate, refuse_existing
from ...checkpoint.folders import locate
from ...checkpoint.whole import WholeCheckpoint
from .command import Command, whole_number
from .description import as_text, describe
from .progress import Progress
from .saved_layout import layout_in


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    told = "a checkpoint, or a directory of checkpoints, of which the newest whole one is taken"
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help=told)


def _open(path: Path) -> WholeCheckpoint:
    """The checkpoint ``path``, or the newest whole one in it, which is said then, out of the way of results."""
    found = locate(path)
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
    if checkpoint.manifest.excluded:
        print(f"not in it, since it was saved with exclude_frozen: {', '.join(checkpoint.manifest.excluded)}")


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="for machines: one JSON object")
    parser.add_argument("--check", action="store_true", help="read every file first, and compare it with its checksum")
    told = "lay it out for so many ranks (those that saved it)"
    parser.add_argument("--world-size", metavar="N", type=whole_number, help=told)
    told = "lay it out in buckets of so many elements (the run's)"
    parser.add_argument("--bucket-size", metavar="N", type=whole_number, help=told)


def _inspect(options: argparse.Namespace) -> None:
    checkpoint = _open(options.checkpoint)
    if options.check:
        checkpoint.check_files()
    found, layout = describe(checkpoint), layout_in(checkpoint, options.world_size, options.bucket_size)
    if options.json:
        print(json.dumps({**found, "layout": layout.as_dict()}, default=str, indent=1))
    else:
        print(f"{as_text(found)}\n\n{layout.table()}")


CONSOLIDATE = Command(
    "consolidate", "turn a checkpoint into files that load without this package", _consolidate_arguments, _consolidate
)
INSPECT = Command("inspect", "print what is in a checkpoint, and who owns what", _inspect_arguments, _inspect)
