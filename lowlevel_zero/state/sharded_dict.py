"""Sharded state for one's own ``torch.distributed.checkpoint`` calls, as one dict: ``sharded_state_dict``."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sharded_optimizer import ShardedOptimizer
from .global_names import GlobalNames
from .sharded import ShardedState, States
from .whole import FP8, State, offer_masters

SETTINGS = "settings"
_LENGTH_BYTES = 8


def sharded_state_dict(optimizer: ShardedOptimizer, metadata: Any = None, prefix: str = "") -> dict[str, Tensor]:
    """``LowLevelZeroOptimizer.sharded_state_dict``."""
    if metadata is not None:
        return _to_load_into(optimizer, metadata, prefix)
    state, settings = held(optimizer)
    data = packed(settings, "the optimizer's settings")
    return {**_flat(state), SETTINGS: _framed(data, [group["params"] for group in settings["param_groups"]])}


def load_sharded_state_dict(optimizer: ShardedOptimizer, state_dict: Mapping[str, Tensor]) -> None:
    """``LowLevelZeroOptimizer.load_sharded_state_dict``."""
    if SETTINGS not in state_dict:
        raise ValueError(f"state_dict: expected sharded_state_dict()'s, got one without {SETTINGS!r}")
    take_over(optimizer, _nested(state_dict), _unframed(state_dict[SETTINGS]))


# ---- what an optimizer holds, as tensors by parameter and key, and settings ----


def held(optimizer: ShardedOptimizer) -> tuple[States, State]:
    """What it holds, with zeros for states that a step is going to make, and its settings, which name those.

    Masters have followed what others wrote into parameters. To save, or to load into. Communicates with experts.

    Raises:
        ValueError: a state's name has a dot in it.
    """
    optimizer.finish_gathers()
    for record in optimizer.sharded_parameters:
        record.follow_edits()
    sharded = ShardedState(optimizer, _names(optimizer))
    settings = {**sharded.settings(), "present": sharded.present(), FP8: optimizer.options.fp8_communication}
    return {**sharded.tensors(), **sharded.room()}, settings


def take_over(optimizer: ShardedOptimizer, tensors: Mapping[str, Mapping[str, Tensor]], settings: State) -> None:
    """Load what ``held`` gave, and was filled. Gradients are cleared. Communicates with experts.

    Raises:
        ValueError: it is of other parameters, shapes, strides or groups; nothing has been changed then.
    """
    names = (name for group in settings["param_groups"] for name in group["params"])
    sharded = ShardedState(optimizer, _names(optimizer, names))
    sharded.check(settings)
    slices = sharded.slices(tensors, settings)
    optimizer.zero_grad()
    sharded.load(slices, settings)
    offer_masters(slices, settings[FP8])


def _names(optimizer: ShardedOptimizer, saved: Iterable[str] = ()) -> dict[Tensor, str]:
    """The global names of parameters, as in messages, or as they were ``saved``. Communicates with experts."""
    parameters, own = optimizer.sharded_parameters, optimizer.parameter_names()
    numbers = {name: parameters.shard_group_of(p) for p, name in own.items()}
    names = GlobalNames(parameters.shard_groups, numbers, dict.fromkeys(saved))
    return {p: names[name] for p, name in own.items()}


def _to_load_into(optimizer: ShardedOptimizer, metadata: Any, prefix: str) -> dict[str, Tensor]:
    """Empty tensors of what was saved, and ``metadata`` tells of."""
    described = metadata.state_dict_metadata.items()
    saved = {name.removeprefix(prefix): each for name, each in described if name.startswith(prefix)}
    size = getattr(saved.get(SETTINGS), "size", None)
    if size is None:
        raise ValueError(f"metadata: expected {prefix}{SETTINGS}, which sharded_state_dict() saved, found none")
    tensors = {name: each for name, each in saved.items() if hasattr(each, "size")}
    by_name = _nested(
        {name: torch.empty(each.size, dtype=each.properties.dtype, device="meta") for name, each in tensors.items()}
    )
    templates = ShardedState(optimizer, _names(optimizer, by_name)).templates(by_name)
    return {**_flat(templates), SETTINGS: torch.empty(size, dtype=torch.uint8, device="cpu")}


def _flat(state: States) -> dict[str, Tensor]:
    return {f"{name}.{key}": tensor for name, of_name in state.items() for key, tensor in of_name.items()}


def _nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for full, value in flat.items():
        name, _, key = full.rpartition(".")
        if name:  # not SETTINGS
            found.setdefault(name, {})[key] = value
    return found


# ---- settings as bytes ----


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


def _unframed(framed: Tensor) -> Any:
    stop = _LENGTH_BYTES + int.from_bytes(framed[:_LENGTH_BYTES].tolist(), "little")
    try:
        return unpacked(bytes(framed[_LENGTH_BYTES:stop].tolist()))
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"state_dict: {SETTINGS!r} isn't what sharded_state_dict() gave: {error}") from error
