"""Optimizer state as tensors: whole tensors to slices, and slices gathered to whole tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..agreement import Alike, agree
from ..bookkeeping.gradient_store import GradientStore
from ..bookkeeping.parameter_store import ParameterStore, ShardedParameter
from ..communication.collectives import ShardGroup

# One number a parameter, whatever the parameter's shape: never cut.
SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
MASTER = "master_param"

# Bytes of a message that brings many slices: what is held beside them.
WIRE_BYTES = 64 * 2**20

_STATES = Alike(
    "the same states of the optimizer", "let a hook that adds some do so on every rank, or keep them somewhere else"
)

State = dict[str, Any]
Pinned = dict[int, State]


class Slice(NamedTuple):
    """A tensor of which each rank holds its ``[s]`` elements of one parameter."""

    record: ShardedParameter
    own: Tensor

    @property
    def kind(self) -> tuple[torch.device, torch.dtype]:
        """What slices must have in common to share a message."""
        return self.record.padded.device, self.own.dtype


def slice_state(state: Mapping[str, Any], record: ShardedParameter) -> State:
    """The state of a whole parameter cut to this rank's slice; what isn't of its size stays as it is."""
    return {key: _sliced(key, value, record) for key, value in state.items()}


def _sliced(key: str, value: Any, record: ShardedParameter) -> Any:
    if isinstance(value, Tensor) and record.p32.device.type == "cpu":
        value = value.cpu()  # all of it: a step count, say, of an optimizer that was on a device
    if not isinstance(value, Tensor) or key in SCALARS or value.shape != record.p.shape:
        return value
    own = record.slice_of(value)
    # State in a 16-bit model's dtype was made for p; p32 wants its own.
    return own.to(record.p32.dtype) if value.dtype == record.p.dtype else own


def gather_slice(own: Tensor, record: ShardedParameter, group: ShardGroup) -> Tensor:
    """The whole of a ``[s]`` tensor of which each rank holds its slice: ``p``'s shape and strides, ``own``'s dtype.

    On ``p``'s device, wherever ``own`` is. Communicates: all ranks call it.
    """
    wire = torch.empty(group.size, record.split.slice_size, dtype=own.dtype, device=record.padded.device)
    wire[group.rank].copy_(own)
    return whole_of_rows(group.all_gather(wire).wait() if wire.numel() else wire, record)


def whole_of_rows(rows: Tensor, record: ShardedParameter) -> Tensor:
    """``[world_size, s]`` without its padding, as a tensor of ``p``'s shape and strides."""
    return record.restore(rows.reshape(-1)[: record.split.numel])


def whole_state_dict(
    optim: Optimizer,
    parameters: ParameterStore,
    pinned: Pinned | None = None,
    only_on_master: bool = False,
) -> State:
    """A plain torch optimizer's state dict, as one process would have it: whole tensors, on the host.

    Communicates, one tensor at a time: all ranks call it. Parameters are counted as the caller's groups had
    them, frozen ones included. fp32 masters of 16-bit parameters travel as ``master_param``.
    """
    shards = whole_state_shards(optim, parameters, math.inf, pinned, only_on_master)
    state = {place: of_place for shard, _ in shards for place, of_place in shard.items()}
    return {"state": state, "param_groups": packed_groups(optim, parameters)}


def packed_groups(optim: Optimizer, parameters: ParameterStore) -> list[State]:
    """The param groups with their settings, and their parameters as places, counted through all groups."""
    places = _places(parameters)
    return [
        {
            **{key: value for key, value in settings.items() if key != "params"},
            "params": [places[p] for p in members],
        }
        for settings, members in zip(optim.param_groups, parameters.groups, strict=True)
    ]


def _places(parameters: ParameterStore) -> dict[Tensor, int]:
    return {p: place for place, p in enumerate(p for group in parameters.groups for p in group)}


