"""Sharded state: an optimizer's state by parameter name, of which each rank has its own slices alone."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .arrival_order import PlanState
from .bookkeeping.parameter_store import ParameterStore, ShardedParameter
from .flat_shards import FlatShards, local_part
from .loss_scaler import LossScaler
from .reducer import Reducer
from .state import MASTER, SCALARS, State, in_group_order, is_slice, load_slices, own_state
from .trial import NoTrial, first_states

_TRIED = 7  # elements of a parameter that is tried: no other number that a state might have


class ShardedState:
    """Reads and writes what an optimizer holds, as *tensors* and as *settings*, which are all the rest.

    Tensors go by ``<name>.<key>``, as in ``layers.0.weight.exp_avg``. What has one number an element of the
    parameter is a flat shard: 1-D, in memory order, without padding, whatever the world size. What hasn't (a step
    counter) is the same on every rank, and whole.

    Settings are numbers, strings, lists, dicts and small tensors: ``param_groups`` (their ``params`` are names),
    ``loss_scale``, ``plan`` (the bucket order that the first steps have taught) and ``states`` (those that aren't
    tensors).

    Args:
        optim: the wrapped optimizer.
        parameters: its parameters.
        shards: makes the flat shards.
        reducer: has the plan.
        scaler: has the loss scale; None: there is none.
        names: of all parameters of the groups, frozen ones included.
    """

    def __init__(
        self,
        optim: Optimizer,
        parameters: ParameterStore,
        shards: FlatShards,
        reducer: Reducer,
        scaler: LossScaler | None,
        names: Mapping[Tensor, str],
    ) -> None:
        self._optim = optim
        self.parameters = parameters
        self.shards = shards
        self._reducer = reducer
        self._scaler = scaler
        self._names = names

    # ---- reading ----

    def tensors(self) -> dict[str, Tensor]:
        """The states that are tensors, and the fp32 masters; they share memory with the optimizer's.

        Raises:
            ValueError: a state's name has a dot in it.
        """
        found: dict[str, Tensor] = {}
        for record in self.parameters:
            for key, value in own_state(self._optim, record).items():
                if "." in key:
                    raise ValueError(f"{self._name(record)}: expected states with no dot in their names, got {key!r}")
                if isinstance(value, Tensor):
                    sliced = is_slice(key, value, record)
                    found[f"{self._name(record)}.{key}"] = (
                        self.shards.wrap(value, record.split.numel) if sliced else value.detach()
                    )
        return found

    def room(self) -> dict[str, Tensor]:
        """Zeros for the tensors that parameters without state will have after a step, as far as can be told."""
        new = [record for record in self.parameters if not own_state(self._optim, record)]
        if not new:
            return {}
        try:
            first = first_states(self._optim, _TRIED)
        except NoTrial:
            return {}
        group_of = {p32: at for at, group in enumerate(self._optim.param_groups) for p32 in group["params"]}
        found: dict[str, Tensor] = {}
        for record in new:
            state = {key: value for key, value in first[group_of[record.p32]].items() if isinstance(value, Tensor)}
            for key, value in state.items():
                found[f"{self._name(record)}.{key}"] = self._zeros(key, value, record)
            if record.keeps_more:
                found[f"{self._name(record)}.{MASTER}"] = self._zeros(MASTER, record.p32.new_zeros(_TRIED), record)
        return found

    def _zeros(self, key: str, like: Tensor, record: ShardedParameter) -> Tensor:
        if key in SCALARS or like.shape != (_TRIED,):
            return torch.zeros_like(like)
        own = torch.zeros(record.split.slice_size, dtype=like.dtype, device=like.device)
        return self.shards.wrap(own, record.split.numel)

    def settings(self) -> State:
        """All that isn't in ``tensors``."""
        plan = self._reducer.plan_state()
        return {
            "param_groups": [
                {**_without(group, "params"), "params": names}
                for group, names in zip(self._optim.param_groups, self._group_names(), strict=True)
            ],
            "loss_scale": scale_as_numbers(self._scaler),
            "plan": None if plan is None else self._named(plan),
            "states": self._other_states(),
        }

    def _other_states(self) -> dict[str, State]:
        states: dict[str, State] = {}
        for record in self.parameters:
            state = own_state(self._optim, record)
            if state:
                states[self._name(record)] = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
        return states

    def _named(self, plan: PlanState) -> State:
        names = [self._name(record) for record in self.parameters]
        return {
            **plan._asdict(),
            "order": [names[index] for index in plan.order],
            "repeats": [names[index] for index in plan.repeats],
        }

    # ---- writing ----

    def templates(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Empty tensors to load into, of what was ``saved``, whether or not the optimizer has it yet.

        Args:
            saved: by ``<name>.<key>``, entries of ``torch.distributed.checkpoint``'s metadata.
        """
        records = {self._name(record): record for record in self.parameters}
        found: dict[str, Tensor] = {}
        for full, entry in saved.items():
            name, _, key = full.rpartition(".")
            record, size = records.get(name), getattr(entry, "size", None)
            if record is None or size is None or (key == MASTER and not record.keeps_more):
                continue
            numel, dtype, device = record.split.numel, entry.properties.dtype, record.p32.device
            if key not in SCALARS and tuple(size) == (numel,):
                found[full] = self.shards.empty(numel, dtype, device)
            else:
                found[full] = torch.empty(size, dtype=dtype)
        return found

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless ``settings`` are of an optimizer with the same parameters in the same groups."""
        got = [list(group["params"]) for group in settings["param_groups"]]
        expected = self._group_names()
        if len(got) != len(expected):
            raise ValueError(f"expected {len(expected)} param groups, got {len(got)}: {_REMEDY}")
        for at, (ours, theirs) in enumerate(zip(expected, got, strict=True)):
            for missing in sorted(set(ours) - set(theirs)):
                raise ValueError(f"{missing}: expected it in param group {at}, which was saved without it: {_REMEDY}")
            for surplus in sorted(set(theirs) - set(ours)):
                raise ValueError(f"{surplus}: param group {at} was saved with it, and is without it here: {_REMEDY}")
        if self._scaler is not None and settings["loss_scale"] is not None:
            LossScaler().load_state_dict(settings["loss_scale"])

    def load(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Take over states, group settings, loss scale and plan; masters are left to ``masters``.

        Checked settings and loaded templates are expected. There must be no gradients around.
        """
        by_name = _by_name(tensors)
        slices: dict[int, State] = {}
        for place, record in enumerate(in_group_order(self._optim, self.parameters)):
            name = self._name(record)
            state = {**settings["states"].get(name, {}), **_slices(by_name.get(name, {}), record)}
            if state:
                slices[place] = state
        load_slices(self._optim, settings["param_groups"], slices)
        if self._scaler is not None and settings["loss_scale"] is not None:
            self._scaler.load_state_dict(settings["loss_scale"])
        self._reducer.restore_plan(self._plan(settings["plan"]))

    def masters(self, tensors: Mapping[str, Tensor]) -> dict[ShardedParameter, Tensor]:
        """Loaded masters by record, without padding."""
        return {
            record: local_part(tensors[f"{self._name(record)}.{MASTER}"])
            for record in self.parameters
            if f"{self._name(record)}.{MASTER}" in tensors
        }

    def _plan(self, saved: Mapping[str, Any] | None) -> PlanState | None:
        """The saved plan by index; None where it is of other parameters: then it is learnt anew."""
        indices = {self._name(record): record.index for record in self.parameters}
        if saved is None or set(saved["order"]) != set(indices):
            return None
        order = [indices[name] for name in saved["order"]]
        return PlanState(**{**saved, "order": order, "repeats": [indices[name] for name in saved["repeats"]]})

    # ---- names ----

    def _name(self, record: ShardedParameter) -> str:
        return self._names[record.p]

    def _group_names(self) -> list[list[str]]:
        return [[self._names[p] for p in members] for members in self.parameters.groups]


_REMEDY = "build the optimizer with the groups that it was saved with"


def scale_as_numbers(scaler: LossScaler | None) -> State | None:
    """A loss scaler's state on the host; None of none. Waits for the device."""
    if scaler is None:
        return None
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in scaler.state_dict().items()}


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


def _by_name(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition(".")
        found.setdefault(name, {})[key] = tensor
    return found


def _slices(tensors: Mapping[str, Tensor], record: ShardedParameter) -> State:
    """One parameter's states as this rank's optimizer holds them: slices ``[s]``, and what is whole."""
    return {
        key: _padded(local_part(tensor), record) if hasattr(tensor, "to_local") else tensor
        for key, tensor in tensors.items()
        if key != MASTER
    }


def _padded(own: Tensor, record: ShardedParameter) -> Tensor:
    """``[s]``: a slice with zeros for its padding."""
    if len(own) == record.split.slice_size:
        return own
    row = own.new_zeros(record.split.slice_size)
    row[: len(own)].copy_(own)
    return row


def _without(settings: Mapping[str, Any], key: str) -> State:
    return {name: value for name, value in settings.items() if name != key}
