"""Sharded state as a dict of tensors, to save and load by ``torch.distributed.checkpoint``: ``sharded_state_dict``."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sharded_optimizer import ShardedOptimizer
from .sharded import ShardedState
from .whole import FP8, State

SETTINGS = "settings"
_LENGTH_BYTES = 8


def sharded_state_dict(optimizer: ShardedOptimizer, metadata: Any = None, prefix: str = "") -> dict[str, Tensor]:
    """``LowLevelZeroOptimizer.sharded_state_dict``."""
    sharded = ShardedState(optimizer)
    return _held(optimizer, sharded) if metadata is None else _to_load_into(sharded, metadata, prefix)


def _held(optimizer: ShardedOptimizer, sharded: ShardedState) -> dict[str, Tensor]:
    """What this optimizer holds, to save."""
    room = sharded.room()
    several = len(optimizer.sharded_parameters.shard_groups) > 1
    absent = optimizer.shard_group.all_gather_object(list(room)) if several else [list(room)]
    settings = {**sharded.settings(), "shapes": sharded.shapes(), "absent": sorted(set().union(*absent))}
    settings[FP8] = optimizer.options.fp8_communication
    data = packed(settings, "the optimizer's settings")
    return {**sharded.tensors(), **room, SETTINGS: _framed(data, sharded.group_names())}


def _to_load_into(sharded: ShardedState, metadata: Any, prefix: str) -> dict[str, Tensor]:
    """Empty tensors of what was saved, and ``metadata`` tells of."""
    saved = {
        name.removeprefix(prefix): entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix)
    }
    size = getattr(saved.get(SETTINGS), "size", None)
    if size is None:
        raise ValueError(f"metadata: expected {prefix}{SETTINGS}, which sharded_state_dict() saved, found none")
    names = sharded.own_names(full.rpartition(".")[0] for full in saved)
    as_saved = {_renamed(full, names): full for full in saved}
    templates = sharded.templates({own: saved[full] for own, full in as_saved.items()})
    found = {as_saved[own]: template for own, template in templates.items()}
    return {**found, SETTINGS: torch.empty(size, dtype=torch.uint8, device="cpu")}


def load_sharded_state_dict(optimizer: ShardedOptimizer, state_dict: Mapping[str, Tensor]) -> None:
    """``LowLevelZeroOptimizer.load_sharded_state_dict``."""
    if SETTINGS not in state_dict:
        raise ValueError(f"state_dict: expected sharded_state_dict()'s, got one without {SETTINGS!r}")
    sharded = ShardedState(optimizer)
    settings = _unframed(state_dict[SETTINGS])
    names = sharded.own_names(name for group in settings["param_groups"] for name in group["params"])
    settings = renamed_settings(settings, names.__getitem__)
    _check_shapes(sharded.shapes(), {names[name]: shape for name, shape in settings["shapes"].items()})
    sharded.check(settings)
    optimizer.zero_grad()
    without = {SETTINGS, *settings["absent"]}
    tensors = {_renamed(full, names): tensor for full, tensor in state_dict.items() if full not in without}
    sharded.load(tensors, settings)
    for record, master in sharded.masters(tensors).items():
        whole = record.p32.new_zeros(record.split.slice_size)
        whole[: len(master)].copy_(master)
        record.offer_master(whole, settings.get(FP8, False))


def renamed_settings(settings: Mapping[str, Any], own: Callable[[str], str]) -> State:
    """The same settings with other names of parameters, ``own(name)``."""
    groups = [{**group, "params": list(map(own, group["params"]))} for group in settings["param_groups"]]
    states = {own(name): state for name, state in settings["states"].items()}
    plan, *others = [_renamed_plan(plan, own) for plan in (settings["plan"], *settings.get("other_plans", ()))]
    return {**settings, "param_groups": groups, "states": states, "plan": plan, "other_plans": others}


def _renamed_plan(plan: Mapping[str, Any] | None, own: Callable[[str], str]) -> State | None:
    if plan is None:
        return None
    return {**plan, **{key: list(map(own, plan[key])) for key in ("order", "repeats")}}


def packed(value: object, what: str) -> bytes:
    """``value`` as ``torch.save`` writes it.

    Raises:
        TypeError: ``torch.load(weights_only=True)`` would not take it back.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpacked(buffer.getvalue())
    except Exception as error:  # pickling calls whatever the object brings along
        reason = str(error).strip().splitlines() or [""]
        raise TypeError(
            f"{what}: expected what torch.load(weights_only=True) takes back (numbers, strings, tensors, lists, "
            f"dicts), got a {type(value).__name__} that it doesn't: {reason[0]:.300}"
        ) from error
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """The inverse of ``packed``; runs nothing that is in ``data``."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _renamed(full: str, names: Mapping[str, str]) -> str:
    """``<name>.<key>`` with the parameter's other name."""
    name, _, key = full.rpartition(".")
    return f"{names.get(name, name)}.{key}"


def _framed(data: bytes, groups: Sequence[Sequence[str]]) -> Tensor:
    """``data``, with its length before it, in as many bytes as any settings of these parameters take.

    So that what was saved after many steps has the size of what a fresh optimizer offers to load into.

    Args:
        groups: the names in each param group.
    """
    size = 2**16 + sum(2**9 + 2**4 * len(name) for names in groups for name in names)
    size += 2**12 * len(groups)
    while size < len(data) + _LENGTH_BYTES:
        size *= 2
    framed = (len(data).to_bytes(_LENGTH_BYTES, "little") + data).ljust(size, b"\0")
    return torch.frombuffer(bytearray(framed), dtype=torch.uint8)


def _check_shapes(ours: Mapping[str, list[list[int]]], saved: Mapping[str, list[list[int]]]) -> None:
    for name, (shape, stride) in ours.items():
        if name in saved and saved[name] != [shape, stride]:
            raise ValueError(
                f"{name}: expected state of shape {tuple(shape)} and strides {tuple(stride)}, got "
                f"{tuple(saved[name][0])} and {tuple(saved[name][1])}: build the model that it was saved of"
            )


def _unframed(framed: Tensor) -> Any:
    stop = _LENGTH_BYTES + int.from_bytes(framed[:_LENGTH_BYTES].tolist(), "little")
    try:
        return unpacked(bytes(framed[_LENGTH_BYTES:stop].tolist()))
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"state_dict: {SETTINGS!r} isn't what sharded_state_dict() gave: {error}") from error
