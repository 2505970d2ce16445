"""The contents of a checkpoint: a model's tensors and its optimizers' states by name, to save and to load into."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..bookkeeping.module_names import joined, named_modules, named_tensors
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..communication.agreement import agree_apart
from ..communication.shard_group import ShardGroup
from ..experts.assignment import add_companions
from ..optimizer import LowLevelZeroOptimizer
from ..partition import END_TO_END
from ..state.boxes import BoxedTensor, boxed
from ..state.global_names import from_all_ranks, global_names
from .manifest import BUFFER, FROZEN, TRAINABLE, UNTRAINED, Manifest, SavedTensor
from .objects import Objects
from .optimizers import Name, called
from .plan import Share
from .saved import SavedCheckpoint
from .sharded_state import ShardedState

_EXTRA = "_extra_state"
_BUILD_ANEW = (
    "build the model that was saved, or load another checkpoint; to load a part of one into a changed model, see "
    "docs/checkpoints.md"
)
_SHARE_ALIKE = (
    "build the model that was saved, and share experts out among as many groups, or, before saving, give them their "
    "numbers in the whole model, which loads at any layout"
)


class Entry(NamedTuple):
    """A parameter or persistent buffer of the model, with its description for the manifest.

    ``record`` is that of the optimizer that trains it; None: none does. ``ranks`` share it, the group of this index.
    """

    tensor: Tensor
    record: ShardedParameter | None
    saved: SavedTensor
    shard_group: int
    ranks: ShardGroup

    def writers(self, number: int) -> list[int]:
        """Return each part's writer, a global rank, replicas in turn by ``number``; one for all if it isn't trained.

        Ranks may have different values of a tensor that isn't trained: the first rank that shares it writes all of it.
        """
        if self.record is None:
            return dist.get_process_group_ranks(self.ranks.group)[:1]
        return [holders[number % len(holders)] for holders in self.ranks.holders]

    def boxed(self, row: Tensor) -> BoxedTensor:
        """Return this rank's ``row`` of a trained parameter, without padding, as boxes that share its memory."""
        assert self.record is not None
        return boxed(row, self.record.split, self.ranks.rank, self.saved.shape, self.saved.stride)


