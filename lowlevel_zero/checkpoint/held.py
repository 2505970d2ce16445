"""What one rank's model holds that goes into a checkpoint, by the model's own names; nothing here communicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..assignment import add_companions
from ..bookkeeping.parameter_store import ParameterStore, ShardedParameter
from .manifest import SavedTensor

_EXTRA = "_extra_state"


class Entry(NamedTuple):
    """A parameter or persistent buffer of the model.

    Attributes:
        tensor: it.
        record: the optimizer's, if it is trained by it.
        saved: how it is described in a manifest.
        family: of the ranks that share it.
    """

    tensor: Tensor
    record: ShardedParameter | None
    saved: SavedTensor
    family: int


@dataclass(frozen=True)
class Held:
    """What a model holds.

    Attributes:
        entries: parameters and persistent buffers by their first names.
        tied: other names of those that have several.
        stateful: modules with ``get_extra_state``, by what that is called in a state dict.
        families: of all of these, by name.
    """

    entries: dict[str, Entry]
    tied: dict[str, str]
    stateful: dict[str, nn.Module]
    families: dict[str, int]


def held_by(model: nn.Module, parameters: ParameterStore) -> Held:
    """What ``model`` holds; a wrapper (a compiled or boosted one) stands for what it wraps.

    Args:
        parameters: those that an optimizer trains.

    Raises:
        ValueError: one of them isn't the model's, or a tensor can't be saved.
        RuntimeError: a parameter was moved since the optimizer was constructed.
    """
    model = _unwrapped(model)
    family_of = _families(model, parameters)
    group_of: dict[Tensor, int] = {p: at for at, members in enumerate(parameters.groups) for p in members}
    names: dict[Tensor, str] = {}
    entries: dict[str, Entry] = {}
    tied: dict[str, str] = {}
    for name, tensor, is_buffer in _tensors(model):
        if tensor in names:
            tied[name] = names[tensor]
        else:
            names[tensor] = name
            record = parameters.find(tensor)
            saved = _described(name, tensor, record, group_of.get(tensor), is_buffer)
            entries[name] = Entry(tensor, record, saved, family_of.get(tensor, 0))
    for p in group_of:
        if p not in names:
            raise ValueError(
                f"model: expected all parameters of the optimizer in it, but a {tuple(p.shape)} one isn't: pass "
                "the module that holds them all (an nn.ModuleDict of several)"
            )
    stateful = _stateful(model)
    families = {name: entry.family for name, entry in entries.items()}
    families |= {alias: families[name] for alias, name in tied.items()}
    families |= {name: _family_of(module, family_of) for name, module in stateful.items()}
    return Held(entries, tied, stateful, families)


def without_values(tensor: Tensor) -> Tensor:
    """A tensor without values, of the same shape and strides, or contiguous where those leave gaps or overlap."""
    return torch.empty_like(tensor.detach(), device="meta")


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside a boosted or compiled one, whose names are those without a prefix."""
    while hasattr(model, "unwrap") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


def _tensors(model: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """Every name of every parameter and persistent buffer, and whether it is a buffer."""
    found: list[tuple[str, Tensor, bool]] = [
        (name, p, False) for name, p in model.named_parameters(remove_duplicate=False)
    ]
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}" if prefix else name, buffer, True))
    return found


def _described(
    name: str, tensor: Tensor, record: ShardedParameter | None, group: int | None, is_buffer: bool
) -> SavedTensor:
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"{name}: expected a dense tensor with values, got {tensor.layout} on {tensor.device}")
    if record is not None:
        record.check_home()
    stride = tensor.stride() if record is not None else without_values(tensor).stride()
    kind = "buffer" if is_buffer else "frozen" if record is None else "trainable"
    return SavedTensor(tuple(tensor.shape), tuple(stride), str(tensor.dtype).removeprefix("torch."), kind, group)


def _stateful(model: nn.Module) -> dict[str, nn.Module]:
    return {
        f"{prefix}.{_EXTRA}" if prefix else _EXTRA: module
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


# ---- who shares it ----


def _families(model: nn.Module, parameters: ParameterStore) -> dict[Tensor, int]:
    """The families of tensors, also of those that the optimizer, which may not have the model, doesn't know."""
    found: dict[Tensor, int] = {record.p: record.family for record in parameters}
    found |= {p: parameters.family_of(p) for members in parameters.groups for p in members}
    add_companions(found, model)
    return found


def _family_of(module: nn.Module, families: dict[Tensor, int]) -> int:
    """That of all its tensors."""
    own = {families.get(tensor, 0) for tensor in (*module.parameters(), *module.buffers())}
    return own.pop() if len(own) == 1 else 0
