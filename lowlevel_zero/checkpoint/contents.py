"""What of a model goes into a checkpoint: flat tensors by name, what they must match, and how they come back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.utils import _DistWrapper

from ..assignment import add_companions, agree_apart
from ..bookkeeping.parameter_store import ParameterStore, ShardedParameter, flat_in_memory_order
from ..communication.collectives import ShardGroup
from ..construction import together
from ..flat_shards import FlatShards, local_part
from ..global_names import Expert, GlobalNames, check_same_experts
from ..optimizer import LowLevelZeroOptimizer
from ..partition import EvenSplit
from ..sharded_state import ShardedState
from .manifest import Manifest, SavedTensor

T = TypeVar("T")

# torch 2.4 takes the first rank of a group for rank 0.
LED_BY_ANY_RANK = hasattr(_DistWrapper(None, False, 0), "global_coordinator_rank")

_EXTRA = "_extra_state"


class Entry(NamedTuple):
    """A parameter or persistent buffer of the model.

    Attributes:
        tensor: it.
        record: the optimizer's, if it is trained by it.
        saved: how it is described in a manifest.
        family: of the ranks that share it.
    """

    tensor: Tensor
    record: ShardedParameter | None
    saved: SavedTensor
    family: int


class Told(NamedTuple):
    """What a rank tells the others of experts in groups whose first rank it is, all by global names.

    Attributes:
        tensors: parameters and persistent buffers.
        tied: other names of those that have several.
        states: the optimizer's states of parameters that are tensors.
        extra: what modules with ``get_extra_state`` give.
    """

    tensors: dict[str, SavedTensor]
    tied: dict[str, str]
    states: dict[str, list[str]]
    extra: dict[str, Any]


class Contents:
    """The tensors of a model by name, and the optimizer's state with the same names.

    To be used when all ranks have met (``meet``). Then names are global ones.

    Args:
        model: the module; a wrapper (a compiled or boosted one) stands for what it wraps.
        optimizer: trains some of its parameters.

    Attributes:
        entries: this rank's parameters and persistent buffers by their first names.
        tied: other names of those that have several.
        told: by every rank; nothing where all have the same.
        experts: by global name what not all ranks have.
        state: the optimizer's.

    Raises:
        TypeError: ``model`` isn't a module, or ``optimizer`` not one of this package's.
        ValueError: the optimizer has a parameter that isn't the model's, or a tensor can't be saved.
        RuntimeError: a parameter was moved since the optimizer was constructed.
    """

    def __init__(self, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
        self.model = _unwrapped(model)
        self.group: ShardGroup = optimizer._group
        self.groups: Sequence[ShardGroup] = optimizer._parameters.shard_groups
        self.entries: dict[str, Entry] = {}
        self.tied: dict[str, str] = {}
        self.told: list[Told] = []
        self._optimizer = optimizer
        self._families = _families(self.model, optimizer._parameters)
        self._shards = [FlatShards(group) for group in self.groups]
        self._names: dict[Tensor, str] = {}
        group_of: dict[Tensor, int] = {
            p: at for at, members in enumerate(optimizer._parameters.groups) for p in members
        }
        for name, tensor, is_buffer in _tensors(self.model):
            if tensor in self._names:
                self.tied[name] = self._names[tensor]
            else:
                self._names[tensor] = name
                record, family = optimizer._parameters.find(tensor), self._families.get(tensor, 0)
                self.entries[name] = Entry(
                    tensor, record, _described(name, tensor, record, group_of.get(tensor), is_buffer), family
                )
        for p in group_of:
            if p not in self._names:
                raise ValueError(
                    f"model: expected all parameters of the optimizer in it, but a {tuple(p.shape)} one isn't: pass "
                    "the module that holds them all (an nn.ModuleDict of several)"
                )

    def meet(self, doing: str) -> None:
        """Learn what other ranks have, where they have different experts. Communicates then: every rank calls it.

        Args:
            doing: what for, as ``agree`` has it.

        Raises:
            ValueError: ranks that share experts differ in them; on all ranks alike, as ``agree`` does.
        """
        if len(self.groups) > 1:
            agree_apart(self.groups, [self.lines(family) for family in range(1, len(self.groups))], doing)
        modules = self._with_extra_state()
        families = {name: entry.family for name, entry in self.entries.items()}
        families |= {alias: families[name] for alias, name in self.tied.items()}
        families |= {name: self._family_of(module) for name, module in modules.items()}
        names = GlobalNames(self.groups, families)
        self.experts: dict[str, Expert] = names.experts
        self.entries = {names[name]: entry for name, entry in self.entries.items()}
        self.tied = {names[alias]: names[name] for alias, name in self.tied.items()}
        self._extra = {names[name]: module for name, module in modules.items()}
        self.state: ShardedState = self._optimizer.sharded_state({p: names[name] for p, name in self._names.items()})
        if len(self.groups) > 1:
            led = {names[name] for name, family in families.items() if family and self.groups[family].place == 0}
            with together(self.group, doing):
                own = self._own_told(led)
            self.told = self.group.exchange(own)

    def _own_told(self, led: Collection[str]) -> Told:
        return Told(
            {name: entry.saved for name, entry in self.entries.items() if name in led},
            {alias: name for alias, name in self.tied.items() if name in led},
            {name: keys for name, keys in self._own_states().items() if name in led},
            {name: module.get_extra_state() for name, module in self._extra.items() if name in led},
        )

    def lines(self, family: int) -> list[str]:
        """What has to be alike on all ranks of a family."""
        return [f"{name} {entry.saved}" for name, entry in self.entries.items() if entry.family == family]

    def _family_of(self, module: nn.Module) -> int:
        """That of all its tensors."""
        tensors = (*module.parameters(), *module.buffers())
        families = {self._families.get(tensor, 0) for tensor in tensors}
        return families.pop() if len(families) == 1 else 0

    # ---- what is saved ----

    def saved(self) -> dict[str, SavedTensor]:
        """Every rank's parameters and persistent buffers."""
        own = {name: entry.saved for name, entry in self.entries.items()}
        return _with_others(own, (told.tensors for told in self.told))

    def all_tied(self) -> dict[str, str]:
        """Every rank's other names."""
        return _with_others(self.tied, (told.tied for told in self.told))

    def states(self) -> dict[str, list[str]]:
        """The states that are tensors of every rank's parameters."""
        return _with_others(self._own_states(), (told.states for told in self.told))

    def _own_states(self) -> dict[str, list[str]]:
        states: dict[str, list[str]] = {}
        for full in self.state.tensors():
            name, _, key = full.rpartition(".")
            states.setdefault(name, []).append(key)
        return states

    def tensors(self) -> dict[str, Tensor]:
        """This rank's tensors as a checkpoint has them; they share memory with the model and the optimizer."""
        found = {f"model.{name}": self._flat(entry) for name, entry in self.entries.items()}
        return {**found, **{f"optimizer.{name}": tensor for name, tensor in self.state.tensors().items()}}

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of ``tensors`` on the host, which training doesn't change."""
        copies = {}
        for full, tensor in tensors.items():
            own = local_part(tensor).to("cpu", copy=True)
            copies[full] = (
                self._shards[self.family_of(full)].wrap(own, tensor.numel()) if hasattr(tensor, "to_local") else own
            )
        return copies

    def extra_states(self) -> dict[str, Any]:
        """What modules with ``get_extra_state`` give, on every rank."""
        own = {name: module.get_extra_state() for name, module in self._extra.items()}
        return _with_others(own, (told.extra for told in self.told))

    def _flat(self, entry: Entry) -> Tensor:
        numel, shards = entry.saved.numel, self._shards[entry.family]
        if entry.record is not None:
            return shards.wrap(entry.record.row, numel)
        start, stop = shards.span(numel)
        return shards.wrap(flat_in_memory_order(entry.tensor, _dense(entry.tensor))[start:stop], numel)

    def family_of(self, full: str) -> int:
        """The family of a tensor of ``tensors``."""
        return self.entries[self._owner(full)].family

    # ---- whether it is the same model ----

    def check_same(self, manifest: Manifest) -> None:
        """Raise ``ValueError`` for the first missing, wrong-shaped or unexpected tensor of a checkpoint."""
        saved, tied = manifest.tensors, manifest.tied
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
        for name in saved:
            if name not in everything:
                raise ValueError(f"{name}: the checkpoint has it, the model doesn't: it is another model's")
        for name in sorted(all_tied.keys() ^ tied.keys()):
            where = "in the model, not in the checkpoint" if name in all_tied else "in the checkpoint, not in the model"
            raise ValueError(f"{name}: shared with another name {where}: it is another model's")

    # ---- what is loaded ----

    def templates(self, saved: Mapping[str, SavedTensor], metadata: Mapping[str, Any]) -> dict[str, Tensor]:
        """Empty tensors to load into, this rank's slices alone; whole ones where memory orders differ."""
        found = {}
        for name, entry in self.entries.items():
            device = entry.tensor.device if entry.record is None else entry.record.padded.device
            shards = self._shards[entry.family]
            found[f"model.{name}"] = shards.empty(entry.saved.numel, saved[name].torch_dtype, device)
        for full, template in self.state.templates(_under("optimizer.", metadata)).items():
            found[f"optimizer.{full}"] = template
        return {full: self._in_order_of(full, template, saved) for full, template in found.items()}

    def in_own_order(self, tensors: Mapping[str, Tensor], saved: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
        """Loaded tensors, those that were whole for their order's sake cut to flat shards of ours."""
        return {full: self._reordered(full, tensor, saved) for full, tensor in tensors.items()}

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor], objects: Mapping[str, Any]) -> None:
        """Take over what was loaded, on all ranks together. Communicates, one tensor at a time."""
        states = _under("optimizer.", tensors)
        masters = self.state.masters(states)
        by_family = sorted(self.entries.items(), key=lambda item: item[1].family)  # in which all have the same order
        for name, entry in by_family:
            own, ranks = local_part(tensors[f"model.{name}"]), self.groups[entry.family]
            if entry.record is not None:
                _put_row(entry.record, own, masters.get(entry.record), ranks)
            elif entry.saved.numel:
                flat = _gathered(own, entry.saved.numel, ranks)
                whole = torch.as_strided(flat, entry.saved.shape, entry.saved.stride)
                _overwrite(entry.tensor.detach(), whole)
        for name, module in self._extra.items():
            if name in objects["model"]:
                module.set_extra_state(objects["model"][name])
        self.state.load(states, objects)

    def _in_order_of(self, full: str, template: Tensor, saved: Mapping[str, SavedTensor]) -> Tensor:
        name = self._owner(full)
        if not hasattr(template, "to_local") or saved[name].stride == self.entries[name].saved.stride:
            return template
        return torch.empty(template.numel(), dtype=template.dtype)

    def _reordered(self, full: str, tensor: Tensor, saved: Mapping[str, SavedTensor]) -> Tensor:
        name = self._owner(full)
        ours, theirs = self.entries[name], saved[name]
        if hasattr(tensor, "to_local") or ours.saved.stride == theirs.stride or tuple(tensor.shape) != (theirs.numel,):
            return tensor
        like = torch.empty_strided(ours.saved.shape, ours.saved.stride, device="meta")
        flat = flat_in_memory_order(torch.as_strided(tensor, theirs.shape, theirs.stride), like)
        shards = self._shards[ours.family]
        start, stop = shards.span(ours.saved.numel)
        return shards.wrap(flat[start:stop].to(ours.tensor.device, copy=True), ours.saved.numel)

    def _owner(self, full: str) -> str:
        """The parameter or buffer that a tensor of a checkpoint belongs to."""
        kind, _, rest = full.partition(".")
        return rest if kind == "model" else rest.rpartition(".")[0]

    def _with_extra_state(self) -> dict[str, nn.Module]:
        return {
            f"{prefix}.{_EXTRA}" if prefix else _EXTRA: module
            for prefix, module in self.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }


