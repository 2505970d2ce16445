"""Whole optimizer state: slices gathered to tensors as plain torch has them, and such tensors cut to slices."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_map, tree_map_with_path

from ..bookkeeping.bucket_plan import PlanState
from ..bookkeeping.module_names import parameter_names
from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..communication.agreement import Alike, together
from ..communication.failed_ranks import run_each
from ..communication.shard_group import ShardGroup
from ..loss_scaler import LossScaler, check_loss_scale
from ..optim.quantised import flat_state
from ..sharded_group import ShardedGroup
from .loading import (
    ADDED,
    CLASS,
    EXTRAS,
    FP8,
    MASTER,
    PLANS,
    STATES,
    added_to,
    all_or_nothing,
    check_class,
    lines_of_others,
    load_slices,
    restore_masters,
    states_of_no_parameter,
    warn_of_lost_states,
)
from .nested import State
from .values import Slice, is_slice, slice_state, told_by_owner, told_states, whole_slices

_GIVE, _DOING = "give its state dict", "load a state dict"
_SAVED = Alike(
    "the same state dict", "load the same file on every rank, whole (saved without only_on_master elsewhere)"
)

Pinned = dict[int, State]


class WholeState(NamedTuple):
    """Saves and loads the state of ``optim``, the wrapped optimizer, in whole tensors on the host, as plain torch does.

    ``fp8``: parameters travel in fp8. ``model``: gives names to messages.
    """

    optim: Optimizer
    parameters: ParameterStore
    groups: Sequence[ShardedGroup]
    scaler: LossScaler | None
    fp8: bool
    model: nn.Module | None

    def state_dict(self, pinned: Pinned | None = None, only_on_master: bool = False) -> State:
        """Gather the state, and return a plain torch optimizer's state dict. Communicates: all ranks call it.

        Parameters are counted as the caller's groups had them, frozen ones included. fp32 masters of 16-bit parameters
        are saved as ``master_param``; the loss scale, bucket plans and whether parameters travelled in fp8 under
        ``EXTRAS``. What the optimizer's class adds to its own state dict is there too.
        """
        shards = self.shards(math.inf, pinned, only_on_master)
        state: dict[Any, Any] = {place: of_place for shard, _ in shards for place, of_place in shard.items()}
        added = state.pop(ADDED, {})
        plans = (group.reducer.syncs.plan_state() for group in self.groups)
        extras: State = {
            CLASS: type(self.optim).__name__,
            "loss_scale": scale_as_numbers(self.scaler),
            PLANS: [None if plan is None else plan._asdict() for plan in plans],
            FP8: self.fp8,
        }
        return {**added, "state": state, "param_groups": self.packed_groups(), EXTRAS: extras}

    def packed_groups(self) -> list[State]:
        """Return the param groups with their settings, and with numbers in place of parameters. Doesn't communicate."""
        places = _places(self.parameters)
        groups = zip(self.optim.param_groups, self.parameters.groups, strict=True)
        return [{**settings, "params": [places[p] for p in members]} for settings, members in groups]

    def shards(
        self, max_shard_size: float, pinned: Pinned | None = None, only_on_master: bool = False
    ) -> Iterator[tuple[dict[int, State], float]]:
        """Gather the state tensor by tensor, and yield it in pieces with their MiB. Communicates: all ranks exhaust it.

        Args:
            max_shard_size: MiB in a piece; a parameter whose state is larger has a piece of its own.
            pinned: buffers by place and name, made at the first call, that the tensors are returned in.
            only_on_master: ranks other than the first of those that share a parameter get empty states.

        Raises:
            ValueError: ranks have different states, as where a hook of one of them has added some; on all of them.
        """
        optim, parameters = self.optim, self.parameters
        states: dict[ShardedParameter, State] = {}
        with together(parameters.shard_groups[0], _GIVE, STATES) as lines:
            # Ranks of one group don't know what came of another's.
            run_each(partial(self._find_states, number, states) for number in range(len(parameters.shard_groups)))
            lines += lines_of_others(optim)
        places = _places(parameters)
        piece: dict[int, State] = {}
        held = 0.0
        for record in parameters:
            state = states[record]
            if not state:
                continue
            place = places[record.p]
            kept = None if pinned is None else pinned.setdefault(place, {})
            ranks = parameters.shard_groups[record.shard_group]
            whole, size = _whole_state(state, record, ranks, kept, keep=ranks.group_rank == 0 or not only_on_master)
            if piece and held + size > max_shard_size:
                yield piece, held
                piece, held = {}, 0.0
            piece[place] = whole
            held += size
        others = tree_map(_on_host, states_of_no_parameter(optim))
        yield piece | others, held

    def _find_states(self, number: int, states: dict[ShardedParameter, State]) -> None:
        """Add the states of one shard group's parameters to ``states``; raise where ranks differ. Communicates."""
        records, group = self.parameters.by_shard_group[number], self.parameters.shard_groups[number]
        with together(group, _GIVE, STATES) as lines:
            held = {record: flat_state(self.optim, self.optim.state.get(record.p32, {})) for record in records}
            own = {record: with_master(state, record) for record, state in held.items()}
            told = told_by_owner(own, group.rank)
            lines += [
                f"{key} of {record.common_name}, {value.dtype}"
                for record, state in own.items()
                for key, value in state.items()
                if record.split.owner is None and is_slice(key, value, record)
            ]
        states.update(told_states(own, told, group))

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state dict, plain torch's or ``state_dict``'s, the same on every rank. Communicates.

        The caller has finished the syncs.

        Raises (on all ranks; nothing has been changed then):
            TypeError: not a mapping.
            ValueError: its class, groups or shapes aren't this optimizer's, or ranks have different ones.
        """
        with together(self.parameters.shard_groups[0], _DOING, _SAVED) as lines:
            if not isinstance(state_dict, Mapping):
                raise TypeError(
                    f"state_dict: expected what optimizer.state_dict() returned, got a {type(state_dict).__name__}"
                )
            if not {"state", "param_groups"} <= state_dict.keys():
                raise ValueError(
                    "state_dict: expected what optimizer.state_dict() returned, with the keys 'state' and "
                    f"'param_groups', got a dict with the keys {sorted(map(str, state_dict))[:4]}"
                )
            if len(self.parameters.shard_groups) == 1:
                lines += _described(state_dict)
        extras = state_dict.get(EXTRAS) or {}
        shards = [state_dict["state"], {ADDED: added_to(state_dict)}]
        self.load_shards(state_dict["param_groups"], shards, extras)
        for group, plan in zip(self.groups, extras.get(PLANS, []), strict=False):
            if plan is not None and len(plan["order"]) == len(group.records):
                group.reducer.syncs.restore_plan(PlanState(**plan))

    def load_shards(
        self,
        param_groups: Sequence[Mapping[str, Any]],
        shards: Iterable[Mapping[Any, State]],
        extras: Mapping[str, Any],
    ) -> None:
        """Load whole states piece by piece, keeping this rank's slices; if one rank fails, none loads. Communicates.

        Any number of ranks may have saved them.

        Args:
            param_groups: the groups that ``packed_groups`` returned.
            shards: the pieces that ``shards`` yielded.
            extras: what ``state_dict`` has beside: ``CLASS``, ``"loss_scale"`` (without one the present one stays)
                and ``FP8``, as far as it is known.

        Raises (on all ranks; nothing has been changed then):
            ValueError: the class, groups or shapes aren't this optimizer's, or it is no loss scale.
        """
        parameters, loss_scale = self.parameters, extras.get("loss_scale")
        slices: dict[ShardedParameter, State] = {}
        others: State = {}
        lost: list[str] = []
        keys: dict[int, Collection[str]] = {}
        with all_or_nothing(parameters.shard_groups[0], _DOING) as undo:
            if loss_scale is not None:
                check_loss_scale(loss_scale)
            places = _parameters_by_place(parameters, param_groups)
            for key, state in chain.from_iterable(shard.items() for shard in shards):
                if not str(key).isdigit():
                    others[key] = state
                    continue
                place = int(key)
                record = parameters.find(places[place]) if place in places else None
                if record is not None:
                    _check_shapes(state, record)
                    master = {MASTER: record.slice_of(state[MASTER])} if MASTER in state else {}
                    own = {key: value for key, value in state.items() if key != MASTER}
                    slices[record] = (slice_state(own, record) if record.owns_some else {}) | master
                    if own and record.split.owner is None:
                        keys[record.group] = own.keys()
                elif state and place in places:
                    lost.append(parameter_names(parameters.groups, self.model)[places[place]])
            check_class(self.optim, extras.get(CLASS), param_groups, keys)
            load_slices(self.optim, parameters, param_groups, slices, others, undo)
        if self.scaler is not None and loss_scale is not None:
            self.scaler.load_state_dict(loss_scale)
        restore_masters(parameters, slices, extras.get(FP8, False))
        warn_of_lost_states(parameters.shard_groups[0], lost)


def scale_as_numbers(scaler: LossScaler | None) -> State | None:
    """Return a loss scaler's state on the host; None: there is no scaler. Waits for the device."""
    if scaler is None:
        return None
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in scaler.state_dict().items()}


