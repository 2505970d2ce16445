"""``python -m lowlevel_zero plan``: the memory that a run takes, or, over a link, the time of its steps."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..layout.held import OWNERS
from ..layout.text import aligned, counted, in_bytes, shares_text, unit_of
from ..options import Communication, ZeroOptions
from ..partition import BY_ELEMENTS, BY_MATRICES, BY_PARAMETERS
from .memory import DTYPES, Estimate, as_dtype, estimate
from .planned import PlannedRun
from .quantities import elements, per_second, rate, seconds, share, stage, whole_number
from .state_sizes import NAMES, StateSizes, made_optimizer
from .step_time import Computing, Link, StepTime, bucket_rows, step_time

# Options that are keywords of ``estimate``.
_OF_MEMORY = (
    *("communication_dtype", "fp8_communication", "reduce_bucket_size", "device"),
    *("dtype", "optimizer", "master_weights", "micro_batches", "split"),
)
_FLOPS = 4  # operations of a backward for each parameter and token

_MEMORY_NOTES = """\
  Gradients and states are what a rank holds after a backward. Bucket buffers are the most that are under way at once.
  The total is the sum, and activations come on top. Stage 0 is DDP with its gradients in bucket views."""
_UNEQUAL_NOTE = """
  Ranks that own parameters whole hold unequal shares: the columns are of the fullest rank, beside the totals of the
  emptiest rank and of the mean."""
_TIME_NOTES = """\
  One step of a rank: the bytes that it sends; the time that the link carries them, behind computing (hidden) and not
  (exposed); the time that an average rank waits for the slowest; and the whole step. Stage 0 is DDP with the same
  buckets."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    text = "elements of the model, as in 7e9, 7B or 125M (default: 7B)"
    model.add_argument("--params", metavar="N", type=elements, default=7 * 10**9, help=text)
    text = "the function that returns the model on the meta device, as in torch.nn:Transformer"
    model.add_argument("--model", metavar="MODULE:NAME", help=text)
    add("--world-size", metavar="N", type=whole_number, nargs="+", required=True, help="numbers of ranks")
    add("--dtype", default="bf16", help=f"dtype of the parameters: {', '.join(DTYPES)} (default: %(default)s)")
    add("--stage", type=stage, nargs="+", default=[0, 1, 2], help="0 (DDP), 1 or 2 (default: all of them)")
    add("--communication-dtype", help="dtype in which gradients travel (default: the parameters' dtype)")
    add("--fp8", action="store_true", dest="fp8_communication", help="send gradients and parameters in fp8")
    add("--device", default="cuda", help="type of the device, as in cpu (default: %(default)s)")
    text = "elements of a bucket (default: that of the device)"
    add("--bucket-size", metavar="N", type=whole_number, dest="reduce_bucket_size", help=text)
    add("--json", action="store_true", help="print one JSON object")

    add = parser.add_argument_group("memory").add_argument
    add("--optimizer", default="adamw", help=f"one of {', '.join(NAMES)} (default: %(default)s)")
    text = "print only rows with cpu_offload, or only rows without (default: both)"
    add("--cpu-offload", action=argparse.BooleanOptionalAction, default=None, help=text)
    text = "step 16-bit slices without fp32 masters"
    add("--no-master-weights", action="store_false", dest="master_weights", help=text)
    text = "split the model by elements, by parameters, or by matrices (default: the optimizer's class decides)"
    add("--split", choices=(BY_ELEMENTS, BY_PARAMETERS, BY_MATRICES), help=text)
    add("--micro-batches", metavar="N", type=whole_number, default=1, help="backwards in a step (default: %(default)s)")

    add = parser.add_argument_group("time of a step").add_argument
    add("--link", metavar="RATE", type=rate, help="rate of each rank's link, as in 100Gbit: print times, not memory")
    add(
        "--latency",
        metavar="TIME",
        type=seconds,
        default=0.0,
        help="time of a message from rank to rank, as in 20us (default: none)",
    )
    add("--ring", action="store_true", help="send rows from neighbour to neighbour, not to all ranks at once")
    text = "time of a backward, as in 120ms; a forward takes half of it (default: from --flops, or none)"
    add("--backward", metavar="TIME", type=seconds, help=text)
    add("--flops", metavar="N", type=per_second, help="floating-point operations a second of a rank, as in 300T")
    add("--tokens", metavar="N", type=elements, default=8192, help="tokens in a rank's batch (default: %(default)s)")
    text = "mean share by which a rank is slower in a step, distributed exponentially, as in 5%% (default: none)"
    add("--straggling", metavar="SHARE", type=share, default=0.0, help=text)


def plan(options: argparse.Namespace) -> None:
    """Print the memory that a run takes, or, with ``--link``, the time of its steps."""
    model = options.params if options.model is None else _made(options.model)
    numel = sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else model
    facts = {"params": numel, "dtype": options.dtype}
    title = f"{counted(numel, 'parameter')}, {options.dtype}"
    print(_memory(options, model, title, facts) if options.link is None else _time(options, model, title, facts))