class Contents:
    """The tensors of a model by name, and its optimizers' states with the same names.

    Complete when all ranks have met (``meet``): names are global ones then, before that the model's own.

    Args:
        model: the module. Wrappers around it, or around modules in it, don't show in names.
        optimizers: each trains some of its parameters, and no two the same.

    Attributes:
        entries: this rank's parameters and persistent buffers by their first names.
        saved: every rank's, as a manifest describes them, those that are left out too.
        tied: every rank's other names of tensors that have several.
        experts: the tensors that not all ranks have.
        excluded: the entries of ``saved`` that are left out.

    Raises:
        ValueError: an optimizer has a parameter that isn't the model's, or is another's, or a tensor can't be saved.
        RuntimeError: a parameter was moved since its optimizer was constructed.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[Name, LowLevelZeroOptimizer]) -> None:
        self.states_of = {name: ShardedState(optimizer) for name, optimizer in optimizers.items()}
        self.optimizers = optimizers
        first = next(iter(optimizers.values()))
        self.group = first.shard_group
        apart = (group for each in optimizers.values() for group in each.sharded_parameters.shard_groups[1:])
        self.groups = [self.group, *{_ranks_of(group): group for group in apart}.values()]
        self.entries: dict[str, Entry] = {}
        self.tied: dict[str, str] = {}
        self._enter(model)
        self._stateful = _stateful(model)
        self.extra_states = {name: module.get_extra_state() for name, module in self._stateful.items()}
        self._number_of = {name: entry.shard_group for name, entry in self.entries.items()}
        self._number_of |= {alias: self._number_of[name] for alias, name in self.tied.items()}
        self._number_of |= {name: _number_around(name, self._number_of) for name in self._stateful}

    def _enter(self, model: nn.Module) -> None:
        """Fill ``entries`` and ``tied``; raise if the model lacks a tensor that an optimizer trains."""
        owners = _owners(self.optimizers)
        number = {_ranks_of(group): at for at, group in enumerate(self.groups) if at}
        stores = [optimizer.sharded_parameters for optimizer in self.optimizers.values()]
        known = {p: store.shard_groups[store.shard_group_of(p)] for store in stores for p in store.listed}
        known |= {p: owner.ranks for p, owner in owners.items()}
        number_of = {p: number.get(_ranks_of(each), 0) for p, each in known.items()}
        add_companions(number_of, model)
        names: dict[Tensor, str] = {}
        for name, tensor in named_tensors(model, persistent=True):
            if tensor in names:
                self.tied[name] = names[tensor]
            elif name in self.entries:
                raise ValueError(
                    f"{name}: expected one tensor of this name, got a wrapper's and one of the module that it wraps: "
                    "rename the attribute of one of them"
                )
            else:
                names[tensor] = name
                at = number_of.get(tensor, 0)
                owner = owners.get(tensor, _Owner(None, None, None, self.groups[at]))
                self.entries[name] = Entry(tensor, owner.record, _described(name, tensor, owner), at, owner.ranks)
        for p, owner in owners.items():
            if p not in names:
                name = self.optimizers[owner.optimizer].parameter_names()[p]
                raise ValueError(
                    f"model: expected the parameters that the optimizer trains, got none that is its {name}, "
                    f"{tuple(p.shape)}: pass the module that holds them all (an nn.ModuleDict of several); if a layer "
                    "was replaced after the optimizer was constructed, construct a new optimizer over "
                    "model.parameters(), which trains the new layer"
                )

    def meet(self, doing: str, exclude_frozen: bool = False) -> None:
        """Exchange names and states that only some ranks have, and make names global. Communicates if there are any.

        Args:
            doing: the call in words, as ``agree`` takes it.
            exclude_frozen: leave frozen parameters out.

        Raises:
            ValueError: ranks that share experts differ in them; on all ranks alike, as ``agree`` does.
        """
        if len(self.groups) > 1:
            agree_apart(self.groups, [self.lines(number) for number in range(1, len(self.groups))], doing)
        names, self.experts = global_names(self.groups, self._number_of)
        self.entries = {names[name]: entry for name, entry in self.entries.items()}
        self._stateful = {names[name]: module for name, module in self._stateful.items()}
        name_of = {entry.tensor: name for name, entry in self.entries.items()}
        for each in self.states_of.values():
            each.meet(name_of)
        self.saved = {name: entry.saved for name, entry in self.entries.items()}
        self.tied = {names[alias]: names[name] for alias, name in self.tied.items()}
        self.extra_states = {names[name]: state for name, state in self.extra_states.items()}
        own: list[dict[str, Any]] = [self.saved, self.tied, self.extra_states]
        apart = {names[name] for name, number in self._number_of.items() if number}
        for of_rank in from_all_ranks(self.groups, [{n: each[n] for n in each if n in apart} for each in own]):
            for known, others in zip(own, of_rank, strict=True):
                known.update({name: value for name, value in others.items() if name not in known})
        self.excluded = {n: each for n, each in self.saved.items() if exclude_frozen and each.kind == FROZEN}

    def lines(self, number: int = 0) -> list[str]:
        """Return lines that describe the tensors of the shard group of this index, for its ranks to compare."""
        first = [f"{len(self.groups)} groups that share parameters"] if number == 0 else []
        return first + [f"{name} {entry.saved}" for name, entry in self.entries.items() if entry.shard_group == number]

    # ---- saving ----

    def share(self) -> Share:
        """Return the plan of the tensors and the values that this rank writes, slices uncopied. Doesn't communicate."""
        states = {name: state for each in self.states_of.values() for name, state in each.tensors().items()}
        place = {rank: at for at, rank in enumerate(dist.get_process_group_ranks(self.group.group))}
        share = Share(self.group.group_rank, tied={("model", a): ("model", name) for a, name in self.tied.items()})
        for number, (name, entry) in enumerate(self.entries.items()):
            if name not in self.excluded:
                writers = [place[rank] for rank in entry.writers(number)]
                own = entry.tensor if entry.record is None else entry.boxed(entry.record.row)
                share.add(("model", name), own, writers, entry.shard_group > 0)
                for key, each in states.get(name, {}).items():
                    share.add(("optim", "state", name, key), each, writers, entry.shard_group > 0)
        return share

    # ---- whether it is the same model ----

    def check_same(self, checkpoint: SavedCheckpoint, schedulers: Mapping[Name, Any]) -> None:
        """Raise ``ValueError`` unless the checkpoint is one of this model, its optimizers and their ``schedulers``."""
        manifest = checkpoint.manifest
        saved = {**manifest.tensors, **manifest.excluded}
        self._check_names(self.saved, saved, manifest)
        for name, theirs in saved.items():
            _check_same(name, self.saved[name], theirs, name in manifest.excluded)
        self._check_names(self.tied, manifest.tied, manifest, " as another name of a tensor")
        self._check_names(self.extra_states, checkpoint.objects.model, manifest)
        for of, settings in checkpoint.objects.optimizers.items():
            try:
                self.states_of[of].check(settings, {})
            except ValueError as error:
                raise error if of is None else ValueError(f"{called(of)}: {error}") from error
            if of in schedulers and settings["scheduler"] is None:
                kind = called(of, "scheduler")
                raise ValueError(
                    f"{kind}: expected none, since {checkpoint.path} was saved without one, got one: leave it out"
                )

    def _check_names(self, ours: Collection[str], theirs: Collection[str], manifest: Manifest, how: str = "") -> None:
        """Raise ``ValueError`` for the first name that only the model, or only the checkpoint, has in this way."""
        for name in sorted({*ours} ^ {*theirs}):  # ranks have experts in different orders
            one, other = ("model", "checkpoint") if name in ours else ("checkpoint", "model")
            remedy = _SHARE_ALIKE if self.experts or manifest.experts else _BUILD_ANEW
            raise ValueError(f"{name}: the {one} has it{how}, the {other} doesn't: {remedy}")

    # ---- loading ----

    @torch.no_grad()
    def load_objects(self, saved: SavedCheckpoint, schedulers: Mapping[Name, Any], undo: ExitStack) -> None:
        """Load schedulers, modules' extra states, optimizers' settings and unsplit states. Doesn't communicate.

        Slices of the optimizers' states have no values until ``read``. ``undo`` gets what takes it all back.
        """
        for of, scheduler in schedulers.items():
            undo.callback(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict()))
            scheduler.load_state_dict(saved.objects.optimizers[of]["scheduler"])
        for name, module in self._stateful.items():
            undo.callback(module.set_extra_state, copy.deepcopy(module.get_extra_state()))
            module.set_extra_state(saved.objects.model[name])
        for of, state in self.states_of.items():
            settings = saved.objects.optimizers[of]
            state.load(state.announced(saved, settings), settings, undo)

    @torch.no_grad()
    def read(self, saved: SavedCheckpoint) -> None:
        """Read this rank's part of each saved tensor into place, one parameter at a time. Doesn't communicate.

        Raises:
            RuntimeError: a file can't be read; a part of the checkpoint has been loaded then.
        """
        try:
            for name, entry in self.entries.items():
                record, like = entry.record, saved.model.get(name)
                if like is not None and record is not None:
                    row = entry.boxed(record.row.to(like.dtype))  # the row itself if it is of this dtype
                    saved.read(row, name)
                    record.load_row(row.local, self.states_of[entry.saved.optimizer].read(name, saved))
                elif like is not None and like.numel():
                    whole = torch.empty_like(like, device=entry.tensor.device)
                    saved.read(whole, name)
                    _overwrite(entry.tensor.detach(), whole)
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"{saved.path}: rank {self.group.group_rank} could not read it to its end ({error}): the model and its "
                "optimizers hold a part of it by now, so load a checkpoint before going on"
            ) from error

    @torch.no_grad()
    def gather(self, objects: Objects) -> None:
        """Gather the rows that the ranks have read, and load bucket plans and loss scales. Communicates."""
        in_order = sorted(self.entries.values(), key=lambda entry: entry.shard_group)  # the same on all ranks
        trained = [(entry.record, entry.ranks) for entry in in_order if entry.record is not None]
        for record, ranks in trained:
            if record.split.numel:
                record.split.gather(ranks, [record.row], [record.rows], False, END_TO_END, None).wait()
                torch.autograd.graph.increment_version(record.p)
            record.note_version()
        for of, state in self.states_of.items():
            state.load_progress(objects.optimizers[of])

    def lost(self, saved: SavedCheckpoint) -> list[str]:
        """Return the parameters whose saved states have no place, since no optimizer trains them any more."""
        optimizers = saved.objects.optimizers.items()
        return [name for of, settings in optimizers for name in self.states_of[of].lost(settings, saved.states)]