def whole_state_shards(
    optim: Optimizer,
    parameters: ParameterStore,
    max_shard_size: float,
    pinned: Pinned | None = None,
    only_on_master: bool = False,
) -> Iterator[tuple[dict[int, State], float]]:
    """``whole_state_dict``'s state by place, in pieces, each with its size in MiB; at least one piece.

    Communicates as it goes: all ranks iterate to the end.

    Args:
        max_shard_size: MiB in a piece; a parameter whose state is larger has a piece of its own.
        pinned: buffers by place and name, made at the first call, that the tensors are returned in.
        only_on_master: ranks other than the first of those that share a parameter get empty states.

    Raises:
        ValueError: ranks have different states, as where a hook of one of them has added some; on all of them.
    """
    for family, group in zip(parameters.families, parameters.shard_groups, strict=True):
        lines = [line for record in family for line in _gathered_states(optim, record)]
        agree(group, lines, None, "give its state dict", _STATES)
    places = _places(parameters)
    piece: dict[int, State] = {}
    held = 0.0
    for record in parameters:
        state = own_state(optim, record)
        if not state:
            continue
        place = places[record.p]
        kept = None if pinned is None else pinned.setdefault(place, {})
        ranks = parameters.ranks_of(record)
        whole, size = _whole_state(state, record, ranks, kept, keep=ranks.place == 0 or not only_on_master)
        if piece and held + size > max_shard_size:
            yield piece, held
            piece, held = {}, 0.0
        piece[place] = whole
        held += size
    yield piece, held


def _gathered_states(optim: Optimizer, record: ShardedParameter) -> Iterator[str]:
    """What is gathered of a parameter's state, a line each; names may differ between ranks of other families."""
    name = f"parameter {record.index} of family {record.family}" if record.family else record.name
    for key, value in own_state(optim, record).items():
        if is_slice(key, value, record):
            yield f"{key} of {name}, {value.dtype}"


def own_state(optim: Optimizer, record: ShardedParameter) -> State:
    """A parameter's state on this rank, its master among it; an optimizer without state may have masters too."""
    state = optim.state.get(record.p32, {})
    kept = (state or record.stepped) and record.keeps_more
    return {**state, MASTER: record.p32} if kept else dict(state)


def _whole_state(
    state: Mapping[str, Any], record: ShardedParameter, group: ShardGroup, pinned: State | None, keep: bool
) -> tuple[State, float]:
    """One parameter's whole state, or nothing unless ``keep``, and its size in MiB."""
    whole: State = {}
    size = 0.0
    for key, value in state.items():
        if is_slice(key, value, record):
            gathered = gather_slice(value, record, group)
            size += gathered.numel() * gathered.element_size() / 2**20
            if keep:
                whole[key] = _on_host(gathered) if pinned is None else _into_pinned(pinned, key, gathered)
            del gathered  # before the next one
        elif keep:
            whole[key] = _on_host(value.clone()) if isinstance(value, Tensor) else copy.deepcopy(value)
    return whole, size


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _into_pinned(pinned: State, key: str, tensor: Tensor) -> Tensor:
    if key not in pinned:
        pins = tensor.device.type != "cpu"
        pinned[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)
    held: Tensor = pinned[key].copy_(tensor)
    return held


def is_slice(key: str, value: Any, record: ShardedParameter) -> bool:
    """Whether a state is one number an element of the parameter, of which this rank holds its own."""
    return isinstance(value, Tensor) and key not in SCALARS and value.shape == record.p32.shape


def described(state_dict: Mapping[str, Any]) -> Iterator[str]:
    """What whole state dicts must have in common to be one, a line each.

    Raises:
        TypeError, ValueError: it isn't one.
    """
    _check_kind(state_dict)
    for at, group in enumerate(state_dict["param_groups"]):
        yield f"group {at} of {len(group['params'])} parameters"
    for place, state in state_dict["state"].items():
        values = (f"{key} {tuple(value.shape) if isinstance(value, Tensor) else ''}" for key, value in state.items())
        yield f"state of parameter {place}: {', '.join(values)}"


