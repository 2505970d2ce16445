"""What of a model and its optimizers goes into a checkpoint: tensors by name, and how they come back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..bookkeeping.sharded_parameter import ShardedParameter
from ..bookkeeping.storages import flat_in_memory_order
from ..communication.agreement import agree_apart
from ..communication.shard_group import ShardGroup
from ..optimizer import LowLevelZeroOptimizer
from ..state.boxes import BoxedTensor, boxed
from ..state.global_names import GlobalNames, check_same_experts, of_all_ranks
from ..state.sharded import ShardedState, States
from ..state.whole import MASTER
from .held import Entry, held_by, without_values
from .manifest import FROZEN, TRAINABLE, Manifest, SavedTensor
from .objects import Objects
from .optimizers import Name
from .saved import SavedCheckpoint


class Contents:
    """The tensors of a model by name, and its optimizers' states with the same names.

    Complete when all ranks have met (``meet``). Names are global ones.

    Args:
        model: the module; wrappers, and wrapped modules in it, have the names of what they wrap.
        optimizers: each trains some of its parameters, and no two the same.

    Attributes:
        entries: this rank's parameters and persistent buffers by their first names.
        saved: every rank's, as a manifest describes them, those that are left out too.
        tied: every rank's other names of tensors that have several.
        extra_states: what modules with ``get_extra_state`` give, on every rank.
        experts: what not all ranks have.
        states_of: the optimizers'.
        excluded: what of ``saved`` is left out.

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
        self.excluded: dict[str, SavedTensor] = {}
        self._optimizers = optimizers
        self._device = next(iter(optimizers.values())).device
        self._held = held_by(model, stores, self.groups)
        self._extra = {name: module.get_extra_state() for name, module in self._held.stateful.items()}

    def meet(self, doing: str, saved: Iterable[str] = ()) -> None:
        """Learn what other ranks have, where they have different experts. Communicates then: every rank calls it.

        Args:
            doing: what for, as ``agree`` has it.
            saved: the names in the checkpoint that is to be loaded.

        Raises:
            ValueError: ranks that share experts differ in them; on all ranks alike, as ``agree`` does.
        """
        if len(self.groups) > 1:
            agree_apart(self.groups, [self.lines(number) for number in range(1, len(self.groups))], doing)
        held, names = self._held, GlobalNames(self.groups, self._held.shard_group_of, saved)
        self.experts = names.experts
        self.entries = {names[name]: entry for name, entry in held.entries.items()}
        self._stateful = {names[name]: module for name, module in held.stateful.items()}
        name_of = {entry.tensor: name for name, entry in self.entries.items()}
        self.states_of = {name: ShardedState(optimizer, name_of) for name, optimizer in self._optimizers.items()}
        number_of = {names[name]: number for name, number in held.shard_group_of.items()}
        own_tied = {names[alias]: names[name] for alias, name in held.tied.items()}
        own_extra = {names[name]: extra for name, extra in self._extra.items()}
        self.saved = of_all_ranks(self.groups, {n: each.saved for n, each in self.entries.items()}, number_of)
        self.tied = of_all_ranks(self.groups, own_tied, number_of)
        self.extra_states = of_all_ranks(self.groups, own_extra, number_of)

    def lines(self, number: int = 0) -> list[str]:
        """What has to be alike on all ranks of the shard group of this index."""
        first = [f"{len(self.groups)} groups that share parameters"] if number == 0 else []
        of_group = [(name, entry) for name, entry in self._held.entries.items() if entry.shard_group == number]
        return first + [f"{name} {entry.saved}" for name, entry in of_group]

    # ---- what is saved ----

    def exclude_frozen(self) -> None:
        """Leave frozen parameters out."""
        self.excluded = {name: tensor for name, tensor in self.saved.items() if tensor.kind == FROZEN}

    def model(self) -> dict[str, Tensor]:
        """This rank's boxes of the model's tensors, by name; they share memory with them."""
        return {name: _of_boxes(entry) for name, entry in self.entries.items() if name not in self.excluded}

    def states(self) -> States:
        """This rank's tensors of the optimizers' states; they share memory with them."""
        return {name: state for each in self.states_of.values() for name, state in each.tensors().items()}

    def state_lines(self, states: States) -> list[str]:
        """Which states all ranks should have."""
        shared = {name: state for name, state in states.items() if self.entries[name].shard_group == 0}
        return [f"{name}.{key}" for name, state in shared.items() for key in state]

    # ---- whether it is the same model ----

    def check_same(self, manifest: Manifest) -> None:
        """Raise ``ValueError`` for the first missing, wrong-shaped or unexpected tensor of a checkpoint."""
        saved, tied = {**manifest.tensors, **manifest.excluded}, manifest.tied
        check_same_experts(self.experts, manifest.experts)
        for name, ours in self.saved.items():
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
            if name not in self.saved:
                raise ValueError(f"{name}: the checkpoint has it, the model doesn't: it is another model's")
        for name in sorted(self.tied.keys() ^ tied.keys()):
            where = (
                "in the model, not in the checkpoint" if name in self.tied else "in the checkpoint, not in the model"
            )
            raise ValueError(f"{name}: shared with another name {where}: it is another model's")

    # ---- what is loaded ----

    def templates(self, saved: SavedCheckpoint) -> tuple[dict[str, Tensor], States]:
        """Empty tensors to load into, this rank's boxes alone: of the model and of its optimizers' states.

        Raises:
            ValueError: a tensor isn't there as the manifest tells.
        """
        model: dict[str, Tensor] = {}
        for name, entry in self.entries.items():
            if name in saved.manifest.tensors:
                device = entry.tensor.device if entry.record is None else entry.record.padded.device
                own = torch.empty(entry.split.slice_size, dtype=saved.model[name].dtype, device=device)
                model[name] = _boxed(own, entry)
        states = {name: own for each in self.states_of.values() for name, own in each.templates(saved.states).items()}
        return model, states

    @torch.no_grad()
    def put(self, model: Mapping[str, Tensor], states: States, objects: Objects) -> None:
        """Take over what was loaded, on all ranks together. Communicates, one tensor at a time."""
        slices = {name: each.slices(states, objects.optimizers[name]) for name, each in self.states_of.items()}
        masters = {record: state.get(MASTER) for of in slices.values() for record, state in of.items()}
        loaded = [(name, entry) for name, entry in self.entries.items() if name in model]
        for name, entry in sorted(loaded, key=lambda item: item[1].shard_group):  # in which all have the same order
            own = model[name].to_local()  # type: ignore[attr-defined]
            if entry.record is not None:
                _put_row(entry.record, own, masters[entry.record], entry.ranks)
            elif entry.saved.numel:
                flat = _gathered(own, entry, self._device)
                _overwrite(entry.tensor.detach(), flat.as_strided(entry.saved.shape, entry.saved.stride))
        for name, module in self._stateful.items():
            if name in objects.model:
                module.set_extra_state(objects.model[name])
        for of, state in self.states_of.items():
            state.load(slices[of], objects.optimizers[of])


