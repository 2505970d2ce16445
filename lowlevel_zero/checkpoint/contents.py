"""What of a model and its optimizers goes into a checkpoint: tensors by name, and how they come back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..bookkeeping.parameter_store import ShardedParameter
from ..bookkeeping.storages import flat_in_memory_order
from ..communication.agreement import agree_apart, together
from ..communication.shard_group import ShardGroup
from ..optimizer import LowLevelZeroOptimizer
from ..partition import EvenSplit
from ..state.flat_shards import local_part
from ..state.global_names import Expert, GlobalNames, check_same_experts
from ..state.sharded import ShardedState
from .boxes import BoxedTensor, Boxes
from .held import Entry, held_by, without_values
from .manifest import FROZEN, TRAINABLE, Manifest, SavedTensor
from .objects import Objects
from .optimizers import Name
from .saved import MODEL, STATE, name_in

T = TypeVar("T")


class Told(NamedTuple):
    """What a rank tells the others of experts in groups whose first rank it is, all by global names.

    Attributes:
        tensors: parameters and persistent buffers.
        tied: other names of those that have several.
        extra: what modules with ``get_extra_state`` give.
    """

    tensors: dict[str, SavedTensor]
    tied: dict[str, str]
    extra: dict[str, Any]


class Contents:
    """The tensors of a model by name, and its optimizers' states with the same names.

    Complete when all ranks have met (``meet``). Names are global ones.

    Args:
        model: the module; wrappers, and wrapped modules in it, have the names of what they wrap.
        optimizers: each trains some of its parameters, and no two the same.

    Attributes:
        entries: this rank's parameters and persistent buffers by their first names.
        tied: other names of those that have several.
        told: by every rank; nothing where all have the same.
        experts: by global name what not all ranks have.
        states_of: the optimizers'.
        excluded: names of what is left out.

    Raises:
        ValueError: an optimizer has a parameter that isn't the model's, or is another's, or a tensor can't be saved.
        RuntimeError: a parameter was moved since its optimizer was constructed.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[Name, LowLevelZeroOptimizer]) -> None:
        stores = {name: optimizer.sharded_parameters for name, optimizer in optimizers.items()}
        self.group: ShardGroup = next(iter(optimizers.values())).shard_group
        apart: dict[dist.ProcessGroup, ShardGroup] = {}
        for group in (group for store in stores.values() for group in store.shard_groups[1:]):
            apart.setdefault(group.group, group)
        self.groups: Sequence[ShardGroup] = [self.group, *apart.values()]
        self.told: list[Told] = []
        self.excluded: set[str] = set()
        self._optimizers = optimizers
        self._device = next(iter(optimizers.values())).device
        self._held = held_by(model, stores, self.groups)

    def meet(self, doing: str) -> None:
        """Learn what other ranks have, where they have different experts. Communicates then: every rank calls it.

        Args:
            doing: what for, as ``agree`` has it.

        Raises:
            ValueError: ranks that share experts differ in them; on all ranks alike, as ``agree`` does.
        """
        if len(self.groups) > 1:
            agree_apart(self.groups, [self.lines(number) for number in range(1, len(self.groups))], doing)
        held, names = self._held, GlobalNames(self.groups, self._held.shard_group_of)
        self.experts: dict[str, Expert] = names.experts
        self.entries = {names[name]: entry for name, entry in held.entries.items()}
        self.tied = {names[alias]: names[name] for alias, name in held.tied.items()}
        self._stateful = {names[name]: module for name, module in held.stateful.items()}
        name_of = {entry.tensor: name for name, entry in self.entries.items()}
        self.states_of: dict[Name, ShardedState] = {
            name: ShardedState(optimizer, name_of, Boxes) for name, optimizer in self._optimizers.items()
        }
        if len(self.groups) > 1:
            led = {
                names[name] for name, number in held.shard_group_of.items() if number and self.groups[number].place == 0
            }
            with together(self.group, doing):
                own = self._own_told(led)
            self.told = self.group.all_gather_object(own)

    def _own_told(self, led: Collection[str]) -> Told:
        return Told(
            {name: entry.saved for name, entry in self.entries.items() if name in led},
            {alias: name for alias, name in self.tied.items() if name in led},
            {name: module.get_extra_state() for name, module in self._stateful.items() if name in led},
        )

    def lines(self, number: int = 0) -> list[str]:
        """What has to be alike on all ranks of the shard group of this index."""
        first = [f"{len(self.groups)} groups that share parameters"] if number == 0 else []
        of_group = [(name, entry) for name, entry in self._held.entries.items() if entry.shard_group == number]
        return first + [f"{name} {entry.saved}" for name, entry in of_group]

    # ---- what is saved ----

    def exclude_frozen(self) -> None:
        """Leave frozen parameters out."""
        self.excluded = {name for name, tensor in self.saved().items() if tensor.kind == FROZEN}

    def saved(self) -> dict[str, SavedTensor]:
        """Every rank's parameters and persistent buffers, those that are left out too."""
        own = {name: entry.saved for name, entry in self.entries.items()}
        return _with_others(own, (told.tensors for told in self.told))

    def names(self) -> set[str]:
        """All names in it that are the model's."""
        extra = {*self._stateful, *(name for told in self.told for name in told.extra)}
        return {*self.saved(), *self.all_tied(), *extra}

    def all_tied(self) -> dict[str, str]:
        """Every rank's other names."""
        return _with_others(self.tied, (told.tied for told in self.told))

    def tensors(self) -> dict[str, Tensor]:
        """This rank's tensors as a checkpoint has them; they share memory with the model and the optimizers."""
        kept = {name: entry for name, entry in self.entries.items() if name not in self.excluded}
        found = {f"{MODEL}{name}": _boxed(entry) for name, entry in kept.items()}
        states = {name: tensor for state in self.states_of.values() for name, tensor in state.tensors().items()}
        return {**found, **{f"{STATE}{name}": tensor for name, tensor in states.items()}}

    def extra_states(self) -> dict[str, Any]:
        """What modules with ``get_extra_state`` give, on every rank."""
        own = {name: module.get_extra_state() for name, module in self._stateful.items()}
        return _with_others(own, (told.extra for told in self.told))

    def shard_group_of(self, full: str) -> int:
        """The index of the shard group of a tensor of ``tensors``."""
        return self.entries[name_in(full)].shard_group

    # ---- whether it is the same model ----

    def check_same(self, manifest: Manifest) -> None:
        """Raise ``ValueError`` for the first missing, wrong-shaped or unexpected tensor of a checkpoint."""
        saved, tied = {**manifest.tensors, **manifest.excluded}, manifest.tied
        everything, all_tied = self.saved(), self.all_tied()
        check_same_experts(self.experts, manifest.experts)
        for name, ours in everything.items():
            if name not in saved:
                raise ValueError(f"{name}: the model has it, the checkpoint doesn't: it is another model's")
            theirs = saved[name]
            if ours.shape != theirs.shape:
                raise ValueError(f"{name}: expected {ours.shape}, the checkpoint has {theirs.shape}: another model's")
            if ours.torch_dtype.is_floating_point != theirs.torch_dtype.is_floating_point:
                raise ValueError(f"{name}: expected {ours.dtype}, the checkpoint has {theirs.dtype}: another model's")
            if ours.kind == TRAINABLE and name in manifest.excluded:
                raise ValueError(
                    f"{name}: expected it frozen, since the checkpoint was saved without it (exclude_frozen=True), "
                    "found that it is trained: freeze it, or load a checkpoint that has it"
                )
        for name in saved:
            if name not in everything:
                raise ValueError(f"{name}: the checkpoint has it, the model doesn't: it is another model's")
        for name in sorted(all_tied.keys() ^ tied.keys()):
            where = "in the model, not in the checkpoint" if name in all_tied else "in the checkpoint, not in the model"
            raise ValueError(f"{name}: shared with another name {where}: it is another model's")

    # ---- what is loaded ----

    def templates(self, saved: Mapping[str, SavedTensor], metadata: Mapping[str, Any]) -> dict[str, Tensor]:
        """Empty tensors to load into, this rank's boxes alone."""
        found: dict[str, Tensor] = {}
        for name, entry in self.entries.items():
            if name in saved:
                device = entry.tensor.device if entry.record is None else entry.record.padded.device
                dtype = saved[name].torch_dtype
                found[f"{MODEL}{name}"] = Boxes(entry.ranks).empty(entry.saved.shape, entry.saved.stride, dtype, device)
        for state in self.states_of.values():
            for full, template in state.templates(_under(STATE, metadata)).items():
                found[f"{STATE}{full}"] = template
        return found

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor], objects: Objects) -> None:
        """Take over what was loaded, on all ranks together. Communicates, one tensor at a time."""
        states = _under(STATE, tensors)
        masters = {record: p32 for each in self.states_of.values() for record, p32 in each.masters(states).items()}
        loaded = [(name, entry) for name, entry in self.entries.items() if f"{MODEL}{name}" in tensors]
        for name, entry in sorted(loaded, key=lambda item: item[1].shard_group):  # in which all have the same order
            own, ranks = local_part(tensors[f"{MODEL}{name}"]), entry.ranks
            if entry.record is not None:
                _put_row(entry.record, own, masters.get(entry.record), ranks)
            elif entry.saved.numel:
                flat = _gathered(own, entry.saved.numel, ranks, self._device)
                whole = torch.as_strided(flat, entry.saved.shape, entry.saved.stride)
                _overwrite(entry.tensor.detach(), whole)
        for name, module in self._stateful.items():
            if name in objects.model:
                module.set_extra_state(objects.model[name])
        for of, state in self.states_of.items():
            state.load(states, objects.optimizers[of])