def _check_kind(state_dict: Mapping[str, Any]) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict: expected an optimizer's state dict, got {type(state_dict).__name__}")
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "state_dict: expected an optimizer's, with 'state' and 'param_groups', "
            f"got one with {sorted(map(str, state_dict))[:4]}"
        )


def load_whole_state_dict(
    optim: Optimizer, parameters: ParameterStore, state_dict: Mapping[str, Any], fp8: bool
) -> None:
    """Load a plain torch optimizer's state dict (or ``whole_state_dict``'s) into slices; no communication.

    Args:
        fp8: it is of a run whose parameters travelled in fp8.

    Raises:
        TypeError: not a mapping.
        ValueError: its groups or shapes aren't this optimizer's; nothing has been changed then.
    """
    _check_kind(state_dict)
    load_state_shards(optim, parameters, state_dict["param_groups"], [state_dict["state"]], fp8)


def load_state_shards(
    optim: Optimizer,
    parameters: ParameterStore,
    param_groups: Sequence[Mapping[str, Any]],
    shards: Iterable[Mapping[Any, State]],
    fp8: bool,
) -> None:
    """Load whole states that come in pieces, by place; of each piece only slices are kept.

    Args:
        fp8: they are of a run whose parameters travelled in fp8.

    Raises:
        ValueError: groups or shapes aren't this optimizer's; nothing has been changed then.
    """
    records = _records_by_place(parameters, param_groups)
    renumbered = {record: at for at, record in enumerate(in_group_order(optim, parameters))}
    slices: dict[int, State] = {}
    masters: list[tuple[ShardedParameter, Tensor]] = []
    for place, state in ((int(place), state) for shard in shards for place, state in shard.items()):
        record = records.get(place)
        if record is None:
            continue
        _check_shapes(state, record)
        if MASTER in state:
            masters.append((record, record.slice_of(state[MASTER])))
        rest = {key: value for key, value in state.items() if key != MASTER}
        if rest:
            slices[renumbered[record]] = slice_state(rest, record)
    load_slices(optim, param_groups, slices)
    for record, master in masters:
        record.offer_master(master, fp8)


def in_group_order(optim: Optimizer, parameters: ParameterStore) -> list[ShardedParameter]:
    """The records as the wrapped optimizer's groups hold their slices."""
    return [parameters.of_slice(p32) for group in optim.param_groups for p32 in group["params"]]


def load_slices(optim: Optimizer, param_groups: Sequence[Mapping[str, Any]], state: dict[int, State]) -> None:
    """Hand slices to the wrapped optimizer's own ``load_state_dict``, which casts them to ``p32``'s dtype."""
    groups = []
    count = 0
    for saved, held in zip(param_groups, optim.param_groups, strict=True):
        members = list(range(count, count + len(held["params"])))
        groups.append({**saved, "params": members})
        count += len(members)
    optim.load_state_dict({"state": state, "param_groups": groups})


def _records_by_place(
    parameters: ParameterStore, param_groups: Sequence[Mapping[str, Any]]
) -> dict[int, ShardedParameter]:
    """Which record the saved places mean; ``ValueError`` if the groups aren't this optimizer's.

    torch counts every parameter of a group. ColossalAI counts the trainable ones alone, and is understood too.
    """
    got = [len(group["params"]) for group in param_groups]
    trainable = [[p for p in members if parameters.find(p) is not None] for members in parameters.groups]
    for groups in (parameters.groups, trainable):
        if got == [len(members) for members in groups]:
            saved = (place for group in param_groups for place in group["params"])
            pairs = zip(saved, (parameters.find(p) for members in groups for p in members), strict=True)
            return {place: record for place, record in pairs if record is not None}
    expected = [len(members) for members in parameters.groups]
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


# ---- whole values of many parameters ----


