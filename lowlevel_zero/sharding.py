"""Puts parameters over padded storages, and the wrapped optimizer over this rank's slices of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .bookkeeping.parameter_store import ParameterStore, Place, ShardedParameter
from .options import ZeroOptions
from .partition import EvenSplit
from .state import slice_state


@torch.no_grad()
def shard_groups(
    optimizer: Optimizer,
    parameters: ParameterStore,
    options: ZeroOptions,
    names: Mapping[Tensor, str],
) -> None:
    """Shard the param groups of ``optimizer`` that ``parameters`` doesn't know yet.

    Makes a record of each trainable parameter, starts all ranks that share it from the first one's values and
    state, cuts the state and leaves slices in place of parameters. Frozen parameters get no record and no state.
    """
    known = len(parameters.groups)
    records: list[ShardedParameter] = []
    numbers = [len(family) for family in parameters.families]
    for at, settings in enumerate(optimizer.param_groups[known:], start=known):
        members = list(settings["params"])
        parameters.move_to_new_group(members)
        for p in members:
            if p.requires_grad:
                family = parameters.family_of(p)
                ranks = parameters.shard_groups[family]
                place = Place(numbers[family], at, names[p], family)
                numbers[family] += 1
                split = EvenSplit(p.numel(), ranks.size)
                fp8 = options.in_fp8(p.numel(), ranks.size)
                records.append(ShardedParameter(place, p, split, ranks.rank, options.communication_dtype, fp8))
    for family, ranks in enumerate(parameters.shard_groups):
        own = [record for record in records if record.family == family]
        ranks.broadcast([record.padded for record in own])
        ranks.broadcast([value for record in own for value in _state_tensors(optimizer, record.p)])
    for record in records:
        record.make_master(precise=options.master_weights, on_host=options.cpu_offload)
        parameters.add(record)
        if record.p in optimizer.state:
            optimizer.state[record.p32] = slice_state(optimizer.state.pop(record.p), record)
    _leave_slices(optimizer, parameters, known)


def convert(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Convert every parameter of ``optimizer`` to ``dtype``, letting go of gradients of another."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.dtype != dtype:
                p.grad = None
                p.data = p.data.to(dtype)


@torch.no_grad()
def broadcast_rest(model: nn.Module | None, parameters: ParameterStore) -> None:
    """Start the ranks alike also in what isn't sharded: buffers, and parameters that aren't trained."""
    rest: dict[Tensor, None] = dict.fromkeys(p for members in parameters.groups for p in members)
    if model is not None:
        rest.update(dict.fromkeys(model.parameters()))
        rest.update(dict.fromkeys(model.buffers()))
    rest = dict.fromkeys(tensor for tensor in rest if parameters.find(tensor) is None)
    for family, ranks in enumerate(parameters.shard_groups):
        ranks.broadcast([_distinct(tensor.detach()) for tensor in rest if parameters.family_of(tensor) == family])


def _distinct(tensor: Tensor) -> Tensor:
    """An expanded buffer's elements, each once: what shares memory can't be written as a whole."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _leave_slices(optimizer: Optimizer, parameters: ParameterStore, known: int) -> None:
    for settings, members in zip(optimizer.param_groups[known:], parameters.groups[known:], strict=True):
        sharded = [record for p in members if (record := parameters.find(p)) is not None]
        for p in members:
            if parameters.find(p) is None:
                optimizer.state.pop(p, None)
        settings["params"] = [record.p32 for record in sharded]


def _state_tensors(optimizer: Optimizer, p: Tensor) -> Iterator[Tensor]:
    return (value for value in optimizer.state.get(p, {}).values() if isinstance(value, Tensor))
