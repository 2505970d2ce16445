"""Optimizer state as tensors: whole tensors to slices, and slices gathered to whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .bookkeeping.parameter_store import ParameterStore, ShardedParameter
from .collectives import ShardGroup

# One number a parameter, whatever the parameter's shape: never cut.
SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
MASTER = "master_param"

State = dict[str, Any]


def slice_state(state: Mapping[str, Any], record: ShardedParameter) -> State:
    """The state of a whole parameter cut to this rank's slice; what isn't of its size stays as it is."""
    return {key: _sliced(key, value, record) for key, value in state.items()}


def _sliced(key: str, value: Any, record: ShardedParameter) -> Any:
    if not isinstance(value, Tensor) or key in SCALARS or value.shape != record.p.shape:
        return value
    own = record.slice_of(value)
    # State in a 16-bit model's dtype was made for p; p32 wants its own.
    return own.to(record.p32.dtype) if value.dtype == record.p.dtype else own


def gather_slice(own: Tensor, record: ShardedParameter, group: ShardGroup) -> Tensor:
    """The whole of a ``[s]`` tensor of which each rank holds its slice: ``p``'s shape and strides, ``own``'s dtype.

    Communicates: all ranks call it.
    """
    wire = torch.empty(group.size, record.split.slice_size, dtype=own.dtype, device=own.device)
    wire[group.rank].copy_(own)
    return whole_of_rows(group.all_gather(wire).wait(), record)


def whole_of_rows(rows: Tensor, record: ShardedParameter) -> Tensor:
    """``[world_size, s]`` without its padding, as a tensor of ``p``'s shape and strides."""
    return record.restore(rows.reshape(-1)[: record.split.numel])


def whole_state_dict(optim: Optimizer, parameters: ParameterStore, group: ShardGroup) -> State:
    """A plain torch optimizer's state dict, as one process would have it: whole tensors on every rank.

    Communicates, one tensor at a time: all ranks call it. Parameters are counted as the caller's groups had
    them, frozen ones included. fp32 masters of 16-bit parameters travel as ``master_param``.
    """
    places = {p: place for place, p in enumerate(p for group in parameters.groups for p in group)}
    state: dict[int, State] = {}
    for record in parameters:
        whole = _whole_state(optim.state.get(record.p32, {}), record, group)
        if whole:
            state[places[record.p]] = whole
    groups = [
        {
            **{key: value for key, value in settings.items() if key != "params"},
            "params": [places[p] for p in members],
        }
        for settings, members in zip(optim.param_groups, parameters.groups, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _whole_state(state: Mapping[str, Any], record: ShardedParameter, group: ShardGroup) -> State:
    whole = {
        key: gather_slice(value, record, group) if _is_slice(key, value, record) else value
        for key, value in state.items()
    }
    if state and not record.shares_storage:
        whole[MASTER] = gather_slice(record.p32, record, group)
    return whole


def _is_slice(key: str, value: Any, record: ShardedParameter) -> bool:
    return isinstance(value, Tensor) and key not in SCALARS and value.shape == record.p32.shape


def load_whole_state_dict(optim: Optimizer, parameters: ParameterStore, state_dict: Mapping[str, Any]) -> None:
    """Load a plain torch optimizer's state dict (or ``whole_state_dict``'s) into slices; no communication.

    Raises:
        ValueError: its groups or shapes aren't this optimizer's; nothing has been changed then.
    """
    _check_groups(parameters, state_dict)
    by_place: dict[int, State] = {}
    saved = [place for group in state_dict["param_groups"] for place in group["params"]]
    members = [p for group in parameters.groups for p in group]
    masters: list[tuple[ShardedParameter, Tensor]] = []
    renumbered = {record.p32: at for at, record in enumerate(_in_group_order(optim, parameters))}
    for place, p in zip(saved, members, strict=True):
        record = parameters.find(p)
        if record is None or place not in state_dict["state"]:
            continue
        state = dict(state_dict["state"][place])
        _check_shapes(state, record)
        if MASTER in state:
            masters.append((record, state.pop(MASTER)))
        by_place[renumbered[record.p32]] = slice_state(state, record)
    _load_slices(optim, state_dict, by_place)
    for record, master in masters:
        record.p32.copy_(record.slice_of(master))


def _in_group_order(optim: Optimizer, parameters: ParameterStore) -> list[ShardedParameter]:
    return [parameters.of_slice(p32) for group in optim.param_groups for p32 in group["params"]]


def _load_slices(optim: Optimizer, state_dict: Mapping[str, Any], state: dict[int, State]) -> None:
    """Hand slices to the wrapped optimizer's own ``load_state_dict``, which casts them to ``p32``'s dtype."""
    groups = []
    count = 0
    for saved, held in zip(state_dict["param_groups"], optim.param_groups, strict=True):
        members = list(range(count, count + len(held["params"])))
        groups.append({**saved, "params": members})
        count += len(members)
    optim.load_state_dict({"state": state, "param_groups": groups})


def _check_groups(parameters: ParameterStore, state_dict: Mapping[str, Any]) -> None:
    expected = [len(group) for group in parameters.groups]
    got = [len(group["params"]) for group in state_dict["param_groups"]]
    if got != expected:
        raise ValueError(
            f"state_dict: expected param groups of {expected} parameters (frozen ones included), got {got}: "
            "build the optimizer with the groups that it was saved with"
        )


def _check_shapes(state: Mapping[str, Any], record: ShardedParameter) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape != record.p.shape:
            raise ValueError(
                f"{record.name}: expected {key} of its shape {tuple(record.p.shape)}, got {tuple(value.shape)}: "
                "the state dict is another model's"
            )
