"""What is in a checkpoint: as records, for machines; as a table, for people. No tensor is read but step counters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..planning.text import aligned, counted, ranks_text, shape_text
from .manifest import FORMAT, TRAINABLE, Manifest
from .optimizers import Name
from .stored import StoredTensor
from .whole import WholeCheckpoint


@dataclass(frozen=True)
class TensorLine:
    """One tensor of the model or of an optimizer's state."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class ModelLine:
    """One parameter or persistent buffer, and the tensors of its state by name.

    Attributes:
        kind, group, optimizer: as in ``SavedTensor``.
        ranks: of those that saved it, who had it; None: all.
    """

    name: str
    tensor: TensorLine
    kind: str
    group: int | None
    state: dict[str, TensorLine]
    ranks: tuple[int, ...] | None
    optimizer: Name = None

    @property
    def state_bytes(self) -> int:
        return sum(line.bytes for line in self.state.values())


@dataclass(frozen=True)
class Description:
    """One checkpoint.

    Attributes:
        saved: when, in ISO format.
        steps: the least and the most steps that a parameter has taken; None where no state counts them.
        tied: further names of parameters, and the name they are listed under.
        excluded: names of frozen parameters that were left out.
        groups: each param group's settings; ``params`` is the number of its parameters, frozen ones included. Of
            several optimizers each group tells its own.
        loss_scale: of several optimizers by name.
        scheduler: the names of the scheduler's entries; None without one; of several optimizers by name.
        extra: the names of the entries in ``extra``, or its type where it isn't a dict; None without one.
        rank_states: ranks that saved a state of their own.
    """

    path: str
    version: str
    torch: str
    saved: str
    world_size: int
    stage: int
    steps: tuple[int, int] | None
    model: list[ModelLine]
    tied: dict[str, str]
    excluded: list[str]
    groups: list[dict[str, Any]]
    loss_scale: Any
    scheduler: Any
    extra: list[str] | str | None
    rank_states: list[int]

    @property
    def model_bytes(self) -> int:
        return sum(line.tensor.bytes for line in self.model)

    @property
    def state_bytes(self) -> int:
        return sum(line.state_bytes for line in self.model)


def describe(checkpoint: WholeCheckpoint) -> Description:
    """All but the tensors' values.

    Raises:
        CheckpointError: a file can't be read.
    """
    manifest, optimizers = checkpoint.manifest, checkpoint.objects.optimizers
    model = checkpoint.model()
    states = {name: checkpoint.state(name) for name in manifest.tensors}
    return Description(
        path=str(checkpoint.path),
        version=manifest.version,
        torch=manifest.torch,
        saved=manifest.saved,
        world_size=manifest.world_size,
        stage=manifest.stage,
        steps=_steps(states),
        model=[
            ModelLine(
                name,
                _line(model[name]),
                entry.kind,
                entry.group,
                _state_lines(states[name]),
                _ranks(manifest, name),
                entry.optimizer,
            )
            for name, entry in manifest.tensors.items()
        ],
        tied=dict(manifest.tied),
        excluded=list(manifest.excluded),
        groups=[
            {**({} if name is None else {"optimizer": name}), **group, "params": len(group["params"])}
            for name, settings in optimizers.items()
            for group in settings["param_groups"]
        ],
        loss_scale=_only({name: settings["loss_scale"] for name, settings in optimizers.items()}),
        scheduler=_only({name: _names(settings["scheduler"]) for name, settings in optimizers.items()}),
        extra=_names(checkpoint.objects.extra),
        rank_states=manifest.rank_states,
    )


def _only(by_name: Mapping[Name, Any]) -> Any:
    """The only optimizer's, else all by name."""
    return by_name[None] if None in by_name else dict(by_name)


def _steps(states: Mapping[str, Mapping[str, Any]]) -> tuple[int, int] | None:
    counters = [state["step"] for state in states.values() if "step" in state]
    counts = [int(c.read() if isinstance(c, StoredTensor) else c) for c in counters]
    return (min(counts), max(counts)) if counts else None


