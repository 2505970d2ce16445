"""Sharded state: an optimizer's state by parameter name; each rank holds its own slices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..bookkeeping.bucket_plan import PlanState
from ..bookkeeping.sharded_parameter import ShardedParameter, take_back
from ..bookkeeping.storages import flat_in_memory_order
from ..loss_scaler import check_loss_scale
from ..optim.quantised import block_size, is_scale, quantised_state, scales_of, stored_state
from ..optim.trials import states_of_shape
from ..optim.twins import NoProbe
from ..optimizer import LowLevelZeroOptimizer
from ..partition import WholeSplit
from ..sharded_group import ShardedGroup
from ..state.boxes import Blocks, BoxedTensor, Shape, Spans, boxed
from ..state.global_names import with_experts
from ..state.loading import CLASS, MASTER, OTHERS, PLANS, check_class, load_slices, states_of_no_parameter, takes_master
from ..state.nested import State, flattened, nested
from ..state.values import is_slice, told_state
from ..state.whole import scale_as_numbers, with_master
from .saved import SavedCheckpoint

BLOCK = "block"  # among settings: the elements that share a scale
PLAIN: State = {CLASS: None, "loss_scale": None, PLANS: (), "states": {}}  # settings that plain optimizers don't save
_TRIED = 7  # elements of a parameter that is tried: a state is unlikely to have 7 for another reason
# By parameter and key; as in torch's own state dicts by name, there may be others beside tensors.
States: TypeAlias = dict[str, dict[str, Tensor]]


class _Division(NamedTuple):
    """The division of a state among ranks: of its elements in memory order, and the whole one's shape and strides."""

    split: Spans
    shape: Shape
    stride: Shape

    def boxed(self, own: Tensor, record: ShardedParameter) -> BoxedTensor:
        """Return ``own``, this rank's part with or without padding, as a ``BoxedTensor`` of the whole state."""
        if record.split.owner is None:
            own = record.flat_slice(own)
        else:
            like = torch.empty_strided(self.shape, self.stride, device="meta")
            own = flat_in_memory_order(own, like) if record.owns_some else own.new_empty(0, device=record.p32.device)
        return boxed(own, self.split, record.rank, self.shape, self.stride)


