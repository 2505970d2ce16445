"""The contents of a checkpoint, as records and as a table. Of its tensors only step counters are read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.manifest import TRAINABLE
from ..checkpoint.optimizers import Name
from ..checkpoint.saved import SavedCheckpoint
from ..layout.records import Layout, ParameterLayout, span_text
from ..layout.text import aligned, counted, in_bytes, ranks_text, shape_text


def describe(checkpoint: SavedCheckpoint) -> dict[str, object]:
    """Return a checkpoint's contents as values for JSON, without the tensors' values. Reads step counters alone.

    ``steps`` is the least and the most steps that a parameter has taken, or None if no state counts them. ``groups``
    are the param groups' settings, with the number of their parameters, frozen ones included. If there are several
    optimizers, each group tells its own, and ``loss_scale`` and ``scheduler`` are by name.

    Raises:
        CheckpointError: a file can't be read.
    """
    manifest, optimizers = checkpoint.manifest, checkpoint.objects.optimizers
    copied = ("format", "version", "torch", "saved", "world_size", "stage", "tied", "rank_states")
    return {
        "path": str(checkpoint.path),
        **{name: getattr(manifest, name) for name in copied},
        "steps": _steps(checkpoint),
        "model": [
            {
                "name": name,
                "tensor": _tensor(checkpoint.model[name]),
                "kind": entry.kind,
                "group": entry.group,
                "state": {key: _tensor(each) for key, each in checkpoint.states.get(name, {}).items()},
                "ranks": manifest.experts[name].ranks if name in manifest.experts else None,
                "optimizer": entry.optimizer,
            }
            for name, entry in manifest.tensors.items()
        ],
        "excluded": list(manifest.excluded),
        "groups": [
            {**({} if name is None else {"optimizer": name}), **group, "params": len(group["params"])}
            for name, settings in optimizers.items()
            for group in settings["param_groups"]
        ],
        "loss_scale": _only({name: settings["loss_scale"] for name, settings in optimizers.items()}),
        "scheduler": _only({name: _names(settings["scheduler"]) for name, settings in optimizers.items()}),
        "extra": _names(checkpoint.objects.extra),
    }


def _only(by_name: Mapping[Name, Any]) -> Any:
    """Return the value of the only optimizer, or all values by name."""
    return by_name[None] if None in by_name else dict(by_name)


def _steps(checkpoint: SavedCheckpoint) -> tuple[int, int] | None:
    """Return the least and the largest step count in a checkpoint; None if no parameter has one."""
    others = [state for settings in checkpoint.objects.optimizers.values() for state in settings["states"].values()]
    counts = [int(state["step"]) for state in others if _is_number(state.get("step"))]
    for name, state in checkpoint.states.items():
        if _is_number(state.get("step")):
            count = torch.empty_like(state["step"], device="cpu")
            checkpoint.read(count, name, "step")
            counts.append(int(count))
    return (min(counts), max(counts)) if counts else None


def _is_number(value: Any) -> bool:
    return value is not None and (not isinstance(value, Tensor) or value.numel() == 1)


def _tensor(tensor: Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": tuple(tensor.shape), "dtype": dtype, "bytes": tensor.nbytes}


def _names(value: Any) -> list[str] | str | None:
    if value is None:
        return None
    return [str(name) for name in value] if isinstance(value, Mapping) else type(value).__name__


# ---- text ----


def as_text(found: Mapping[str, Any], layout: Layout) -> str:
    """Return a description as text: a heading, one table of the tensors with their ``layout``, and the rest."""
    return "\n\n".join(("\n".join(_heading(found, layout)), _table(found, layout), "\n".join(_rest(found))))


def _heading(found: Mapping[str, Any], layout: Layout) -> Iterator[str]:
    """Yield the lines above the table: who saved it, its steps, sizes and layout."""
    yield found["path"]
    yield "  saved    {saved}, format {format}, lowlevel_zero {version}, torch {torch}".format(**found)
    yield f"  by       {counted(found['world_size'], 'rank')}, stage {found['stage']}"
    least, most = found["steps"] or (None, None)
    fewer = "" if least == most else f" (a parameter with fewer gradients: {least:,})"
    yield f"  steps    {'not counted: no parameter has a step counter' if most is None else f'{most:,}{fewer}'}"
    parameters = [math.prod(line["tensor"]["shape"]) for line in found["model"] if line["kind"] != "buffer"]
    model, state = map(in_bytes, _bytes(found["model"]))
    numel = f"{sum(parameters):,} elements in {len(parameters)} parameters"
    yield f"  holds    {numel}, {model}, and {state} of optimizer state"
    trained, padding = sum(p.split.numel for p in layout.parameters), sum(p.split.padding for p in layout.parameters)
    over = f"over {counted(layout.world_size, 'rank')}, padding {padding / max(1, trained):.2%}"
    yield f"  layout   {counted(trained, 'element')} in {counted(len(layout.parameters), 'parameter')} {over}"
    totals = list(layout.totals.values()) or [0]
    most, least, mean = map(in_bytes, (max(totals), min(totals), sum(totals) // len(totals)))
    unequal = f" at most, {least} at least, {mean} on average" if least != most else ""
    yield f"  a rank   {most}{unequal} of what is trained"
    experts = Counter(line["ranks"] for line in found["model"] if line["ranks"] is not None)
    for ranks, count in sorted(experts.items()):
        yield f"  experts  {count} tensors of ranks {ranks_text(ranks)}"


def _bytes(lines: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the bytes of the model's tensors, and the bytes of their optimizer states."""
    states = (each["bytes"] for line in lines for each in line["state"].values())
    return sum(line["tensor"]["bytes"] for line in lines), sum(states)


