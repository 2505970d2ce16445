"""Puts parameters over padded storages, and the wrapped optimizer over this rank's slices of them."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import Position, ShardedParameter
from ..bookkeeping.storages import memory_of, tensors_in
from ..communication.broadcast import Broadcast
from ..communication.failed_ranks import run_each
from ..optim.quantised import slice_multiple
from ..options import ZeroOptions
from ..partition import Choice, Split, splits_of
from ..state.values import slice_state

_log = logging.getLogger("lowlevel_zero")


class Sharding:
    """Shards an optimizer's new param groups: records, padded storages, then slices in place of parameters.

    Made on each rank by itself: every trainable parameter gets a record, and moves over padded storage; frozen ones get
    neither record nor state. Then all ranks start alike, buffers and untrained parameters of ``model`` included, then
    each takes its slices.
    """

    @torch.no_grad()
    def __init__(
        self,
        optimizer: Optimizer,
        parameters: ParameterStore,
        options: ZeroOptions,
        names: Mapping[Tensor, str],
        choices: Mapping[Tensor, Choice],
        model: nn.Module | None,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._options = options
        self._known = len(parameters.groups)
        self._left: list[tuple[int, int, str]] = []
        new = optimizer.param_groups[self._known :]
        group_of: dict[nn.Parameter, int] = {
            p: at for at, group in enumerate(new, start=self._known) for p in group["params"] if p.requires_grad
        }
        places: dict[nn.Parameter, tuple[Position, Split]] = {}
        multiple = slice_multiple(optimizer)
        for number, ranks in enumerate(parameters.shard_groups):
            before = parameters.by_shard_group[number]
            own = [p for p in group_of if parameters.shard_group_of(p) == number]
            wanted = [choices[p]._replace(multiple=multiple(p.numel(), ranks.size)) for p in own]
            splits = splits_of(wanted, ranks.size, (record.split for record in before))
            for index, (p, split) in enumerate(zip(own, splits, strict=True), start=len(before)):
                places[p] = Position(index, group_of[p], names[p], number), split
        self._records = [self._record(p, *places[p]) for p in group_of]
        alike: list[list[Tensor]] = [[] for _ in parameters.shard_groups]
        for record in self._records:
            states = optimizer.state.get(record.p)
            alike[record.shard_group] += [record.padded, *(tensors_in(states) if states else ())]
        for tensor in self._untrained(model):
            alike[parameters.shard_group_of(tensor)].append(distinct(tensor.detach()))
        device = (self._records or parameters.records)[0].padded.device
        shares = zip(parameters.shard_groups, alike, strict=True)
        self._broadcasts = [Broadcast(ranks, tensors, device) for ranks, tensors in shares]

    def _record(self, p: nn.Parameter, position: Position, split: Split) -> ShardedParameter:
        """Return the record of ``p``, and note the memory that ``p`` has left if its values were moved."""
        ranks, travel = self._parameters.shard_groups[position.shard_group], self._options.communication
        before = memory_of(p)
        record = ShardedParameter(position, p, split, ranks.rank, travel.dtype, travel.in_fp8(split))
        if record.address != before[0]:
            self._left.append((*before, position.name))
        return record

    def _untrained(self, model: nn.Module | None) -> list[Tensor]:
        """Return buffers and untrained parameters, to be broadcast too; warn of one in memory that a parameter left."""
        rest: dict[Tensor, None] = dict.fromkeys(
            p for settings in self._optimizer.param_groups[self._known :] for p in settings["params"]
        )
        if model is not None:
            rest.update(dict.fromkeys((*model.parameters(), *model.buffers())))
        sharded = {record.p for record in self._records}
        others = [tensor for tensor in rest if tensor not in sharded]
        self._warn_of_left(others)
        return others

    def _warn_of_left(self, others: Iterable[Tensor]) -> None:
        """Warn, on the first rank, of the first of ``others`` that still uses memory which a parameter has left."""
        left = sorted(self._left)
        for start, stop in (memory_of(other) for other in others if other.layout == torch.strided):
            at = bisect_left(left, (stop, 0, "")) - 1  # the last that begins before its end
            if start < stop and at >= 0 and left[at][1] > start:
                if self._parameters.shard_groups[0].group_rank == 0:
                    text = "%s: a buffer or frozen parameter over the same memory doesn't follow it any more"
                    _log.warning(text, left[at][2])
                return

    @torch.no_grad()
    def broadcast_initial_values(self) -> None:
        """Broadcast parameters, buffers and states from the first rank that shares them. Communicates.

        Where it fails in one shard group, the broadcasts of the others are run all the same, since their ranks wait.
        """
        run_each(each.run for each in self._broadcasts)
        self._broadcasts.clear()

    @torch.no_grad()
    def take_slices(self) -> None:
        """Put slices, and their state, into the optimizer in place of whole parameters. Doesn't communicate."""
        optimizer, parameters = self._optimizer, self._parameters
        groups = optimizer.param_groups[self._known :]
        for settings in groups:
            self._drop_names(set(settings["params"]))
            parameters.move_to_new_group(list(settings["params"]))
        for record in self._records:
            record.make_master(self._options.master_dtype(record.p.dtype), on_host=self._options.cpu_offload)
            parameters.add(record)
            if record.p in optimizer.state:
                whole = optimizer.state.pop(record.p)
                if record.owns_some:
                    optimizer.state[record.p32] = slice_state(whole, record)
        for settings in groups:
            records = [parameters.find(p) for p in settings["params"]]
            for p in settings["params"]:
                optimizer.state.pop(p, None)  # a frozen one's
            settings["params"] = [record.p32 for record in records if record is not None]

    def _drop_names(self, moved: Collection[Tensor]) -> None:
        """Drop the names of frozen parameters from the groups that they are about to leave."""
        for settings, members in zip(self._optimizer.param_groups, self._parameters.groups, strict=False):
            names = settings.get("param_names", ())
            if len(names) == len(members):
                settings["param_names"] = [name for p, name in zip(members, names, strict=True) if p not in moved]


def convert(groups: Iterable[Mapping[str, Any]], dtype: torch.dtype | None) -> None:
    """Convert floating-point parameters of ``groups`` to ``dtype``, and drop gradients of another; None: do nothing.

    Frozen ones may be integers, as codes of quantised weights, or complex.
    """
    for group in groups if dtype is not None else ():
        for p in group["params"]:
            if p.is_floating_point() and p.dtype != dtype:
                p.grad = None
                p.data = p.data.to(dtype)


def distinct(tensor: Tensor) -> Tensor:
    """Return a view of ``tensor`` without the repetitions of expanded dimensions."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
