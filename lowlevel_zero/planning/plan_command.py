"""``python -m lowlevel_zero plan``: the memory that a run would take, or, over a link, the time of its steps."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..layout.text import aligned, counted, in_bytes, unit_of
from ..options import ZeroOptions
from .memory import DTYPES, OWNERS, Estimate, as_dtype, estimate
from .pictures import draw_estimates
from .quantities import elements, per_second, rate, seconds, share, stage, whole_number
from .state_sizes import NAMES
from .step_time import Computing, Link, StepTime, bucket_rows, step_time

# Options that are keywords of what they are for.
_OF_BOTH = ("communication_dtype", "fp8_communication", "reduce_bucket_size")
_OF_MEMORY = (*_OF_BOTH, "dtype", "optimizer", "master_weights", "micro_batches")
_FLOPS = 4  # of a backward, for each parameter and token

_MEMORY_HEAD = ("ranks", "stage", "offload", *(owner.replace("_", " ") for owner in OWNERS), "total", "on host")
_MEMORY_NOTES = """\
  Gradients and states as after a backward, bucket buffers as many as are under way at once; total is their sum,
  activations come on top. stage 0 is DDP with its gradients in bucket views."""

_TIME_HEAD = ("ranks", *StepTime._fields[1:])
_TIME_NOTES = """\
  Of one step of a rank: bytes sent; how long the link carries them, behind a backward (hidden) and not (exposed); how
  long a rank as fast as the average waits for the slowest; all of the step. stage 0 is DDP with the same buckets."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` take the command's options."""
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    text = "elements of the model, as in 7e9, 7B or 125M (7B)"
    model.add_argument("--params", metavar="N", type=elements, default=7 * 10**9, help=text)
    text = "what makes the model, without arguments, on the meta device: as in torch.nn:Transformer"
    model.add_argument("--model", metavar="MODULE:NAME", help=text)
    add("--world-size", metavar="N", type=whole_number, nargs="+", required=True, help="ranks")
    add("--dtype", default="bf16", help=f"the parameters': {', '.join(DTYPES)} (%(default)s)")
    add("--stage", type=stage, nargs="+", default=[0, 1, 2], help="0 (DDP), 1, 2 (all of them)")
    add("--communication-dtype", help="of gradients on their way (the parameters')")
    add("--fp8", action="store_true", dest="fp8_communication", help="with fp8_communication")
    text = "elements (%(default)s)"
    add("--bucket-size", metavar="N", type=whole_number, default=2**20, dest="reduce_bucket_size", help=text)
    add("--json", action="store_true", help="for machines: one JSON object")

    add = parser.add_argument_group("of memory").add_argument
    add("--optimizer", default="adamw", help=f"{', '.join(NAMES)} (%(default)s)")
    text = "with cpu_offload alone, or without (both)"
    add("--offload", action=argparse.BooleanOptionalAction, default=None, help=text)
    text = "step 16-bit slices as they are"
    add("--no-master-weights", action="store_false", dest="master_weights", help=text)
    text = "backwards before a step (%(default)s)"
    add("--micro-batches", metavar="N", type=whole_number, default=1, help=text)
    add("--picture", metavar="FILE", type=Path, help="draw it into a PNG, SVG or PDF")

    add = parser.add_argument_group("of time").add_argument
    add("--link", metavar="RATE", type=rate, help="tell the time of a step over a link of each rank's, as in 100Gbit")
    add("--latency", metavar="TIME", type=seconds, default=0.0, help="from rank to rank, as in 20us (none)")
    add("--ring", action="store_true", help="rows go from neighbour to neighbour, not to all ranks at once")
    text = "that a rank computes in one, beside half as much in a forward, as in 120ms (none, or as --flops tells)"
    add("--backward", metavar="TIME", type=seconds, help=text)
    add("--flops", metavar="N", type=per_second, help="operations a second that a rank reaches, as in 300T")
    add("--tokens", metavar="N", type=elements, default=8192, help="of a rank's batch (%(default)s)")
    text = "by which a rank is slower in a step, exponentially distributed: its mean, as in 5%% (none)"
    add("--straggling", metavar="SHARE", type=share, default=0.0, help=text)


def plan(options: argparse.Namespace) -> None:
    """Print the memory of a run, or the time of its steps where ``--link`` is given."""
    model = options.params if options.model is None else _made(options.model)
    numel = sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else model
    title = f"{counted(numel, 'parameter')}, {options.dtype}"
    model_facts = {"params": numel, "dtype": options.dtype}
    if options.link is None:
        _plan_memory(options, model, f"{title}, {options.optimizer}", {**model_facts, "optimizer": options.optimizer})
    else:
        _plan_time(options, model, title, model_facts)