def _of_boxes(entry: Entry) -> BoxedTensor:
    if entry.record is not None:
        return _boxed(entry.record.row, entry)
    start, stop = entry.split.span(entry.ranks.rank)
    return _boxed(flat_in_memory_order(entry.tensor, without_values(entry.tensor))[start:stop], entry)


def _boxed(own: Tensor, entry: Entry) -> BoxedTensor:
    return boxed(own, entry.split, entry.ranks.rank, entry.saved.shape, entry.saved.stride)


def _put_row(record: ShardedParameter, own: Tensor, master: Tensor | None, ranks: ShardGroup) -> None:
    record.load_row(own, None if master is None else master[: len(own)])
    if record.split.numel:
        ranks.all_gather(record.rows).wait()
        torch.autograd.graph.increment_version(record.p)
    record.note_version()


def _gathered(own: Tensor, entry: Entry, by_way_of: torch.device) -> Tensor:
    """A flat tensor of which each rank has its slice, as bytes: collectives don't know all dtypes."""
    ranks, split = entry.ranks, entry.split
    device = own.device if own.device.type in ranks.device_types else by_way_of
    rows = torch.empty(split.world_size, split.slice_size, dtype=own.dtype, device=device)
    rows[ranks.rank, : len(own)].copy_(own)
    ranks.all_gather(rows.view(torch.uint8)).wait()
    return rows.view(-1)[: split.numel]


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy ``values``; of an expanded tensor, whose elements share memory, each element once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)
