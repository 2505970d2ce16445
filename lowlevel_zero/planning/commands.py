"""The commands of ``python -m lowlevel_zero``: consolidate and inspect a checkpoint, and plan a run's memory.

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

from ..checkpoint.consolidate import (
    MODEL,
    OPTIMIZER,
    bytes_to_do,
    consolidate,
    not_tensors,
)
from ..checkpoint.folders import locate
from ..checkpoint.saved import SavedCheckpoint
from .description import as_text, describe
from .memory import DTYPES, OWNERS, Estimate, estimate
from .pictures import draw_estimates
from .saved_layout import layout_in
from .state_sizes import NAMES
from .text import aligned, counted, unit_of

_THOUSANDS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MOST = 10**18  # elements: what more bytes has than any machine
_PAUSE = 10.0  # seconds between lines of progress, where none can be redrawn

_HEAD = ("ranks", "stage", "offload", *(owner.replace("_", " ") for owner in OWNERS), "total", "on host")
_NOTES = """\
  Gradients and states as after a backward, bucket buffers as many as are under way at once; total is their sum,
  activations come on top. stage 0 is DDP with its gradients in bucket views."""


class Command(NamedTuple):
    """A sub-command: what it is called, what it does in a few words, what it takes, and what does it."""

    name: str
    does: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


# ---- checkpoints ----


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
    told = "lay it out for so many ranks (those that saved it)"
    parser.add_argument("--world-size", metavar="N", type=_whole_number, help=told)


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
    told = "a checkpoint, or a directory of checkpoints, of which the newest whole one is taken"
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help=told)


def _open(path: Path) -> SavedCheckpoint:
    """The checkpoint ``path``, or the newest whole one in it, which is said then, out of the way of results."""
    found = locate(path)
    if found != path:
        print(f"{path}: the newest whole checkpoint is {found}", file=sys.stderr)
    checkpoint = SavedCheckpoint(found)
    checkpoint.manifest.check_files(found, verify=False)
    return checkpoint


def _progress(total: int) -> Any:
    """tqdm's bar over so many bytes, on stderr; None where it isn't installed."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ModuleNotFoundError:
        return nullcontext()
    pause = 0.2 if sys.stderr.isatty() else _PAUSE
    return tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, mininterval=pause, dynamic_ncols=True)


# ---- a run's memory ----


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    told = "elements of the model, as in 7e9, 7B or 125M"
    parser.add_argument("--params", metavar="N", type=_elements, required=True, help=told)
    parser.add_argument("--world-size", metavar="N", type=_whole_number, nargs="+", required=True, help="ranks")
    parser.add_argument("--dtype", default="bf16", help=f"the parameters': {', '.join(DTYPES)} (%(default)s)")
    parser.add_argument("--stage", type=_stage, nargs="+", default=[0, 1, 2], help="0 (DDP), 1, 2 (all of them)")
    parser.add_argument("--optimizer", default="adamw", help=f"{', '.join(NAMES)} (%(default)s)")
    told = "with cpu_offload alone, or without (both)"
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=None, help=told)
    parser.add_argument("--communication-dtype", help="of gradients on their way (the parameters')")
    parser.add_argument("--fp8", action="store_true", help="with fp8_communication")
    parser.add_argument("--no-master-weights", action="store_true", help="step 16-bit slices as they are")
    told = "elements (%(default)s)"
    parser.add_argument("--bucket-size", metavar="N", type=_whole_number, default=1024 * 1024, help=told)
    told = "backwards before a step (%(default)s)"
    parser.add_argument("--micro-batches", metavar="N", type=_whole_number, default=1, help=told)
    parser.add_argument("--json", action="store_true", help="for machines: one JSON object")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw it into a PNG, SVG or PDF")


def _plan(options: argparse.Namespace) -> None:
    found = [
        estimate(
            options.params,
            world_size,
            stage,
            options.dtype,
            options.optimizer,
            cpu_offload=offload,
            master_weights=not options.no_master_weights,
            communication_dtype=options.communication_dtype,
            fp8_communication=options.fp8,
            reduce_bucket_size=options.bucket_size,
            micro_batches=options.micro_batches,
        )
        for world_size in options.world_size
        for stage in options.stage
        for offload in ([False, True] if options.offload is None else [options.offload])
    ]
    title = f"{counted(options.params, 'parameter')}, {options.dtype}, {options.optimizer}"
    if options.picture is not None:
        draw_estimates(found, f"Bytes per rank: {title}", options.picture)
    if options.json:
        told = {"params": options.params, "dtype": options.dtype, "optimizer": options.optimizer}
        print(json.dumps({**told, "estimates": [each.as_dict() for each in found]}, indent=1))
    else:
        scale, unit = unit_of(max(each.total for each in found))
        print(f"{title}: {unit} per rank\n\n{_table(found, scale)}\n\n{_NOTES}")


def _table(found: list[Estimate], scale: int) -> str:
    """A line an estimate, with an empty one before each further world size."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for at, each in enumerate(found):
        if at and each.world_size != found[at - 1].world_size:
            rows.append(("",) * len(_HEAD))
        sizes = (*(getattr(each, owner) for owner in OWNERS), each.total, each.host.total)
        kind = (f"{each.world_size:,}", str(each.stage), "yes" if each.cpu_offload else "no")
        rows.append((*kind, *(f"{size / scale:,.2f}" if size else "-" for size in sizes)))
    return aligned(rows, right=(0, 1, *range(3, len(_HEAD))))


# ---- what they take ----


def _whole_number(text: str) -> int:
    """The value of an option, such as ``8``: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return int(text)


def _elements(text: str) -> int:
    """A number of elements, as in ``7e9``, ``7_000_000``, ``7B`` or ``1.5M``."""
    factor = _THOUSANDS.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        number = 0.0
    if not (1 <= number <= _MOST and number == int(number)):
        raise argparse.ArgumentTypeError(f"expected a whole number of elements, at least 1, as in 7B, got {text!r}")
    return int(number)


def _stage(text: str) -> int:
    if text not in ("0", "1", "2"):
        raise argparse.ArgumentTypeError(f"expected 0 (DDP), 1 or 2, got {text!r}")
    return int(text)


CONSOLIDATE = Command(
    "consolidate", "turn a checkpoint into files that load without this package", _consolidate_arguments, _consolidate
)
INSPECT = Command("inspect", "print what is in a checkpoint, and who owns what", _inspect_arguments, _inspect)
PLAN = Command("plan", "tell the memory that a run would take, by stage and number of ranks", _plan_arguments, _plan)
COMMANDS = (CONSOLIDATE, INSPECT, PLAN)