def _made(name: str) -> nn.Module:
    module, _, path = name.partition(":")
    try:
        make = importlib.import_module(module)
        for part in path.split("."):
            make = getattr(make, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--model: expected MODULE:NAME, as in torch.nn:Transformer, got {name!r}: {error}") from error
    with torch.device("meta"):
        model = make() if callable(make) else make
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model: expected {name} to return a torch.nn.Module, got {type(model).__name__}")
    return model


def _plan_memory(options: argparse.Namespace, model: nn.Module | int, title: str, model_facts: dict[str, Any]) -> None:
    keywords = {name: getattr(options, name) for name in _OF_MEMORY}
    found = [
        estimate(model, world_size, stage, cpu_offload=offload, **keywords)
        for world_size in options.world_size
        for stage in options.stage
        for offload in ([False, True] if options.offload is None else [options.offload])
    ]
    if options.picture is not None:
        draw_estimates(found, f"Bytes per rank: {title}", options.picture)
    if options.json:
        print(json.dumps({**model_facts, "estimates": [each.as_dict() for each in found]}, indent=1))
    else:
        scale, unit = unit_of(max(each.total for each in found))
        rows = [_memory_row(each, scale) for each in found]
        print(f"{title}: {unit} per rank\n\n{_table(_MEMORY_HEAD, rows, left=[2])}\n\n{_MEMORY_NOTES}")


def _memory_row(each: Estimate, scale: int) -> tuple[str, ...]:
    sizes = (*(getattr(each, owner) for owner in OWNERS), each.total, each.host.total)
    kind = (f"{each.world_size:,}", str(each.stage), "yes" if each.cpu_offload else "no")
    return (*kind, *(f"{size / scale:,.2f}" if size else "-" for size in sizes))


def _plan_time(options: argparse.Namespace, model: nn.Module | int, title: str, model_facts: dict[str, Any]) -> None:
    dtype = as_dtype("dtype", options.dtype) or torch.float32
    keywords = {name: getattr(options, name) for name in _OF_BOTH}
    keywords["communication_dtype"] = as_dtype("communication_dtype", options.communication_dtype)
    backward = options.backward
    if backward is None:
        backward = _FLOPS * model_facts["params"] * options.tokens / options.flops if options.flops else 0.0
    computing = Computing(backward / 2, backward, straggling=options.straggling)
    link = Link(options.link, options.latency, options.ring)
    shapes = [(numel, dtype) for numel in _sizes(model, options.reduce_bucket_size)]
    found: list[StepTime] = []
    for ranks in options.world_size:
        rows = list(bucket_rows(shapes, ranks, ZeroOptions(**keywords)))
        found += [step_time(rows, ranks, stage, computing, link) for stage in options.stage]
    if options.json:
        steps = [each._asdict() for each in found]
        print(json.dumps({**model_facts, **link._asdict(), "computing": computing._asdict(), "steps": steps}, indent=1))
    else:
        heading = f"{title}: ms a step, of which a rank computes {computing.whole * 1e3:,.2f}"
        print(f"{heading}\n\n{_table(_TIME_HEAD, [_time_row(each) for each in found])}\n\n{_TIME_NOTES}")


def _sizes(model: nn.Module | int, bucket_size: int) -> list[int]:
    """Return the sizes of a model's trained parameters; a number is cut into sizes that fill buckets."""
    if isinstance(model, nn.Module):
        return [p.numel() for p in model.parameters() if p.requires_grad]
    whole, rest = divmod(model, bucket_size)
    return [bucket_size] * whole + [rest] * (rest > 0)


def _time_row(each: StepTime) -> tuple[str, ...]:
    world_size, stage, buckets, sent, *times = each
    counts = (f"{world_size:,}", str(stage), f"{buckets:,}", in_bytes(sent))
    return (*counts, *(f"{time * 1e3:,.2f}" for time in times))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: Sequence[int] = ()) -> str:
    """Return rows as a table, with an empty line before each further world size."""
    lines = [head]
    for row in rows:
        if lines[-1] is not head and lines[-1][0] != row[0]:
            lines.append(("",) * len(head))
        lines.append(row)
    return aligned(lines, right=[at for at in range(len(head)) if at not in left])