def _places(parameters: ParameterStore) -> dict[Tensor, int]:
    return {p: place for place, p in enumerate(p for group in parameters.groups for p in group)}


def with_master(state: State, record: ShardedParameter) -> State:
    """Return ``state`` as a new dict, plus any master more precise than ``p`` if there is state or was a step."""
    kept = (state or record.stepped) and record.keeps_more
    return {**state, MASTER: record.settled_master} if kept else dict(state)


def _whole_state(
    state: Mapping[str, Any], record: ShardedParameter, group: ShardGroup, pinned: State | None, keep: bool
) -> tuple[State, float]:
    """Return one parameter's gathered state (empty unless ``keep``), and the MiB gathered. Communicates."""
    size = 0.0

    def whole_value(path: Any, value: Any) -> Any:
        nonlocal size
        name = path[0].key if len(path) == 1 else keystr(path)
        if is_slice(path[0].key, value, record):
            (gathered,) = whole_slices([Slice(record, value)], group)
            size += gathered.nbytes / 2**20
            if not keep:
                return None
            if pinned is None:
                return gathered.detach().cpu()
            if name not in pinned:
                pins = gathered.device.type != "cpu"
                pinned[name] = torch.empty(gathered.shape, dtype=gathered.dtype, device="cpu", pin_memory=pins)
            return pinned[name].copy_(gathered)
        return _on_host(value)

    whole: State = tree_map_with_path(whole_value, dict(state))
    return whole if keep else {}, size


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _described(state_dict: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for the ranks to compare: each group's number of parameters, each state's place, keys and shapes."""
    for at, group in enumerate(state_dict["param_groups"]):
        yield f"group {at} of {len(group['params'])} parameters"
    for place, state in state_dict["state"].items():
        if not isinstance(state, Mapping):
            yield f"state {place}"
            continue
        values = (f"{key} {tuple(value.shape) if isinstance(value, Tensor) else ''}" for key, value in state.items())
        yield f"state of parameter {place}: {', '.join(values)}"


def _parameters_by_place(parameters: ParameterStore, param_groups: Sequence[Mapping[str, Any]]) -> dict[int, Tensor]:
    """Map each saved number to a parameter; ``ValueError`` if the groups aren't of the same sizes.

    torch counts every parameter of a group. ColossalAI counts the trainable ones alone, and is understood too.
    """
    got = [len(group["params"]) for group in param_groups]
    trainable = [[p for p in members if parameters.find(p) is not None] for members in parameters.groups]
    for groups in (parameters.groups, trainable):
        if got == [len(members) for members in groups]:
            saved = (place for group in param_groups for place in group["params"])
            return dict(zip(saved, (p for members in groups for p in members), strict=True))
    expected = [len(members) for members in parameters.groups]
    raise ValueError(
        f"state_dict: expected param groups of {expected} parameters (frozen ones included), got {got}: "
        "build the optimizer with the groups that it was saved with"
    )


def _check_shapes(state: Mapping[str, Any], record: ShardedParameter) -> None:
    """Raise ``ValueError`` if a master, or a state of an evenly split ``p``, isn't of ``p``'s shape; numbers pass."""
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
    fits = any(value.shape == record.p.shape for value in tensors.values())
    for key, value in tensors.items():
        is_number = fits and value.numel() == 1 and key != MASTER
        is_other = value.shape != record.p.shape and not is_number
        if is_other and (record.split.owner is None or key == MASTER):
            raise ValueError(
                f"{record.name}: expected {key} of its shape {tuple(record.p.shape)}, got {tuple(value.shape)}: "
                "the state dict is another model's: build the model that it was saved from, or load another"
            )
