"""The command that plans memory: bytes per rank by owner, for stages and world sizes, with and without offload."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ..memory import DTYPES, Estimate, estimate
from ..state_sizes import NAMES
from ..text import aligned, counted, unit_of
from .command import Command, whole_number
from .plan_picture import draw

_THOUSANDS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MOST = 10**18  # elements: what more bytes has than any machine

_HEAD = (
    *("ranks", "stage", "offload", "parameters", "gradients", "masters", "states", "wires"),
    *("total", "on host"),
)
_NOTES = """\
  Gradients and states as after a backward, wires as many as are under way at once; total is their sum, activations
  come on top. stage 0 is DDP with its gradients in bucket views."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    told = "elements of the model, as in 7e9, 7B or 125M"
    parser.add_argument("--params", metavar="N", type=elements, required=True, help=told)
    parser.add_argument("--world-size", metavar="N", type=whole_number, nargs="+", required=True, help="ranks")
    parser.add_argument("--dtype", default="bf16", help=f"the parameters': {', '.join(DTYPES)} (%(default)s)")
    parser.add_argument("--stage", type=_stage, nargs="+", default=[0, 1, 2], help="0 (DDP), 1, 2 (all of them)")
    parser.add_argument("--optimizer", default="adamw", help=f"{', '.join(NAMES)} (%(default)s)")
    told = "with cpu_offload alone, or without (both)"
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=None, help=told)
    parser.add_argument("--communication-dtype", help="of gradients on their way (the parameters')")
    parser.add_argument("--fp8", action="store_true", help="with fp8_communication")
    parser.add_argument("--no-master-weights", action="store_true", help="step 16-bit slices as they are")
    told = "elements (%(default)s)"
    parser.add_argument("--bucket-size", metavar="N", type=whole_number, default=1024 * 1024, help=told)
    told = "backwards before a step (%(default)s)"
    parser.add_argument("--micro-batches", metavar="N", type=whole_number, default=1, help=told)
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
        draw(found, f"Bytes per rank: {title}", options.picture)
    if options.json:
        told = {"params": options.params, "dtype": options.dtype, "optimizer": options.optimizer}
        print(json.dumps({**told, "estimates": [each.as_dict() for each in found]}, indent=1))
    else:
        scale, unit = unit_of(max(each.total for each in found))
        print(f"{title}: {unit} per rank\n\n{_table(found, scale)}\n\n{_NOTES}")


def elements(text: str) -> int:
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


def _table(found: list[Estimate], scale: int) -> str:
    """A line an estimate, with an empty one before each further world size."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for at, each in enumerate(found):
        if at and each.world_size != found[at - 1].world_size:
            rows.append(("",) * len(_HEAD))
        sizes = (*asdict(each.owners()).values(), each.total, each.host.total)
        kind = (f"{each.world_size:,}", str(each.stage), "yes" if each.cpu_offload else "no")
        rows.append((*kind, *(f"{size / scale:,.2f}" if size else "-" for size in sizes)))
    return aligned(rows, right=(0, 1, *range(3, len(_HEAD))))


PLAN = Command("plan", "tell the memory that a run would take, by stage and number of ranks", _arguments, _plan)