def check_pair(model: object, optimizer: object) -> None:
    """Raise ``TypeError`` unless these are a module and one of this package's optimizers.

    ``NotImplementedError``: torch can't do it for the optimizer's group; raised on all of its ranks alike.
    """
    if not isinstance(optimizer, LowLevelZeroOptimizer):
        raise TypeError(
            f"optimizer: expected a LowLevelZeroOptimizer, got {type(optimizer).__name__}: wrap it first, or use "
            "torch.save or torch.distributed.checkpoint for a plain one"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not LED_BY_ANY_RANK and optimizer._group.ranks > 1 and dist.get_global_rank(optimizer._group.group, 0) != 0:
        raise NotImplementedError(
            f"optimizer: expected a process group whose first rank is rank 0, got one that rank "
            f"{dist.get_global_rank(optimizer._group.group, 0)} leads, which torch.distributed.checkpoint of torch "
            f"{torch.__version__} can't save or load for: use a later torch"
        )


def _with_others(own: dict[str, T], others: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """This rank's entries and those that others told of."""
    found = dict(own)
    for told in others:
        found.update(told)
    return found


def _put_row(record: ShardedParameter, own: Tensor, master: Tensor | None, ranks: ShardGroup) -> None:
    record.load_row(own, master)
    if record.split.numel:
        ranks.all_gather(record.rows).wait()
        torch.autograd.graph.increment_version(record.p)
    record.note_version()


def _gathered(own: Tensor, numel: int, ranks: ShardGroup) -> Tensor:
    """A flat tensor of which each rank has its slice, as bytes: collectives don't know all dtypes."""
    split = EvenSplit(numel, ranks.size)
    device = own.device if ranks.serves(own.device) else torch.device(ranks.device_types[0])
    wire = torch.empty(ranks.size, split.slice_size, dtype=own.dtype, device=device)
    wire[ranks.rank, : len(own)].copy_(own)
    ranks.all_gather(wire.view(torch.uint8)).wait()
    return wire.view(-1)[:numel]


def _under(prefix: str, entries: Mapping[str, T]) -> dict[str, T]:
    """The entries whose names start with ``prefix``, without it."""
    return {full.removeprefix(prefix): entry for full, entry in entries.items() if full.startswith(prefix)}


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside a boosted or compiled one, whose names are those without a prefix."""
    while hasattr(model, "unwrap") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


def _tensors(model: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """Every name of every parameter and persistent buffer, and whether it is a buffer."""
    found: list[tuple[str, Tensor, bool]] = [
        (name, p, False) for name, p in model.named_parameters(remove_duplicate=False)
    ]
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}" if prefix else name, buffer, True))
    return found


def _families(model: nn.Module, parameters: ParameterStore) -> dict[Tensor, int]:
    """The families of what the model holds; also where the optimizer, which wasn't given it, doesn't know them."""
    found: dict[Tensor, int] = {record.p: record.family for record in parameters}
    found |= {p: parameters.family_of(p) for members in parameters.groups for p in members}
    add_companions(found, model)
    return found


def _described(
    name: str, tensor: Tensor, record: ShardedParameter | None, group: int | None, is_buffer: bool
) -> SavedTensor:
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"{name}: expected a dense tensor with values, got {tensor.layout} on {tensor.device}")
    if record is not None:
        record.check_home()
    stride = tensor.stride() if record is not None else _dense(tensor).stride()
    kind = "buffer" if is_buffer else "frozen" if record is None else "trainable"
    return SavedTensor(tuple(tensor.shape), tuple(stride), str(tensor.dtype).removeprefix("torch."), kind, group)


def _dense(tensor: Tensor) -> Tensor:
    """A tensor without values, of the same shape and strides, or contiguous where those leave gaps or overlap."""
    return torch.empty_like(tensor.detach(), device="meta")


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy ``values``; of an expanded tensor, whose elements share memory, each element once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)
