"""What one rank's model holds that goes into a checkpoint, by the model's own names; nothing here communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..bookkeeping.module_names import joined, places
from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..communication.shard_group import ShardGroup
from ..experts.assignment import add_companions
from ..partition import EvenSplit
from .manifest import BUFFER, FROZEN, TRAINABLE, UNTRAINED, SavedTensor
from .optimizers import Name, called

_EXTRA = "_extra_state"


class Entry(NamedTuple):
    """A parameter or persistent buffer of the model.

    Attributes:
        tensor: it.
        record: an optimizer's, if one trains it.
        saved: how it is described in a manifest.
        shard_group: index of that of the ranks that share it.
        ranks: these.
    """

    tensor: Tensor
    record: ShardedParameter | None
    saved: SavedTensor
    shard_group: int
    ranks: ShardGroup

    @property
    def split(self) -> EvenSplit:
        """How its elements are shared out: a record's as it is trained; others', so that each rank writes its part."""
        return EvenSplit(self.saved.numel, self.ranks.size) if self.record is None else self.record.split


class Held(NamedTuple):
    """What a model holds.

    Attributes:
        entries: parameters and persistent buffers by their first names.
        tied: other names of those that have several.
        stateful: modules with ``get_extra_state``, by what that is called in a state dict.
        shard_group_of: the indices of all of these, by name.
    """

    entries: dict[str, Entry]
    tied: dict[str, str]
    stateful: dict[str, nn.Module]
    shard_group_of: dict[str, int]


def held_by(model: nn.Module, stores: Mapping[Name, ParameterStore], groups: Sequence[ShardGroup]) -> Held:
    """What ``model`` holds, wrapped or not.

    Args:
        stores: the parameters of each optimizer.
        groups: the shard groups.

    Raises:
        ValueError: an optimizer's parameter isn't the model's, or is another's too, or a tensor can't be saved.
        RuntimeError: a parameter was moved since the optimizer was constructed.
    """
    members = _members(stores, groups)
    number_of = {p: max(each.number for each in of) for p, of in members.items()}
    add_companions(number_of, model)
    names: dict[Tensor, str] = {}
    entries: dict[str, Entry] = {}
    tied: dict[str, str] = {}
    for name, tensor, is_buffer in _tensors(model):
        if tensor in names:
            tied[name] = names[tensor]
        elif name in entries:
            raise ValueError(f"{name}: expected one tensor of this name, got a wrapper's own and that of what it wraps")
        else:
            names[tensor] = name
            member = _only(name, members.get(tensor, []), groups[0])
            number = number_of.get(tensor, 0)
            ranks = groups[number] if member.record is None else member.ranks
            entries[name] = Entry(tensor, member.record, _described(name, tensor, member, is_buffer), number, ranks)
    for p in members:
        if p not in names:
            raise ValueError(
                f"model: expected all parameters of the optimizer in it, but a {tuple(p.shape)} one isn't: pass "
                "the module that holds them all (an nn.ModuleDict of several)"
            )
    stateful = _stateful(model)
    numbers = {name: entry.shard_group for name, entry in entries.items()}
    numbers |= {alias: numbers[name] for alias, name in tied.items()}
    numbers |= {name: _number_of(module, number_of) for name, module in stateful.items()}
    return Held(entries, tied, stateful, numbers)


def without_values(tensor: Tensor) -> Tensor:
    """A tensor without values, of the same shape and strides, or contiguous where those leave gaps or overlap."""
    return torch.empty_like(tensor.detach(), device="meta")


def _tensors(model: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """Every name of every parameter and persistent buffer, and whether it is a buffer."""
    everywhere = list(places(model))
    found: list[tuple[str, Tensor, bool]] = [
        (joined(place.name, name), p, False)
        for place in everywhere
        for name, p in place.module._parameters.items()
        if p is not None
    ]
    return found + [
        (joined(place.name, name), buffer, True)
        for place in everywhere
        for name, buffer in place.module._buffers.items()
        if buffer is not None and name not in place.module._non_persistent_buffers_set
    ]


def _described(name: str, tensor: Tensor, member: _Member, is_buffer: bool) -> SavedTensor:
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"{name}: expected a dense tensor with values, got {tensor.layout} on {tensor.device}")
    if member.record is not None:
        member.record.take_back()
    stride = tensor.stride() if member.record is not None else without_values(tensor).stride()
    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = UNTRAINED if tensor.requires_grad else FROZEN
    if is_buffer or member.record is not None:
        kind = BUFFER if is_buffer else TRAINABLE
    return SavedTensor(tuple(tensor.shape), tuple(stride), dtype, kind, member.group, member.optimizer)


def _stateful(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, _, module in places(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state and module not in found.values():
            found[joined(name, _EXTRA)] = module
    return found


# ---- who trains it ----


class _Member(NamedTuple):
    """A parameter's place in an optimizer's param groups, its record if it is trained there, and who shares it."""

    optimizer: Name
    group: int | None
    record: ShardedParameter | None
    ranks: ShardGroup
    number: int


def _members(stores: Mapping[Name, ParameterStore], groups: Sequence[ShardGroup]) -> dict[Tensor, list[_Member]]:
    number = {group.group: at for at, group in enumerate(groups) if at}
    found: dict[Tensor, list[_Member]] = {}
    for name, store in stores.items():
        numbers = [0, *(number[group.group] for group in store.shard_groups[1:])]
        for at, group in enumerate(store.groups):
            for p in group:
                of = store.shard_group_of(p)
                member = _Member(name, at, store.find(p), store.shard_groups[of], numbers[of])
                found.setdefault(p, []).append(member)
    return found


def _only(name: str, members: Sequence[_Member], everyone: ShardGroup) -> _Member:
    """The one that trains it, else the first, else one of no optimizer."""
    trains = [member for member in members if member.record is not None]
    if len(trains) > 1:
        one, other = (called(member.optimizer) for member in trains[:2])
        raise ValueError(
            f"{name}: expected one optimizer that trains it, got {one} and {other}: leave it to one of them"
        )
    return (trains or members or [_Member(None, None, None, everyone, 0)])[0]


def _number_of(module: nn.Module, numbers: dict[Tensor, int]) -> int:
    """That of all its tensors."""
    own = {numbers.get(tensor, 0) for tensor in (*module.parameters(), *module.buffers())}
    return own.pop() if len(own) == 1 else 0