def _made(name: str) -> nn.Module:
    """Import ``MODULE:NAME``, call it on the meta device, and return its model; ``ValueError`` if it gives none."""
    module, _, path = name.partition(":")
    try:
        make = importlib.import_module(module)
        for part in path.split("."):
            make = getattr(make, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--model: expected MODULE:NAME, as in torch.nn:Transformer, got {name!r}: {error}") from error
    with torch.device("meta"):
        try:
            model = make() if callable(make) and not isinstance(make, nn.Module) else make
        except TypeError as error:
            raise ValueError(
                f"--model: expected a function that is called without arguments, got {name} ({error}): name one that "
                "returns the model"
            ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"--model: expected {name} to return a torch.nn.Module, got {type(model).__name__}: name one that does"
        )
    return model


def _memory(options: argparse.Namespace, model: nn.Module | int, title: str, facts: dict[str, Any]) -> str:
    """Return the estimate of memory for each number of ranks and stage, as a table or as JSON."""
    keywords = {name: getattr(options, name) for name in _OF_MEMORY}
    found = [
        estimate(model, world_size, stage, cpu_offload=offload, **keywords)
        for world_size in options.world_size
        for stage in options.stage
        for offload in ([False, True] if options.cpu_offload is None else [options.cpu_offload])
    ]
    if options.json:
        found_by_name = [each.as_dict() for each in found]
        return json.dumps({**facts, "optimizer": options.optimizer, "estimates": found_by_name}, indent=1)
    scale, unit = unit_of(max(each.total for each in found))
    unequal = any(each.least < each.total for each in found)
    head = ("ranks", "stage", "offload", *(owner.replace("_", " ") for owner in OWNERS), "total", "on host")
    rows = [_memory_row(each, scale, unequal) for each in found]
    table = _table(head + (("least", "mean") if unequal else ()), rows, left=[2])
    notes = _MEMORY_NOTES + (_UNEQUAL_NOTE if unequal else "")
    owned = {each.world_size: shares_text(each.owned) for each in found if each.owned}
    shares = [f"  Of parameters that one of {counted(size, 'rank')} owns whole {text}." for size, text in owned.items()]
    told = [f"{title}, {options.optimizer}: {unit} per rank", table, *shares, notes]
    return "\n\n".join(told)


def _memory_row(each: Estimate, scale: int, unequal: bool) -> tuple[str, ...]:
    sizes = [*(getattr(each, owner) for owner in OWNERS), each.total, each.host.total]
    sizes += [each.least, each.mean] if unequal else []
    kind = (f"{each.world_size:,}", str(each.stage), "yes" if each.cpu_offload else "no")
    return (*kind, *(f"{size / scale:,.2f}" if size else "-" for size in sizes))


def _time(options: argparse.Namespace, model: nn.Module | int, title: str, facts: dict[str, Any]) -> str:
    """Return the estimate of a step's time for each number of ranks and stage, as a table or as JSON."""
    travels = as_dtype("communication_dtype", options.communication_dtype)
    travel = Communication(options.reduce_bucket_size, travels, fp8=options.fp8_communication)
    chosen = ZeroOptions(forced_dtype=as_dtype("dtype", options.dtype), communication=travel)
    run = PlannedRun(model, chosen, StateSizes(*made_optimizer("sgd")), options.device)
    backward = options.backward
    if backward is None:
        backward = _FLOPS * facts["params"] * options.tokens / options.flops if options.flops else 0.0
    computing = Computing(backward / 2, backward, straggling=options.straggling)
    link = Link(options.link, options.latency, options.ring)
    found: list[StepTime] = []
    for ranks in options.world_size:
        rows = bucket_rows(run.layout(ranks))
        found += [step_time(rows, ranks, stage, computing, link) for stage in options.stage]
    if options.json:
        steps = [each._asdict() for each in found]
        return json.dumps({**facts, **link._asdict(), "computing": computing._asdict(), "steps": steps}, indent=1)
    heading = f"{title}: ms a step, of which a rank computes {computing.whole * 1e3:,.2f}"
    table = _table(("ranks", *StepTime._fields[1:]), [_time_row(each) for each in found])
    return f"{heading}\n\n{table}\n\n{_TIME_NOTES}"


def _time_row(each: StepTime) -> tuple[str, ...]:
    world_size, stage, buckets, sent, *times = each
    counts = (f"{world_size:,}", str(stage), f"{buckets:,}", in_bytes(sent))
    return (*counts, *(f"{time * 1e3:,.2f}" for time in times))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: Sequence[int] = ()) -> str:
    """Return rows as a text table, with an empty line before each further world size."""
    lines = [head]
    for row in rows:
        if lines[-1] is not head and lines[-1][0] != row[0]:
            lines.append(("",) * len(head))
        lines.append(row)
    return aligned(lines, right=[at for at in range(len(head)) if at not in left])
