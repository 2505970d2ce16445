"""Muon's step over slices: each matrix is whole on one rank for as long as it takes to orthogonalise it.

Muon (Jordan et al., 2024) is elementwise but for one thing: the update of a matrix is orthogonalised. So momenta stay
in slices, while slices of updates travel to the matrix's owner and back, in bf16, in which it is orthogonalised. (That
each matrix has one owner for this is as in Dion's Muon; here owners are found anew when other layers are dropped.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer

from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..communication.shard_group import ShardGroup
from ..communication.work import Work
from .work_shares import WorkItem, share_out

with suppress(ImportError):  # torch's own arithmetic, which it has along with Muon, from 2.9 on
    from torch.optim._muon import _adjust_lr as adjusted_rate
    from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalise

DTYPE = torch.bfloat16  # in which a matrix is orthogonalised

# Elements of a batch for each rank; three batches are held at a time.
MOST = 2**22


class MuonStep:
    """What ``torch.optim.Muon.step`` does, by the ranks together.

    Args:
        optim: a ``torch.optim.Muon`` over slices.
        parameters: whose the slices are, and who shares them.
    """

    def __init__(self, optim: Optimizer, parameters: ParameterStore) -> None:
        self._optim = optim
        self._shard_groups = parameters.shard_groups
        self._planned: list[ShardedParameter] = []
        self._batches: list[_Batch] = []

    def __call__(self, records: Sequence[ShardedParameter]) -> None:
        """Step ``records``, whose ``p32`` have gradients: by shard group, each alike on the ranks that share it.

        While one batch is orthogonalised, the next is on its way to the owners and the one before on its way back.
        """
        if self._planned != records:
            self._planned = list(records)
            self._batches = self._plan(self._planned)
        batches = self._batches
        for at in range(len(batches) + 2):
            for batch in batches[at : at + 1]:
                batch.start()
            for batch in batches[max(0, at - 1) : at]:
                batch.turn()
            for batch in batches[max(0, at - 2) : max(0, at - 1)]:
                batch.finish()

    def _plan(self, records: Sequence[ShardedParameter]) -> list[_Batch]:
        """Batches of matrices by their owners; each batch is of one shard group and on one device."""
        batches: list[_Batch] = []
        for place in dict.fromkeys(_place(record) for record in records):
            group = self._shard_groups[place[0]]
            members = [record for record in records if _place(record) == place]
            items = [WorkItem(flops(record.p.shape), record.split.numel) for record in members]
            for batch in share_out(items, group.size, MOST):
                by_owner = [[members[number] for number in numbers] for numbers in batch]
                batches.append(_Batch(self._optim, group, by_owner))
        return batches


class _Batch:
    """Updates of some matrices, sent to their owners and back: ``start``, ``turn`` and ``finish``, on every rank.

    Two buffers: the way there fills one from the other, and the way back the other from the one.
    """

    def __init__(self, optim: Optimizer, group: ShardGroup, by_owner: Sequence[Sequence[ShardedParameter]]) -> None:
        self._optim = optim
        self._group = group
        self._records = list(chain.from_iterable(by_owner))
        self._owned = by_owner[group.rank]
        self._sizes = [sum(record.split.slice_size for record in owned) for owned in by_owner]
        self._owned_sizes = [self._sizes[group.rank]] * group.size
        self._slices: Tensor | None = None  # of all matrices, owner by owner
        self._under_way: Work[Tensor] | None = None

    def start(self) -> None:
        """Advance the momenta and hand slices of the updates to the owners."""
        self._slices = torch.empty(sum(self._sizes), dtype=DTYPE, device=self._records[0].padded.device)
        for record, part in self._parts(self._slices):
            part.copy_(_update(self._optim, record))
        rows = self._slices.new_empty(sum(self._owned_sizes))
        self._under_way = self._group.all_to_all(self._slices, self._sizes, rows, self._owned_sizes)

    def turn(self) -> None:
        """Orthogonalise the matrices that are this rank's, and hand their slices back."""
        assert self._under_way is not None, "not started"
        assert self._slices is not None, "not started"
        rows = self._under_way.wait()
        columns = rows.view(self._group.size, self._owned_sizes[0])
        sizes = [record.split.slice_size for record in self._owned]
        for record, own in zip(self._owned, columns.split_with_sizes(sizes, dim=1), strict=True):
            _orthogonalise_rows(own, record, self._optim.param_groups[record.group])
        self._under_way = self._group.all_to_all(rows, self._owned_sizes, self._slices, self._sizes)

    def finish(self) -> None:
        """Move the slices by what has come back."""
        assert self._under_way is not None, "not turned"
        for record, part in self._parts(self._under_way.wait()):
            _move(record, part, self._optim.param_groups[record.group])
        self._slices = self._under_way = None

    def _parts(self, slices: Tensor) -> list[tuple[ShardedParameter, Tensor]]:
        parts = slices.split_with_sizes([record.split.slice_size for record in self._records])
        return list(zip(self._records, parts, strict=True))


def _place(record: ShardedParameter) -> tuple[int, torch.device]:
    return record.shard_group, record.padded.device


def _update(optim: Optimizer, record: ShardedParameter) -> Tensor:
    """This rank's slice of what is to be orthogonalised; advances the momentum."""
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
    """What orthogonalising a matrix of ``shape`` costs, in multiples of one kind."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)
