"""Sharded state: an optimizer's state by parameter name, of which each rank has its own slices alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..bookkeeping.bucket_plan import PlanState
from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..bookkeeping.sharding import SCALARS
from ..construction import ShardedGroup
from ..loss_scaler import LossScaler
from ..optim.probe import NoProbe, first_states
from ..sharded_optimizer import ShardedOptimizer
from .boxes import BoxedTensor, boxed
from .global_names import from_leaders, of_all_ranks
from .values import is_slice
from .whole import MASTER, State, load_slices, own_state, scale_as_numbers

# By parameter and key; as in torch's own state dicts by name, there may be others beside tensors.
States: TypeAlias = dict[str, dict[str, Tensor]]

_TRIED = 7  # elements of a parameter that is tried: no other number that a state might have


class ShardedState:
    """Reads and writes what an optimizer holds, as *tensors* and as *settings*, which are all the rest.

    Tensors go by parameter and key. What has one number an element of the parameter is a ``BoxedTensor`` of the
    parameter's shape, whatever the world size. What hasn't (a step counter) is the same on every rank, and whole.

    Settings are numbers, strings, lists, dicts and small tensors: ``param_groups`` (their ``params`` are names),
    ``loss_scale``, ``plan`` (the bucket order that the first steps have taught), ``other_plans`` (those of groups of
    experts) and ``states`` (those that aren't tensors). They are the same on all ranks, and tell of all ranks' experts;
    tensors are this rank's alone.

    Communicates when it is made, where there are several shard groups: all ranks make it together.

    Args:
        optimizer: whose state it is.
        names: global ones, of all parameters of the groups, frozen ones included.
    """

    def __init__(self, optimizer: ShardedOptimizer, names: Mapping[Tensor, str]) -> None:
        self._optimizer = optimizer
        self._optim = optimizer.optim
        self._groups = optimizer.sharded_groups
        self._scaler = optimizer.scaler
        self._parameters: ParameterStore = optimizer.sharded_parameters
        self._names = names
        store = self._parameters
        led = {0, *(group.number for group in self._groups if group.group.group_rank == 0)}
        own_groups = [[names[p] for p in members if store.shard_group_of(p) in led] for members in store.groups]
        own_plans = [self._plan_of(group) for group in self._groups if group.number in led - {0}]
        told = from_leaders(store.shard_groups, (own_groups, own_plans))
        self._other_groups, self._other_plans = [groups for groups, _ in told], [plan for _, of in told for plan in of]
        numbers = {self._name(record): record.shard_group for record in store}
        described = {self._name(record): _described(own_state(self._optim, record)) for record in store}
        self._described = of_all_ranks(store.shard_groups, described, numbers)

    # ---- reading ----

    def tensors(self) -> States:
        """The states that are tensors, and the fp32 masters; they share memory with the optimizer's.

        Raises:
            ValueError: a state's name has a dot in it.
        """
        found: States = {}
        for record in self._parameters:
            for key, value in own_state(self._optim, record).items():
                if "." in key:
                    raise ValueError(f"{self._name(record)}: expected states with no dot in their names, got {key!r}")
                if isinstance(value, Tensor):
                    sliced = is_slice(key, value, record)
                    state = found.setdefault(self._name(record), {})
                    state[key] = _boxed(value, record) if sliced else value.detach()
        return found

    def room(self) -> States:
        """Zeros for the tensors that parameters without state will have after a step, as far as can be told."""
        new = [record for record in self._parameters if not own_state(self._optim, record)]
        try:
            first = first_states(self._optim, _TRIED) if new else []
        except NoProbe:
            return {}
        group_of = {p32: at for at, group in enumerate(self._optim.param_groups) for p32 in group["params"]}
        found = self.templates({self._name(record): _expected(first[group_of[record.p32]], record) for record in new})
        for each in (each for state in found.values() for each in state.values()):
            (each.local if isinstance(each, BoxedTensor) else each).zero_()
        return found

    def present(self) -> dict[str, list[str]]:
        """The names of the states that are tensors, masters among them, of all ranks' parameters that have some."""
        return {name: tensors for name, (tensors, _) in self._described.items() if tensors}

    def settings(self) -> State:
        """All that isn't in ``tensors``."""
        return {
            "param_groups": [
                {**{key: value for key, value in group.items() if key != "params"}, "params": names}
                for group, names in zip(self._optim.param_groups, self.group_names(), strict=True)
            ],
            "loss_scale": scale_as_numbers(self._scaler),
            "plan": next((self._plan_of(group) for group in self._groups if group.number == 0), None),
            "other_plans": self._other_plans,
            "states": {name: others for name, (_, others) in self._described.items() if others},
        }

    def _plan_of(self, group: ShardedGroup) -> State | None:
        plan = group.reducer.plan_state()
        return None if plan is None else renamed(plan._asdict(), [self._name(record) for record in group.records])

    # ---- writing ----

    def templates(self, saved: Mapping[str, Mapping[str, Tensor]]) -> States:
        """Tensors to load into, of what was ``saved``, which has shapes and dtypes alone, be it there yet or not.

        What has the parameter's shape is this rank's slice of it.
        """
        found: States = {}
        for record in self._parameters:
            of_record = saved.get(self._name(record), {}).items()
            state = {key: each for key, each in of_record if key != MASTER or record.keeps_more}
            if state:
                found[self._name(record)] = {key: _template(key, each, record) for key, each in state.items()}
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

    def slices(
        self, tensors: Mapping[str, Mapping[str, Tensor]], settings: Mapping[str, Any]
    ) -> dict[ShardedParameter, State]:
        """The states of each parameter as this rank's optimizer holds them, and masters, ``[s]``.

        Raises:
            ValueError: a tensor is of another shape, or in another memory order, or isn't among those that were given.
        """
        found: dict[ShardedParameter, State] = {}
        for record in self._parameters:
            name = self._name(record)
            given = tensors.get(name, {})
            saved = given if "present" not in settings else settings["present"].get(name, ())
            keys = [key for key in saved if key != MASTER or record.keeps_more]
            of_record = {key: _own(name, key, given.get(key), record) for key in keys}
            found[record] = {**settings["states"].get(name, {}), **of_record}
        return found

    def load(self, slices: Mapping[ShardedParameter, State], settings: Mapping[str, Any]) -> None:
        """Take over states, but for masters, group settings, loss scale and plan.

        Checked settings are expected. There must be no gradients around.
        """
        load_slices(self._optimizer, settings["param_groups"], slices, settings["loss_scale"])
        plans = [settings["plan"], *settings.get("other_plans", ())]
        for group in self._groups:
            group.reducer.restore_plan(self._plan(group, plans))

    def _plan(self, group: ShardedGroup, plans: Iterable[Mapping[str, Any] | None]) -> PlanState | None:
        """The one of the saved plans that is of these parameters, by index; None: it is to be learnt anew."""
        indices = {self._name(record): record.index for record in group.records}
        for saved in plans:
            if saved is not None and set(saved["order"]) == set(indices):
                return PlanState(**renamed(saved, indices))
        return None

    # ---- names ----

    def _name(self, record: ShardedParameter) -> str:
        return self._names[record.p]

    def group_names(self) -> list[list[str]]:
        """The names in each param group: the shared ones as this rank has them, with all ranks' experts between."""
        store = self._parameters
        shared = [[self._names[p] for p in members if store.shard_group_of(p) == 0] for members in store.groups]
        return [_with_experts(names, [told[at] for told in self._other_groups]) for at, names in enumerate(shared)]


_REMEDY = "build the optimizer with the groups that it was saved with"


def _with_experts(shared: Sequence[str], told: Iterable[Iterable[str]]) -> list[str]:
    """The ``shared`` names, and before each the others that come before it in a list that was ``told``."""
    before: dict[str | None, list[str]] = {name: [] for name in (*shared, None)}
    for names in told:
        experts: list[str] = []
        for name in (*names, None):
            if name is None or name in before:
                before[name] += experts
                experts = []
            else:
                experts.append(name)
    return [name for at in before for name in (*before[at], at) if name is not None]


def _described(state: State) -> tuple[list[str], State]:
    """The names of its tensors, and the rest."""
    tensors = [key for key, value in state.items() if isinstance(value, Tensor)]
    return tensors, {key: value for key, value in state.items() if key not in tensors}


def _expected(first: State, record: ShardedParameter) -> dict[str, Tensor]:
    """Without values, the tensors of a whole state, of which ``first`` is one of a parameter of ``_TRIED`` elements."""
    tensors = {key: value for key, value in first.items() if isinstance(value, Tensor)}
    if record.keeps_more:
        tensors[MASTER] = record.p32.new_zeros(_TRIED)
    return {
        key: value.new_empty(record.p.shape if value.shape == (_TRIED,) else value.shape, device="meta")
        for key, value in tensors.items()
    }


def _template(key: str, like: Tensor, record: ShardedParameter) -> Tensor:
    if key in SCALARS or like.shape != record.p.shape:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return _boxed(torch.empty(record.split.slice_size, dtype=like.dtype, device=record.p32.device), record)


def _boxed(own: Tensor, record: ShardedParameter) -> BoxedTensor:
    return boxed(own, record.split, record.rank, record.p.shape, record.p.stride())


def _own(name: str, key: str, tensor: Tensor | None, record: ShardedParameter) -> Tensor:
    """A state as this rank's optimizer holds it: a slice ``[s]`` with zeros for its padding, or what is whole."""
    if tensor is None:
        raise ValueError(
            f"{name}: the checkpoint has its {key}, and this optimizer has offered no tensor to load it into: it "
            "hasn't stepped yet, and no other of its class can be made to find out what states it will have; take a "
            "step first, or use save_checkpoint and load_checkpoint"
        )
    if not isinstance(tensor, BoxedTensor):
        return tensor
    expected, got = (tuple(record.p.shape), record.p.stride()), (tuple(tensor.shape), tensor.strides)
    if got != expected:
        raise ValueError(
            f"{name}: expected state of shape {expected[0]} and strides {expected[1]}, got {got[0]} and {got[1]}: "
            "build the model that it was saved of"
        )
    own, size = tensor.local, record.split.slice_size
    return own if len(own) == size else torch.nn.functional.pad(own, (0, size - len(own)))


def renamed(plan: Mapping[str, Any], names: Any) -> State:
    """A bucket plan whose parameters are called by other ``names``."""
    return {**plan, **{key: [names[each] for each in plan[key]] for key in ("order", "repeats")}}