def _with_others(own: dict[str, T], others: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """This rank's entries and those that others told of."""
    found = dict(own)
    for told in others:
        found.update(told)
    return found


def _boxed(entry: Entry) -> BoxedTensor:
    boxes, saved = Boxes(entry.ranks), entry.saved
    if entry.record is not None:
        return boxes.wrap(entry.record.row, saved.shape, saved.stride)
    start, stop = boxes.span(saved.numel)
    flat = flat_in_memory_order(entry.tensor, without_values(entry.tensor))
    return boxes.wrap(flat[start:stop], saved.shape, saved.stride)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of ``tensors`` on the host, which training doesn't change."""
    return {full: tensor.detach().to("cpu", copy=True) for full, tensor in tensors.items()}


def _put_row(record: ShardedParameter, own: Tensor, master: Tensor | None, ranks: ShardGroup) -> None:
    record.load_row(own, master)
    if record.split.numel:
        ranks.all_gather(record.rows).wait()
        torch.autograd.graph.increment_version(record.p)
    record.note_version()


def _gathered(own: Tensor, numel: int, ranks: ShardGroup, by_way_of: torch.device) -> Tensor:
    """A flat tensor of which each rank has its slice, as bytes: collectives don't know all dtypes."""
    split = EvenSplit(numel, ranks.size)
    device = own.device if own.device.type in ranks.device_types else by_way_of
    wire = torch.empty(ranks.size, split.slice_size, dtype=own.dtype, device=device)
    wire[ranks.rank, : len(own)].copy_(own)
    ranks.all_gather(wire.view(torch.uint8)).wait()
    return wire.view(-1)[:numel]


def _under(prefix: str, entries: Mapping[str, T]) -> dict[str, T]:
    """The entries whose names start with ``prefix``, without it."""
    return {full.removeprefix(prefix): entry for full, entry in entries.items() if full.startswith(prefix)}


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy ``values``; of an expanded tensor, whose elements share memory, each element once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)
