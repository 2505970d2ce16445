"""Parameters by the ranks that share them: one group, or with experts several, which the optimizer loops over.

Collectives of several come in the order of the groups on every rank, and none waits for another's in the midst of a
backward: each rank belongs to one group of every number, so whatever the groups, nobody waits in a circle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor

from ..communication.collectives import ShardGroup
from ..options import ZeroOptions
from ..reducer import Reducer
from ..streams import Streams
from .gather_store import GatherStore
from .gradient_store import GradientStore
from .offload import Offload
from .parameter_store import ParameterStore, ShardedParameter
from .step_observer import StepObserver

_log = logging.getLogger("lowlevel_zero")


class ShardedGroup(NamedTuple):
    """The parameters that one shard group shares, with what takes their gradients to new values.

    Attributes:
        number: its place among the shard groups; 0 is that of all data-parallel ranks.
        group: the ranks.
        records: the parameters.
        gradients: what reductions leave.
        reducer: turns backwards into that.
        gathers: brings stepped slices back.
    """

    number: int
    group: ShardGroup
    records: Sequence[ShardedParameter]
    gradients: GradientStore
    reducer: Reducer
    gathers: GatherStore


class GroupMaker(NamedTuple):
    """What all groups of an optimizer have in common.

    Attributes:
        parameters: the records.
        options: the caller's choices.
        streams: what all of it happens on.
        raw_unit: makes what gradients as reductions leave them are to be multiplied with to be averaged and unscaled.
        offload: brings rows to the host and back; None: they stay where they are.
        driver: stands for the optimizer whose backward drives the reducers.
        observer: is told of each bucket buffer.
    """

    parameters: ParameterStore
    options: ZeroOptions
    streams: Streams
    raw_unit: Callable[[], float | Tensor]
    offload: Offload | None
    driver: object
    observer: StepObserver

    def extend(self, groups: list[ShardedGroup]) -> None:
        """Take records that are new into the plans and hooks of ``groups``, and add groups that had none before."""
        known = {each.number for each in groups}
        for each in groups:
            each.reducer.extend()
        new = [number for number, records in enumerate(self.parameters.families) if records and number not in known]
        groups += map(self._new_group, new)
        groups.sort(key=lambda each: each.number)

    def _new_group(self, number: int) -> ShardedGroup:
        parameters, options = self.parameters, self.options
        group, records = parameters.shard_groups[number], parameters.families[number]
        gradients = GradientStore(records, group.rank, self.raw_unit, self.offload)
        reducer = Reducer(parameters, options, gradients, self.streams, number, self.driver, self.observer)
        wide = options.pad_buckets_for_high_nccl_busbw
        gathers = GatherStore(group, self.streams, options.overlap_allgather, self.offload, wide)
        return ShardedGroup(number, group, records, gradients, reducer, gathers)


def in_each(calls: Iterable[Callable[[], None]]) -> None:
    """Make all these calls in order, whatever one of them raises: other ranks make them too."""
    with ExitStack() as stack:
        for call in reversed(list(calls)):
            stack.callback(call)


def release(groups: Sequence[ShardedGroup], ranks: Sequence[ShardGroup]) -> None:
    """The optimizer is gone: let others have the memory of bucket buffers, when nothing is under way any more.

    Args:
        groups: of the optimizer.
        ranks: all of its shard groups, those included that have no parameters to train.
    """
    reducers = {each.number: each.reducer for each in groups}
    for number, group in enumerate(ranks):
        reducer = reducers.get(number)
        if reducer is None or reducer.idle:
            group.release()
        else:
            group.abandon(reducer.under_way())


def log_start(groups: Sequence[ShardedGroup], parameters: ParameterStore, options: ZeroOptions) -> None:
    """One line, on the first of all ranks."""
    ranks = parameters.shard_groups[0]
    if ranks.place == 0:
        way = ranks.way_of(parameters.records[0].padded.device)
        _log.info(
            "ZeRO stage %d: %s elements in %d parameters over %d ranks, %d buckets%s",
            2 if options.partition_grad else 1,
            f"{sum(record.split.numel for record in parameters):,}",
            len(parameters.records),
            ranks.ranks,
            sum(len(each.reducer.plan.whole.buckets) for each in groups),
            "" if way is None else f", by {way}",
        )