def _table(found: Mapping[str, Any], layout: Layout) -> str:
    """Return the table of a checkpoint's tensors, with their states, bytes and splits."""
    head = ("name", "shape", "dtype", "group", "state", "bytes", "state's bytes")
    rows: list[tuple[str, ...]] = [(*head, "padding", "slice", "owners", "span", "a rank holds")]
    laid_out = {p.name: p for p in layout.parameters}
    for line in found["model"]:
        tensor, group = line["tensor"], _group(line["optimizer"], line["group"])
        kind = group if line["kind"] == TRAINABLE else line["kind"]
        keys, (model, state) = ", ".join(line["state"]) or "-", _bytes([line])
        own = (line["name"], shape_text(tensor["shape"]), tensor["dtype"], kind, keys, f"{model:,}", f"{state:,}")
        rows.append((*own, *_split_cells(laid_out.get(line["name"]))))
    rows += [(alias, "", "", "", f"tied to {name}", *[""] * 7) for alias, name in found["tied"].items()]
    rows.append(("together", "", "", "", "", *(f"{size:,}" for size in _bytes(found["model"])), *[""] * 5))
    return aligned(rows, right=range(5, 12))


def _split_cells(p: ParameterLayout | None) -> tuple[str, ...]:
    """Return the table's cells for a parameter's split: padding, slice, owners, first span, bytes."""
    if p is None:
        return ("-",) * 5
    owner, size = p.split.owner, p.split
    owners = f"{p.owners}" if owner is None else f"rank {p.process_group[owner]}"
    span = span_text(size.span(owner or 0)) + (", …" if owner is None and p.owners > 1 else "")
    return f"{size.padding:,}", f"{size.slice_size:,}", owners, span, in_bytes((p.everywhere + p.own).total)


def _rest(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines below the table: param groups, loss scale, scheduler, ``extra`` and ranks' own states."""
    seen: Counter[Name] = Counter()
    for group in found["groups"]:
        name = group.get("optimizer")
        settings = {key: value for key, value in group.items() if key not in ("optimizer", "params")}
        yield f"  group {_group(name, seen[name])}   {counted(group['params'], 'parameter')}, {_text(settings)}"
        seen[name] += 1
    for what in ("loss_scale", "scheduler", "extra"):
        yield f"  {what:12}{_text(found[what]) or 'none'}"
    if found["rank_states"]:
        yield f"  own state of ranks {ranks_text(found['rank_states'])}"
    if found["excluded"]:
        yield f"  excluded  {counted(len(found['excluded']), 'frozen parameter')}: {', '.join(found['excluded'])}"


def _group(optimizer: Name, at: int | None) -> str:
    return str(at) if optimizer is None else f"{optimizer}/{at}"


def _text(value: Any) -> str:
    """Return a value as text; entries of a dict that are None or False are left out."""
    if isinstance(value, Mapping):
        named = ((name, _text(each)) for name, each in value.items() if each is not None and each is not False)
        return ", ".join(f"{name} {text}" for name, text in named)
    if isinstance(value, (list, type(None))):
        return ", ".join(map(str, value or ()))
    return str(value.tolist() if isinstance(value, Tensor) else value)