# ---- the tensors of this rank's model ----


class _Owner(NamedTuple):
    """The optimizer that has a parameter in a param group, its record if it is trained, and its shard group."""

    optimizer: Name
    group: int | None
    record: ShardedParameter | None
    ranks: ShardGroup


def _owners(optimizers: Mapping[Name, LowLevelZeroOptimizer]) -> dict[Tensor, _Owner]:
    """Return the optimizer that trains each parameter, or else one that has it in a group; raise if two train it."""
    found: dict[Tensor, _Owner] = {}
    for name, optimizer in optimizers.items():
        store = optimizer.sharded_parameters
        for at, members in enumerate(store.groups):
            for p in members:
                record, former = store.find(p), found.get(p)
                if record and former and former.record:
                    raise ValueError(
                        f"{record.name}: expected one optimizer that trains it, got {called(former.optimizer)} and "
                        f"{called(name)}: give it to one of them alone"
                    )
                if record or not former:
                    found[p] = _Owner(name, at, record, store.shard_groups[store.shard_group_of(p)])
    return found


def _described(name: str, tensor: Tensor, owner: _Owner) -> SavedTensor:
    """Return a tensor's manifest entry, and move a moved parameter back; ``ValueError`` if not dense or on meta."""
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"{name}: expected a dense tensor with values, got {tensor.layout} on {tensor.device}")
    kind, stride = BUFFER, torch.empty_like(tensor.detach(), device="meta").stride()  # without gaps
    if owner.record is not None:
        owner.record.take_back()
        kind, stride = TRAINABLE, tensor.stride()
    elif isinstance(tensor, nn.Parameter):
        kind = UNTRAINED if tensor.requires_grad else FROZEN
    dtype = str(tensor.dtype).removeprefix("torch.")
    return SavedTensor(tuple(tensor.shape), stride, dtype, kind, owner.group, owner.optimizer)