def whole_slices(slices: Iterable[Slice], group: ShardGroup) -> Iterator[Tensor]:
    """``gather_slice`` of many, in order, in few messages of at most ``WIRE_BYTES`` (or one larger tensor).

    A message travels when its first tensor is asked for. Communicates: all ranks iterate to the end.
    """
    for batch in _batches(slices, group.size):
        yield from _gathered(batch, group)


def _batches(slices: Iterable[Slice], world_size: int) -> Iterator[list[Slice]]:
    """Neighbours of one device and dtype, as many as fit."""
    batch: list[Slice] = []
    room = WIRE_BYTES
    for each in slices:
        size = world_size * each.own.numel() * each.own.element_size()
        if batch and (size > room or each.kind != batch[0].kind):
            yield batch
            batch, room = [], WIRE_BYTES
        batch.append(each)
        room -= size
    if batch:
        yield batch


def _gathered(batch: Sequence[Slice], group: ShardGroup) -> list[Tensor]:
    device = batch[0].record.padded.device
    rows = [torch.empty(group.size, len(own), dtype=own.dtype, device=device) for _, own in batch]
    filled = [row for row in rows if row.numel()]
    if filled:
        group.gather([own.to(device) for _, own in batch if own.numel()], filled).wait()
    return [whole_of_rows(each, record) for each, (record, _) in zip(rows, batch, strict=True)]


def whole_masters(records: Iterable[ShardedParameter], group: ShardGroup) -> Iterator[Tensor]:
    """The whole of each ``p32``, fp32 at least. Communicates: all ranks iterate to the end."""
    return map(at_least_fp32, whole_slices((Slice(record, record.p32) for record in records), group))


def whole_gradients(
    records: Sequence[ShardedParameter], gradients: GradientStore, group: ShardGroup
) -> Iterator[Tensor | None]:
    """Averaged, unscaled gradients, fp32 at least; None where no rank has one.

    Communicates unless every rank has all rows anyway (stage 1, before the step): all ranks iterate to the end.
    """
    apart = (record for record in records if record.sum is not None and record.sum.rows is None)
    slices = ((record, gradients.averaged(record)) for record in apart)
    gathered = whole_slices((Slice(record, own) for record, own in slices if own is not None), group)
    for record in records:
        rows = gradients.averaged_rows(record)
        if rows is not None:
            yield whole_of_rows(rows, record)
        else:
            yield None if record.sum is None else next(gathered)


def whole_states(
    records: Sequence[ShardedParameter], optim: Optimizer, key: str, group: ShardGroup
) -> Iterator[Tensor | None]:
    """One of the optimizer's states: whole, floating-point ones fp32 at least; 0-d for a number; None for none.

    Communicates: all ranks iterate to the end.
    """
    values = [optim.state.get(record.p32, {}).get(key) for record in records]
    sliced = [
        Slice(record, value) for record, value in zip(records, values, strict=True) if is_slice(key, value, record)
    ]
    gathered = whole_slices(sliced, group)
    for record, value in zip(records, values, strict=True):
        yield at_least_fp32(next(gathered)) if is_slice(key, value, record) else copied_state(value, record)


def copied_state(value: Any, record: ShardedParameter) -> Tensor | None:
    """A copy of what this rank has as a state, on ``p``'s device; of a number a 0-d tensor; None: there is none."""
    if value is None:
        return None
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), device="cpu")
    return at_least_fp32(tensor.detach().to(record.padded.device, copy=True))


def at_least_fp32(tensor: Tensor) -> Tensor:
    """``tensor``, 16-bit ones as fp32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def fill_slice(own: Tensor, value: Tensor, record: ShardedParameter) -> None:
    """Let ``own`` hold ``value``, another slice ``[s]`` of any dtype, with zeros for padding."""
    start, stop = record.split.span(record.rank)
    own[: stop - start].copy_(value[: stop - start])
    own[stop - start :].zero_()
