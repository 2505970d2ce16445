"""Muon's step over slices: each matrix is whole on one rank for as long as it takes to orthogonalise it.

Muon (Jordan et al., 2024) is elementwise but for one thing: the update of a matrix is orthogonalised. So momenta stay
in slices, while slices of updates travel to the matrix's owner and back, in bf16, in which it is orthogonalised. (That
each matrix has one owner for this is as in Dion's Muon; here owners are found anew when other layers are dropped.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer

from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..communication.shard_group import ShardGroup

with suppress(ImportError):  # torch's own arithmetic, which it has along with Muon, from 2.9 on
    from torch.optim._muon import _adjust_lr as adjusted_rate
    from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalise

DTYPE = torch.bfloat16  # in which a matrix is orthogonalised

# Elements of a batch for each rank; three batches are held at a time.
MOST = 2**22

# Matrices that travel together, by the rank that owns them.
_ByOwner: TypeAlias = Sequence[Sequence[ShardedParameter]]
# The same, by the matrices' places among all.
Batch: TypeAlias = list[list[int]]


class WorkItem(NamedTuple):
    """A matrix that one rank orthogonalises for all.

    Attributes:
        cost: how long it takes, in any unit.
        numel: elements that travel to that rank, and back.
    """

    cost: int
    numel: int


def share_out(items: Sequence[WorkItem], world_size: int, most: int) -> list[Batch]:
    """Share ``items`` out, the costliest first, each to the rank that has least to do so far.

    Two ranks' costs differ by one item at most, and the largest is at most 4/3 of the least possible (Graham, 1969).
    The result is the same on every rank that gives the same items.

    Args:
        items: the work.
        world_size: ranks that share it.
        most: elements of a batch, for each rank; a batch may be larger if each rank has only one item of it.
    """
    loads = [(0, rank) for rank in range(world_size)]
    batches: list[Batch] = []
    count = held = 0
    for place in sorted(range(len(items)), key=lambda place: -items[place].cost):
        cost, numel = items[place]
        if not batches or (count >= world_size and held + numel > most * world_size):
            batches.append([[] for _ in range(world_size)])
            count = held = 0
        count, held = count + 1, held + numel
        load, rank = loads[0]
        batches[-1][rank].append(place)
        heapq.heapreplace(loads, (load + cost, rank))
    return batches


class MuonStep:
    """Takes the step of ``torch.optim.Muon``, by the ranks together.

    Args:
        optim: a ``torch.optim.Muon`` over slices.
        parameters: whose the slices are, and who shares them.
    """

    def __init__(self, optim: Optimizer, parameters: ParameterStore) -> None:
        self._optim = optim
        self._shard_groups = parameters.shard_groups
        self._planned: list[ShardedParameter] = []
        self._batches: list[tuple[ShardGroup, _ByOwner]] = []

    def __call__(self, records: Sequence[ShardedParameter]) -> None:
        """Step ``records``, whose ``p32`` have gradients: by shard group, each alike on the ranks that share it.

        While one batch is orthogonalised, the next is on its way to the owners and the one before on its way back.
        """
        if self._planned != records:
            self._planned = list(records)
            self._batches = self._plan(self._planned)
        batches = [_stages(self._optim, *batch) for batch in self._batches]
        for at in range(len(batches) + 2):
            for batch in reversed(batches[max(0, at - 2) : at + 1]):
                next(batch, None)

    def _plan(self, records: Sequence[ShardedParameter]) -> list[tuple[ShardGroup, _ByOwner]]:
        """Return batches of matrices by their owners; each batch is of one shard group."""
        batches: list[tuple[ShardGroup, _ByOwner]] = []
        for number, group in enumerate(self._shard_groups):
            members = [record for record in records if record.shard_group == number]
            items = [WorkItem(flops(record.p.shape), record.split.numel) for record in members]
            for batch in share_out(items, group.size, MOST):
                batches.append((group, [[members[place] for place in places] for places in batch]))
        return batches


def _stages(optim: Optimizer, group: ShardGroup, by_owner: _ByOwner) -> Iterator[None]:
    """Step some matrices in three stages, on every rank: send their updates to the owners, back, and move the slices.

    Two buffers: the way there fills one from the other, and the way back the other from the one.
    """
    records, owned = list(chain.from_iterable(by_owner)), by_owner[group.rank]
    sizes = [sum(record.split.slice_size for record in each) for each in by_owner]
    own_sizes = [sizes[group.rank]] * group.size
    slices = torch.empty(sum(sizes), dtype=DTYPE, device=records[0].padded.device)  # owner by owner
    parts = slices.split_with_sizes([record.split.slice_size for record in records])
    for record, part in zip(records, parts, strict=True):
        part.copy_(_update(optim, record))
    there = group.all_to_all(slices, sizes, slices.new_empty(sum(own_sizes)), own_sizes)
    yield
    rows = there.wait()
    columns = rows.view(group.size, own_sizes[0]).split_with_sizes([each.split.slice_size for each in owned], dim=1)
    for record, own in zip(owned, columns, strict=True):
        _orthogonalise_rows(own, record, optim.param_groups[record.group])
    back = group.all_to_all(rows, own_sizes, slices, sizes)
    yield
    back.wait()
    for record, part in zip(records, parts, strict=True):
        _move(record, part, optim.param_groups[record.group])


def _update(optim: Optimizer, record: ShardedParameter) -> Tensor:
    """Advance the momentum, and return this rank's slice of the matrix that is to be orthogonalised."""
    settings, state, gradient = optim.param_groups[record.group], optim.state[record.p32], record.p32.grad
    assert gradient is not None, "a record without a gradient doesn't work in this step"
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    momentum = settings["momentum"]
    mean: Tensor = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
    return gradient.lerp(mean, momentum) if settings["nesterov"] else mean


def _orthogonalise_rows(rows: Tensor, record: ShardedParameter, settings: dict[str, Any]) -> None:
    """Orthogonalise a matrix in place, given as the rows of all ranks, ``[world_size, s]``."""
    matrix = record.restore(rows.contiguous().view(-1)[: record.split.numel])
    result = orthogonalise(matrix, settings["ns_coefficients"], settings["ns_steps"], settings["eps"])
    rows.copy_(pad(record.flatten(result), (0, record.split.padding)).view(rows.shape))


def _move(record: ShardedParameter, direction: Tensor, settings: dict[str, Any]) -> None:
    """Decay ``p32`` and move it, as torch does."""
    lr = settings["lr"]
    rate = adjusted_rate(lr, settings["adjust_lr_fn"], record.p.shape)
    record.p32.mul_(1 - lr * settings["weight_decay"])
    record.p32.add_(direction.to(record.p32.device), alpha=-rate)


def flops(shape: Sequence[int]) -> int:
    """Return the relative cost of orthogonalising a matrix of ``shape``."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)