def _check_same(name: str, ours: SavedTensor, theirs: SavedTensor, is_excluded: bool) -> None:
    """Raise ``ValueError`` if shapes or kinds of dtype differ, or if a trained tensor was left out."""
    if ours.shape != theirs.shape:
        raise ValueError(f"{name}: expected {ours.shape}, got {theirs.shape} from the checkpoint: {_BUILD_ANEW}")
    if ours.torch_dtype.is_floating_point != theirs.torch_dtype.is_floating_point:
        raise ValueError(f"{name}: expected {ours.dtype}, got {theirs.dtype} from the checkpoint: {_BUILD_ANEW}")
    if ours.kind == TRAINABLE and is_excluded:
        raise ValueError(
            f"{name}: expected it frozen, since the checkpoint was saved without it (exclude_frozen=True), found that "
            "it is trained: freeze it, or load a checkpoint that has it"
        )


def _stateful(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that override ``get_extra_state`` by the names of that entry in a state dict.

    A module in several places has as many of them.
    """
    return {
        joined(name, _EXTRA): module
        for name, _, module in named_modules(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _ranks_of(group: ShardGroup) -> tuple[int, ...]:
    """Return the global ranks of a shard group, by which two process groups of the same ranks count as one."""
    return tuple(dist.get_process_group_ranks(group.group))


def _number_around(name: str, number_of: Mapping[str, int]) -> int:
    """Return the number of the shard group of the tensors in the innermost module around ``name`` that has some.

    ``number_of``: the numbers by the tensors' names. 0: they are of several groups.
    """
    module = name.rpartition(".")[0]
    own = {number for each, number in number_of.items() if each.startswith(module and f"{module}.")}
    if module and not own:
        return _number_around(module, number_of)
    return own.pop() if len(own) == 1 else 0


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy ``values`` into ``tensor``. If the tensor is expanded, copy each element of its memory once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)