class ShardedState:
    """The tensors and the settings of an optimizer's state, by parameter name, to save and to load.

    Tensors go by parameter and key, and are this rank's alone. What has one number an element of the parameter is a
    ``BoxedTensor`` of the parameter's shape. What hasn't (a step counter) is the same on every rank, and whole.
    Settings are the same on all ranks, and tell of all ranks' experts.

    When it is made, gathers are over, and parameters that the caller has moved lie in their storages again. Before it
    is used, ``meet`` is called, on all ranks.
    """

    def __init__(self, optimizer: LowLevelZeroOptimizer) -> None:
        optimizer.finish_gathers()
        take_back(optimizer.sharded_parameters)
        self._optimizer = optimizer
        self._optim = optimizer.optim
        self._former: dict[ShardedParameter, State] = {}  # the states that ``load`` has replaced
        self._told_here = {r: told_state(self._own_state(r)) for r in optimizer.sharded_parameters if r.owns_some}

    def meet(self, names: Mapping[Tensor, str]) -> None:
        """Exchange states that only some ranks have. Communicates where there are such states: all ranks call it.

        ``names``: global ones, of all parameters of the groups, frozen ones included.
        """
        store = self._optimizer.sharded_parameters
        self._records = {names[record.p]: record for record in store}
        self._told = {name: self._told_here[r] for name, r in self._records.items() if r.owns_some}
        apart = {name for name, r in self._records.items() if r.shard_group or r.split.owner is not None}
        own_names = [[names[p] for p in members] for members in store.groups]
        own_plans = [self._plan_of(group) for group in self._optimizer.sharded_groups]
        mine = {name: state for name, state in self._told.items() if name in apart}, own_names, own_plans
        gathered = store.shard_groups[0].all_gather_object(mine) if apart or len(store.shard_groups) > 1 else [mine]
        for told, _, _ in gathered:
            self._told = told | self._told
        plans = [plan for _, _, of_rank in gathered for plan in of_rank if plan is not None]
        self._plans = [plan for at, plan in enumerate(plans) if plan not in plans[:at]]
        # The names in each param group: the shared ones as this rank has them, with all ranks' experts between.
        self._group_names = [
            with_experts(
                [names[p] for p in members if not store.shard_group_of(p)],
                dict.fromkeys(tuple(of_rank[at]) for _, of_rank, _ in gathered),  # many ranks have the same
            )
            for at, members in enumerate(store.groups)
        ]

    @property
    def present(self) -> dict[str, list[str]]:
        """Return the names of the states that are tensors, masters among them, of all ranks' parameters."""
        return {name: [key for key, each in of.items() if isinstance(each, Tensor)] for name, of in self._told.items()}

    def _own_state(self, record: ShardedParameter) -> State:
        """Return this rank's state of a parameter, with any more precise master, nested tensors under flat names."""
        return flattened(with_master(stored_state(self._optim, self._optim.state.get(record.p32, {})), record))

    # ---- reading ----

    def tensors(self) -> States:
        """Return the states that are tensors, and the fp32 masters; slices share memory with the optimizer's.

        Raises:
            ValueError: a state's name has a dot in it.
        """
        found: States = {}
        for name, record in self._records.items():
            state = self._own_state(record) if record.owns_some else self._told[name]
            for key, value in state.items():
                if "." in key:
                    raise ValueError(f"{name}: expected states with no dot in their names, got {key!r}: rename it")
                if isinstance(value, Tensor):
                    division = self._division(key, value, state, record, record.p32.shape)
                    own = value.detach().contiguous().clone() if division is None else division.boxed(value, record)
                    found.setdefault(name, {})[key] = own
        return found

    def _division(
        self, key: str, like: Tensor, keys: Collection[str], record: ShardedParameter, of_elements: Shape
    ) -> _Division | None:
        """Return how ranks divide a state like ``like``, a block's scales included; None: each rank has all of it.

        ``of_elements`` is the shape of a state with one number for each element, be it a slice's or a whole one's.
        """
        split = record.split
        if is_scale(key, keys):
            blocks = Blocks(split, block_size(self._optim))
            return _Division(blocks, (-(-split.numel // blocks.size),), (1,))
        if not is_slice(key, like, record, of_elements):
            return None
        if split.owner is None:
            return _Division(split, tuple(record.view.shape), record.view.stride())
        whole = record.view if like.shape == record.view.shape else torch.empty(like.shape, device="meta")
        return _Division(WholeSplit(like.numel(), split.world_size, split.owner), tuple(whole.shape), whole.stride())

    def room(self) -> States:
        """Return zeros for states that a step will make of parameters without any; empty if no trial step can tell."""
        new = {name: record for name, record in self._records.items() if not self._told[name].keys() - {MASTER}}
        try:
            first = {sample: states_of_shape(self._optim, sample) for sample in {*map(_sample_shape, new.values())}}
        except NoProbe:
            return {}
        found: States = {}
        for name, record in new.items():
            sample = first[_sample_shape(record)][record.group]
            for key, each in (expected := _expected(sample, record)).items():
                is_number = record.split.owner is None and key in sample and sample[key].dim() == 0
                number = torch.zeros((), dtype=each.dtype, device="cpu")
                room = number if is_number else self._room(key, each, expected, record)
                found.setdefault(name, {})[key] = room
        return found

    def settings(self) -> State:
        """Return what isn't in ``tensors``: numbers, strings, lists, dicts and small tensors.

        They are the class's name, the block size, param groups (their ``params`` are names), the loss scale, a bucket
        plan for each shard group that has learnt one, states that aren't tensors, and states of no parameter.
        """
        groups = zip(self._optim.param_groups, self._group_names, strict=True)
        rest = {n: {key: v for key, v in of.items() if not isinstance(v, Tensor)} for n, of in self._told.items()}
        return {
            CLASS: type(self._optim).__name__,
            BLOCK: block_size(self._optim),
            "param_groups": [{**group, "params": list(names)} for group, names in groups],
            "loss_scale": scale_as_numbers(self._optimizer.scaler),
            PLANS: self._plans,
            "states": {name: of for name, of in rest.items() if of},
            **({OTHERS: others} if (others := states_of_no_parameter(self._optim)) else {}),
        }

    def _plan_of(self, group: ShardedGroup) -> State | None:
        plan, name_of = group.reducer.syncs.plan_state(), {record: name for name, record in self._records.items()}
        return None if plan is None else renamed(plan._asdict(), [name_of[record] for record in group.records])

    # ---- writing ----

    def announced(self, saved: SavedCheckpoint, settings: Mapping[str, Any]) -> dict[ShardedParameter, State]:
        """Return states for ``load``, without masters: whole ones are read, sliced ones are zeros without memory."""
        found: dict[ShardedParameter, State] = {}
        for name, record in self._records.items():
            flat, states = dict(settings["states"].get(name, {})), saved.states.get(name, {})
            for key, like in states.items():
                if key == MASTER:
                    continue
                if _is_single(record) or self._division(key, like, states, record, record.p.shape) is None:
                    whole = torch.zeros(like.shape, dtype=like.dtype, device="cpu")
                    saved.read(whole, name, key)
                    flat[key] = self._own(name, key, whole, states)
                else:
                    room = torch.zeros((), dtype=like.dtype, device=record.p32.device)
                    of_elements = record.split.owner is None or is_scale(key, states)
                    flat[key] = room.expand(record.p32.shape if of_elements else like.shape)
            found[record] = _as_held(flat, record)
        return found

    def read(self, name: str, saved: SavedCheckpoint) -> Tensor | None:
        """Read this rank's slices of a parameter's states in place of ``load``'s placeholders, and return its master.

        Their memory is that of the states that ``load`` has replaced, where those are of the same kind. None: there is
        no master, or no place for it. Doesn't communicate.
        """
        record, likes = self._records[name], saved.states.get(name, {})
        former = self._former.pop(record, {})
        if record.keeps_more:
            former[MASTER] = record.master_row
        rooms = {
            key: self._room(key, like, likes, record, former.get(key))
            for key, like in likes.items()
            if (takes_master(record) if key == MASTER else not _is_single(record))
        }
        slices = {key: room for key, room in rooms.items() if isinstance(room, BoxedTensor)}
        for key, room in slices.items():
            saved.read(room, name, key)
        master = slices.pop(MASTER, None)
        held = self._optim.state.get(record.p32, {})
        if held:
            own = {key: self._own(name, key, tensor, likes) for key, tensor in slices.items()}
            flat = flattened(held)
            for key, value in quantised_state(self._optim, record.p32, own).items():
                if isinstance(flat.get(key), Tensor):
                    flat[key] = value.to(flat[key].device, flat[key].dtype)
            held.update(_as_held(flat, record))
        return None if master is None else master.local

    def _room(
        self, key: str, like: Tensor, keys: Collection[str], record: ShardedParameter, former: object = None
    ) -> Tensor:
        """Return memory for this rank's part of a state like ``like``: a ``former`` state's if it fits, else zeros.

        It fits with the same shape, dtype and device. An undivided state gets zeros of its whole shape on the host.
        """
        division = self._division(key, like, keys, record, record.p.shape)
        if division is None:
            return torch.zeros(like.shape, dtype=like.dtype, device="cpu")
        kind = record.p32.shape if record.split.owner is None else like.shape, like.dtype, record.p32.device
        fits = isinstance(former, Tensor) and (former.shape, former.dtype, former.device) == kind
        if isinstance(former, Tensor) and fits and former.is_contiguous() and not is_scale(key, keys):
            return division.boxed(former, record)
        start, stop = division.split.span(record.rank)
        own = torch.zeros(stop - start, dtype=like.dtype, device=record.p32.device)
        return BoxedTensor(own, start, division.shape, division.stride, division.split)

    def _own(self, name: str, key: str, tensor: Tensor | None, keys: Collection[str]) -> Tensor:
        """Return a loaded state as this rank's optimizer keeps it, a padded slice or whole; ``ValueError`` if unfit."""
        record = self._records[name]
        if tensor is None:
            raise ValueError(
                f"{name}: expected a tensor to load its {key} into, got none, since the optimizer hasn't stepped yet "
                "and none of its class can be made to find out its states: take a step first, or use save_checkpoint "
                "and load_checkpoint"
            )
        if not isinstance(tensor, BoxedTensor):
            is_sliced = _is_single(record) and is_slice(key, tensor, record, record.p.shape)
            return record.shaped(record.slice_of(tensor)) if is_sliced else tensor
        own, size = tensor.local, record.row.numel()
        expected, got = (tuple(record.view.shape), record.view.stride()), (tuple(tensor.shape), tensor.strides)
        if is_scale(key, keys):
            (start, stop), block = record.split.span(record.rank), block_size(self._optim)
            own = scales_of(own, block, start - tensor.start * block, stop - start)
        elif record.split.owner is not None and (got[0] != expected[0] or key == MASTER):
            return own if key == MASTER or not record.owns_some else own.view(tensor.shape)
        elif got != expected:
            raise ValueError(
                f"{name}: expected state of shape {expected[0]} and strides {expected[1]}, got {got[0]} and {got[1]}: "
                "build the model that it was saved of"
            )
        padded = own if len(own) == size else torch.nn.functional.pad(own, (0, size - len(own)))
        return padded if key == MASTER else record.shaped(padded)

    def check(self, settings: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise ``ValueError`` unless saved class (or ``states``), block size, groups and loss scale fit the optimizer.

        ``states``: the saved states by parameter and key, which are tried if the class isn't recorded.
        """
        self._check_groups([list(group["params"]) for group in settings["param_groups"]])
        keys: dict[int, Collection[str]] = {}
        for name, record in self._records.items():
            own = states.get(name, {}).keys() - {MASTER}
            if own and record.split.owner is None:
                keys[record.group] = own
        check_class(self._optim, settings[CLASS], settings["param_groups"], keys)
        if settings.get(BLOCK, 1) not in (1, block_size(self._optim)):
            raise ValueError(
                f"expected states quantised in blocks of {block_size(self._optim)}, got blocks of {settings[BLOCK]}: "
                "build the optimizer with the block size that it was saved with"
            )
        if self._optimizer.scaler is not None and settings["loss_scale"] is not None:
            check_loss_scale(settings["loss_scale"])

    def _check_groups(self, got: Sequence[Sequence[str]]) -> None:
        """Raise ``ValueError`` unless the saved param groups ``got`` have this optimizer's parameters, by name."""
        expected = self._group_names
        if len(got) != len(expected):
            raise ValueError(f"expected {len(expected)} param groups, got {len(got)}: {_REMEDY}")
        for at, (ours, theirs) in enumerate(zip(expected, got, strict=True)):
            for name in sorted(set(ours) ^ set(theirs)):
                one, other = ("here", "when saved") if name in ours else ("when saved", "here")
                raise ValueError(f"{name}: param group {at} has this parameter {one}, and not {other}: {_REMEDY}")

    def lost(self, settings: Mapping[str, Any], saved: Mapping[str, Collection[str]]) -> list[str]:
        """Return the parameters of these groups that have ``saved`` states but are trained on no rank."""
        names = (name for group in settings["param_groups"] for name in group["params"])
        return [name for name in names if saved.get(name) and name not in self._told]

    def slices(
        self, tensors: dict[str, dict[str, Tensor]], settings: Mapping[str, Any]
    ) -> dict[ShardedParameter, State]:
        """Take each parameter's loaded states and master out of ``tensors``, and return them as this rank holds them.

        Parameter by parameter, so that few are held twice. ``ValueError`` if a tensor is missing, or of another shape.
        """
        found: dict[ShardedParameter, State] = {}
        for name, record in self._records.items():
            given = tensors.pop(name, {})
            saved = settings["present"].get(name, ()) if "present" in settings else given
            asked = [
                key for key in saved if key != MASTER or record.keeps_more or (key in given and takes_master(record))
            ]
            keys = list(given)
            own = {key: self._own(name, key, given.pop(key, None), keys) for key in asked}
            master = {MASTER: own.pop(MASTER)} if MASTER in own else {}
            found[record] = _as_held({**settings["states"].get(name, {}), **own}, record) | master
        return found

    def load(self, slices: Mapping[ShardedParameter, State], settings: Mapping[str, Any], undo: ExitStack) -> None:
        """Load param groups, and states except masters, into the wrapped optimizer; ``undo`` can restore the former."""
        held = ((record, self._optim.state.get(record.p32, {})) for record in self._records.values())
        self._former = {record: dict(state) for record, state in held if record.owns_some}
        store, others = self._optimizer.sharded_parameters, settings.get(OTHERS, {})
        load_slices(self._optim, store, settings["param_groups"], slices, others, undo)

    def load_progress(self, settings: Mapping[str, Any]) -> None:
        """Load the loss scale and the bucket plans. Gradients must have been cleared."""
        if self._optimizer.scaler is not None and settings["loss_scale"] is not None:
            self._optimizer.scaler.load_state_dict(settings["loss_scale"])
        index = {name: record.index for name, record in self._records.items()}
        for group in self._optimizer.sharded_groups:
            own = {name for name, record in self._records.items() if record.shard_group == group.number}
            plan = next((each for each in settings[PLANS] if set(each["order"]) == own), None)
            group.reducer.syncs.restore_plan(None if plan is None else PlanState(**renamed(plan, index)))


_REMEDY = "build the optimizer with the groups that it was saved with"


def _is_single(record: ShardedParameter) -> bool:
    """Return whether all ranks step a parameter of a single element, of which all but one hold padding."""
    return record.split.owner is None and record.p.numel() == 1


def _expected(first: State, record: ShardedParameter) -> dict[str, Tensor]:
    """Return a parameter's future states, without values, by a small one's, ``first``; empty if these don't tell."""
    tensors = {key: value for key, value in first.items() if isinstance(value, Tensor)}
    sample = _sample_shape(record)
    if not record.is_flat and any(value.shape not in (sample, ()) for value in tensors.values()):
        return {}  # it isn't known how their shapes follow from the parameter's
    if record.keeps_more:
        tensors[MASTER] = record.p32.new_zeros(sample)
    return {
        key: value.new_empty(record.p.shape if value.shape == sample else value.shape, device="meta")
        for key, value in tensors.items()
    }


def _sample_shape(record: ShardedParameter) -> tuple[int, ...]:
    """Return the shape of the small parameter that is stepped to find out the shapes of this one's states."""
    return (_TRIED,) if record.is_flat else (_TRIED, 6, 5, 4, 3, 2)[: record.p.dim()]


def _as_held(flat: State, record: ShardedParameter) -> State:
    """Return a state in the form in which this rank's optimizer holds it; empty if another rank owns the parameter."""
    return nested(flat) if record.owns_some else {}


def renamed(plan: Mapping[str, Any], names: Any) -> State:
    """Return a bucket plan whose parameters have other ``names``."""
    return {**plan, **{key: [names[each] for each in plan[key]] for key in ("order", "repeats")}}
