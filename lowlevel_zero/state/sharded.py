"""Sharded state: an optimizer's state by parameter name, of which each rank has its own slices alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bookkeeping.bucket_plan import PlanState
from ..bookkeeping.module_names import matched
from ..bookkeeping.parameter_store import ParameterStore, ShardedParameter
from ..bookkeeping.sharding import SCALARS
from ..communication.shard_group import ShardGroup
from ..construction import ShardedGroup
from ..loss_scaler import LossScaler
from ..optim.probe import NoProbe, first_states
from ..sharded_optimizer import ShardedOptimizer
from .flat_shards import FlatShards, Shards, local_part
from .global_names import GlobalNames
from .whole import MASTER, State, in_group_order, is_slice, load_slices, own_state, scale_as_numbers

_TRIED = 7  # elements of a parameter that is tried: no other number that a state might have


class Told(NamedTuple):
    """What a rank tells the others of experts in groups whose first rank it is.

    Attributes:
        members: of each param group those experts' names, by that of the shared parameter that they come before there;
            None: they come last.
        states: states that aren't tensors.
        plans: the groups' bucket plans.
        shapes: shape and strides by name.
    """

    members: list[dict[str | None, list[str]]]
    states: dict[str, State]
    plans: list[State | None]
    shapes: dict[str, list[list[int]]]


class ShardedState:
    """Reads and writes what an optimizer holds, as *tensors* and as *settings*, which are all the rest.

    Tensors go by ``<name>.<key>``, as in ``layers.0.weight.exp_avg``. What has one number an element of the
    parameter is made by ``shards``: by default 1-D, in memory order, without padding, whatever the world size. What
    hasn't (a step counter) is the same on every rank, and whole.

    Settings are numbers, strings, lists, dicts and small tensors: ``param_groups`` (their ``params`` are names),
    ``loss_scale``, ``plan`` (the bucket order that the first steps have taught), ``other_plans`` (those of groups of
    experts) and ``states`` (those that aren't tensors). They are the same on all ranks, and tell of all ranks' experts;
    tensors are this rank's alone.

    Communicates when it is made, where there are several shard groups: all ranks make it together.

    Args:
        optimizer: whose state it is.
        names: global ones, of all parameters of the groups, frozen ones included; None: those for messages.
        shards: makes the tensors of which each rank of a shard group has its slice.
    """

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        names: Mapping[Tensor, str] | None = None,
        shards: Callable[[ShardGroup], Shards] = FlatShards,
    ) -> None:
        self._optim = optimizer.optim
        self._groups = optimizer.sharded_groups
        self._scaler = optimizer.scaler
        self.parameters: ParameterStore = optimizer.sharded_parameters
        self._several = len(self.parameters.shard_groups) > 1
        self._names = _global_names(optimizer) if names is None else names
        self._shards = [shards(ranks) for ranks in self.parameters.shard_groups]
        self._told: list[Told] = []
        if self._several:
            self._told = self.parameters.shard_groups[0].all_gather_object(self._own_told())

    def _own_told(self) -> Told:
        led = [group for group in self._groups if group.number and group.group.place == 0]
        records = [record for group in led for record in group.records]
        members = [self._members_led(group) for group in self.parameters.groups]
        plans = [self._plan_of(group) for group in led]
        return Told(members, self._other_states(records), plans, self._shapes(records))

    def _members_led(self, group: Sequence[Tensor]) -> dict[str | None, list[str]]:
        found: dict[str | None, list[str]] = {}
        before: str | None = None
        for p in reversed(group):
            number = self.parameters.shard_group_of(p)
            if number == 0:
                before = self._names[p]
            elif self.parameters.shard_groups[number].place == 0:
                found.setdefault(before, []).insert(0, self._names[p])
        return found

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
                        self._shards[record.shard_group].of(record, value) if sliced else value.detach()
                    )
        return found

    def room(self) -> dict[str, Tensor]:
        """Zeros for the tensors that parameters without state will have after a step, as far as can be told."""
        new = [record for record in self.parameters if not own_state(self._optim, record)]
        if not new:
            return {}
        try:
            first = first_states(self._optim, _TRIED)
        except NoProbe:
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
        return self._shards[record.shard_group].of(record, own)

    def settings(self) -> State:
        """All that isn't in ``tensors``."""
        states = self._other_states(self.parameters.by_shard_group[0])
        for told in self._told:
            states.update(told.states)
        return {
            "param_groups": [
                {**_without(group, "params"), "params": names}
                for group, names in zip(self._optim.param_groups, self.group_names(), strict=True)
            ],
            "loss_scale": scale_as_numbers(self._scaler),
            "plan": next((self._plan_of(group) for group in self._groups if group.number == 0), None),
            "other_plans": [plan for told in self._told for plan in told.plans],
            "states": states,
        }

    def shapes(self) -> dict[str, list[list[int]]]:
        """Shape and strides of every parameter, by name."""
        found = self._shapes(self.parameters.by_shard_group[0])
        for told in self._told:
            found.update(told.shapes)
        return found

    def _shapes(self, records: Iterable[ShardedParameter]) -> dict[str, list[list[int]]]:
        return {self._name(record): [list(record.p.shape), list(record.p.stride())] for record in records}

    def _other_states(self, records: Iterable[ShardedParameter]) -> dict[str, State]:
        states: dict[str, State] = {}
        for record in records:
            state = own_state(self._optim, record)
            if state:
                states[self._name(record)] = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
        return states

    def _plan_of(self, group: ShardedGroup) -> State | None:
        plan = group.reducer.plan_state()
        if plan is None:
            return None
        names = [self._name(record) for record in group.records]
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
            dtype, shards = entry.properties.dtype, self._shards[record.shard_group]
            if key not in SCALARS and tuple(size) == shards.shape_of(record):
                found[full] = shards.empty_of(record, dtype, record.p32.device)
            else:
                found[full] = torch.empty(size, dtype=dtype, device="cpu")
        return found

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless ``settings`` are of an optimizer with the same parameters in the same groups."""
        got = [list(group["params"]) for group in settings["param_groups"]]
        expected = self.group_names()
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
        plans = [settings["plan"], *settings.get("other_plans", ())]
        for group in self._groups:
            group.reducer.restore_plan(self._plan(group, plans))

    def masters(self, tensors: Mapping[str, Tensor]) -> dict[ShardedParameter, Tensor]:
        """Loaded masters by record, without padding."""
        return {
            record: local_part(tensors[f"{self._name(record)}.{MASTER}"])
            for record in self.parameters
            if f"{self._name(record)}.{MASTER}" in tensors
        }

    def _plan(self, group: ShardedGroup, plans: Iterable[Mapping[str, Any] | None]) -> PlanState | None:
        """The one of the saved plans that is of these parameters, by index; None: it is to be learnt anew."""
        indices = {self._name(record): record.index for record in group.records}
        for saved in plans:
            if saved is not None and set(saved["order"]) == set(indices):
                order = [indices[name] for name in saved["order"]]
                return PlanState(**{**saved, "order": order, "repeats": [indices[name] for name in saved["repeats"]]})
        return None

    # ---- names ----

    def own_names(self, saved: Iterable[str]) -> dict[str, str]:
        """By name of a parameter as it was ``saved``, maybe with wrappers' attributes in it, its own."""
        return matched(dict.fromkeys(saved), {name for names in self.group_names() for name in names})

    def _name(self, record: ShardedParameter) -> str:
        return self._names[record.p]

    def group_names(self) -> list[list[str]]:
        """The names in each param group: the shared ones as this rank has them, with all ranks' experts between."""
        if not self._several:
            return [[self._names[p] for p in members] for members in self.parameters.groups]
        return [self._with_experts(at, members) for at, members in enumerate(self.parameters.groups)]

    def _with_experts(self, at: int, members: Iterable[Tensor]) -> list[str]:
        names: list[str] = []
        for shared in (*(self._names[p] for p in members if self.parameters.shard_group_of(p) == 0), None):
            for told in self._told:
                names += told.members[at].get(shared, ())
            if shared is not None:
                names.append(shared)
        return names


_REMEDY = "build the optimizer with the groups that it was saved with"


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


def _global_names(optimizer: ShardedOptimizer) -> dict[Tensor, str]:
    """By the names that parameters have in messages. Communicates where there are several shard groups."""
    parameters = optimizer.sharded_parameters
    own = optimizer.parameter_names()
    among_all = GlobalNames(parameters.shard_groups, {name: parameters.shard_group_of(p) for p, name in own.items()})
    return {p: among_all[name] for p, name in own.items()}
