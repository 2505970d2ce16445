"""What is in a checkpoint: as records, for machines; as a table, for people. No tensor is read but step counters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.manifest import TRAINABLE
from ..checkpoint.optimizers import Name
from ..checkpoint.saved import SavedCheckpoint
from .text import aligned, counted, in_bytes, ranks_text, shape_text


def describe(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """All but the tensors' values, as ``inspect --json`` prints it.

    ``steps`` is the least and the most steps that a parameter has taken; None where no state counts them. ``groups``
    are the param groups' settings, with the number of their parameters, frozen ones included. Of several optimizers
    each group tells its own, and ``loss_scale`` and ``scheduler`` are by name.

    Raises:
        CheckpointError: a file can't be read.
    """
    manifest, optimizers = checkpoint.manifest, checkpoint.objects.optimizers
    states = checkpoint.states
    told = ("format", "version", "torch", "saved", "world_size", "stage")
    return {
        "path": str(checkpoint.path),
        **{name: getattr(manifest, name) for name in told},
        "steps": _steps(checkpoint),
        "model": [
            {
                "name": name,
                "tensor": _tensor(checkpoint.model[name]),
                "kind": entry.kind,
                "group": entry.group,
                "state": {key: _tensor(each) for key, each in states.get(name, {}).items()},
                "ranks": manifest.experts[name].ranks if name in manifest.experts else None,
                "optimizer": entry.optimizer,
            }
            for name, entry in manifest.tensors.items()
        ],
        "tied": dict(manifest.tied),
        "excluded": list(manifest.excluded),
        "groups": [
            {**({} if name is None else {"optimizer": name}), **group, "params": len(group["params"])}
            for name, settings in optimizers.items()
            for group in settings["param_groups"]
        ],
        "loss_scale": _only({name: settings["loss_scale"] for name, settings in optimizers.items()}),
        "scheduler": _only({name: _names(settings["scheduler"]) for name, settings in optimizers.items()}),
        "extra": _names(checkpoint.objects.extra),
        "rank_states": manifest.rank_states,
    }


def _only(by_name: Mapping[Name, Any]) -> Any:
    """The only optimizer's, else all by name."""
    return by_name[None] if None in by_name else dict(by_name)


def _steps(checkpoint: SavedCheckpoint) -> tuple[int, int] | None:
    others = [state for settings in checkpoint.objects.optimizers.values() for state in settings["states"].values()]
    counts = [int(state["step"]) for state in others if "step" in state]
    for name, state in checkpoint.states.items():
        if "step" in state:
            count = torch.empty_like(state["step"], device="cpu")
            checkpoint.read({}, {name: {"step": count}})
            counts.append(int(count))
    return (min(counts), max(counts)) if counts else None


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "bytes": tensor.nbytes,
    }


def _names(value: Any) -> list[str] | str | None:
    if value is None:
        return None
    return [str(name) for name in value] if isinstance(value, Mapping) else type(value).__name__


# For people.


def as_text(found: Mapping[str, Any]) -> str:
    """A heading, a table of the parameters, and the rest; settings that are None or False are left out."""
    return "\n\n".join(("\n".join(_heading(found)), _table(found), "\n".join(_rest(found))))


def _heading(found: Mapping[str, Any]) -> list[str]:
    versions = "format {format}, lowlevel_zero {version}, torch {torch}".format(**found)
    experts = Counter(line["ranks"] for line in found["model"] if line["ranks"] is not None)
    return [
        found["path"],
        f"  saved    {found['saved']}, {versions}",
        f"  by       {counted(found['world_size'], 'rank')}, stage {found['stage']}",
        f"  steps    {_step_text(found['steps'])}",
        f"  holds    {_amount(found['model'])}",
        *(f"  experts  {count} tensors of ranks {ranks_text(ranks)}" for ranks, count in sorted(experts.items())),
    ]


def _amount(lines: list[dict[str, Any]]) -> str:
    parameters = [math.prod(line["tensor"]["shape"]) for line in lines if line["kind"] != "buffer"]
    model, state = map(in_bytes, _bytes(lines))
    return f"{sum(parameters):,} elements in {len(parameters)} parameters, {model}, and {state} of optimizer state"


def _bytes(lines: list[dict[str, Any]]) -> tuple[int, int]:
    """Of the model's tensors, and of their states."""
    states = (each["bytes"] for line in lines for each in line["state"].values())
    return sum(line["tensor"]["bytes"] for line in lines), sum(states)


def _step_text(steps: tuple[int, int] | None) -> str:
    if steps is None:
        return "not counted: no parameter has a step counter"
    least, most = steps
    return f"{most:,}" if least == most else f"{most:,} (a parameter with fewer gradients: {least:,})"


def _table(found: Mapping[str, Any]) -> str:
    rows = [("name", "shape", "dtype", "group", "state", "bytes", "state's bytes")]
    for line in found["model"]:
        tensor, group = line["tensor"], _group(line["optimizer"], line["group"])
        kind = group if line["kind"] == TRAINABLE else line["kind"]
        model, state = (f"{size:,}" for size in _bytes([line]))
        keys = ", ".join(line["state"]) or "-"
        rows.append((line["name"], shape_text(tensor["shape"]), tensor["dtype"], kind, keys, model, state))
    rows += [(alias, "", "", "", f"tied to {name}", "", "") for alias, name in found["tied"].items()]
    model, state = (f"{size:,}" for size in _bytes(found["model"]))
    rows.append(("together", "", "", "", "", model, state))
    return aligned(rows, right=(5, 6))


def _rest(found: Mapping[str, Any]) -> list[str]:
    lines = []
    counts: Counter[Name] = Counter()
    for group in found["groups"]:
        settings = {key: value for key, value in group.items() if key not in _NOT_SETTINGS and not _off(value)}
        name = group.get("optimizer")
        lines.append(f"  group {_group(name, counts[name])}   {group['params']} parameters, {_settings(settings)}")
        counts[name] += 1
    scales, schedulers = ({None: found[key]} if None in counts else found[key] for key in ("loss_scale", "scheduler"))
    lines += [f"  fp16      {_of(name)}{_settings(scale)}" for name, scale in scales.items() if scale is not None]
    lines += [f"  scheduler {_of(name)}{_listed(names)}" for name, names in schedulers.items()]
    lines.append(f"  extra     {_listed(found['extra'])}")
    if found["rank_states"]:
        lines.append(f"  own state of ranks {ranks_text(found['rank_states'])}")
    if found["excluded"]:
        excluded = found["excluded"]
        lines.append(f"  excluded  {counted(len(excluded), 'frozen parameter')}: {', '.join(excluded)}")
    return lines


_NOT_SETTINGS = ("params", "optimizer")


def _group(optimizer: Name, at: int | None) -> str:
    return str(at) if optimizer is None else f"{optimizer}/{at}"


def _of(optimizer: Name) -> str:
    return "" if optimizer is None else f"of {optimizer}: "


def _listed(names: list[str] | str | None) -> str:
    if names is None:
        return "none"
    return names if isinstance(names, str) else ", ".join(names or ["nothing"])


def _off(value: Any) -> bool:
    return value is None or value is False


def _settings(named: Mapping[str, Any]) -> str:
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in named.items()}
    return ", ".join(f"{name} {value}" for name, value in plain.items())