def _ranks(manifest: Manifest, name: str) -> tuple[int, ...] | None:
    return manifest.experts[name].ranks if name in manifest.experts else None


def _state_lines(state: Mapping[str, Any]) -> dict[str, TensorLine]:
    return {key: _line(value) for key, value in state.items() if isinstance(value, StoredTensor)}


def _line(tensor: StoredTensor) -> TensorLine:
    return TensorLine(tensor.shape, str(tensor.dtype).removeprefix("torch."), tensor.nbytes)


def _names(value: Any) -> list[str] | str | None:
    if value is None:
        return None
    return [str(name) for name in value] if isinstance(value, Mapping) else type(value).__name__


# For people.


def as_text(found: Description) -> str:
    """A heading, a table of the parameters, and the rest; settings that are None or False are left out."""
    return "\n\n".join(("\n".join(_heading(found)), _table(found), "\n".join(_rest(found))))


def _heading(found: Description) -> list[str]:
    ranks = f"{found.world_size} rank{'s' if found.world_size > 1 else ''}, stage {found.stage}"
    return [
        found.path,
        f"  saved    {found.saved}, format {FORMAT}, lowlevel_zero {found.version}, torch {found.torch}",
        f"  by       {ranks}",
        f"  steps    {_step_text(found.steps)}",
        f"  holds    {_amount(found)}",
        *_expert_lines(found),
    ]


def _expert_lines(found: Description) -> list[str]:
    tensors = Counter(line.ranks for line in found.model if line.ranks is not None)
    return [f"  experts  {count} tensors of ranks {ranks_text(ranks)}" for ranks, count in sorted(tensors.items())]


def _amount(found: Description) -> str:
    parameters = [math.prod(line.tensor.shape) for line in found.model if line.kind != "buffer"]
    sizes = f"{_mebibytes(found.model_bytes)}, and {_mebibytes(found.state_bytes)} of optimizer state"
    return f"{sum(parameters):,} elements in {len(parameters)} parameters, {sizes}"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


def _step_text(steps: tuple[int, int] | None) -> str:
    if steps is None:
        return "not counted: no parameter has a step counter"
    least, most = steps
    return f"{most:,}" if least == most else f"{most:,} (a parameter with fewer gradients: {least:,})"


def _table(found: Description) -> str:
    rows = [("name", "shape", "dtype", "group", "state", "bytes", "state's bytes")]
    for line in found.model:
        group = _group(line.optimizer, line.group) if line.kind == TRAINABLE else line.kind
        sizes = (f"{line.tensor.bytes:,}", f"{line.state_bytes:,}")
        rows.append(
            (line.name, shape_text(line.tensor.shape), line.tensor.dtype, group, ", ".join(line.state) or "-", *sizes)
        )
    rows += [(alias, "", "", "", f"tied to {name}", "", "") for alias, name in found.tied.items()]
    rows.append(("together", "", "", "", "", f"{found.model_bytes:,}", f"{found.state_bytes:,}"))
    return aligned(rows, right=(5, 6))


def _rest(found: Description) -> list[str]:
    lines = []
    counts: Counter[Name] = Counter()
    for group in found.groups:
        settings = {key: value for key, value in group.items() if key not in _NOT_SETTINGS and not _off(value)}
        name = group.get("optimizer")
        lines.append(f"  group {_group(name, counts[name])}   {group['params']} parameters, {_settings(settings)}")
        counts[name] += 1
    scales, schedulers = ({None: each} if None in counts else each for each in (found.loss_scale, found.scheduler))
    lines += [f"  fp16      {_of(name)}{_settings(scale)}" for name, scale in scales.items() if scale is not None]
    lines += [f"  scheduler {_of(name)}{_listed(names)}" for name, names in schedulers.items()]
    lines.append(f"  extra     {_listed(found.extra)}")
    if found.rank_states:
        lines.append(f"  own state of ranks {ranks_text(found.rank_states)}")
    if found.excluded:
        lines.append(f"  excluded  {counted(len(found.excluded), 'frozen parameter')}: {', '.join(found.excluded)}")
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
