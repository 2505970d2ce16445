"""Sharded groups: the parameters that one shard group shares, with the parts that take gradients to new values.

Collectives of several groups come in their order on every rank, and none waits for another's in the midst of a
backward: each rank belongs to one group of every number, so no rank waits in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .bookkeeping.bucket_store import BucketStore, Packed, Reduction, StepOnDevice
from .bookkeeping.gather_store import GatherStore
from .bookkeeping.gradient_store import GradientStore
from .bookkeeping.parameter_store import ParameterStore
from .bookkeeping.sharded_parameter import ShardedParameter
from .bookkeeping.step_state import StepState
from .communication.shard_group import ShardGroup
from .options import ZeroOptions
from .reducer import Reducer
from .streams import Streams


class ShardedGroup(NamedTuple):
    """The parameters that one shard group shares, with what takes their gradients to new values.

    Attributes:
        number: its place among the shard groups; 0 is that of all data-parallel ranks.
        group: the ranks.
        records: the parameters.
        gradients: keeps the sums that reductions leave.
        reducer: turns backwards into these sums.
        gathers: brings stepped slices back into parameters.
    """

    number: int
    group: ShardGroup
    records: Sequence[ShardedParameter]
    gradients: GradientStore
    reducer: Reducer
    gathers: GatherStore


class GroupMaker(NamedTuple):
    """Makes the sharded groups of one optimizer, from the parts that all of them have in common.

    Attributes:
        parameters: the records.
        options: the caller's choices.
        streams: the device's streams, on which everything happens.
        stepping: says whether shards and masters are on the device or on the host.
        state: of the optimizer's step.
        packed: is called with each bucket buffer that is about to be reduced.
    """

    parameters: ParameterStore
    options: ZeroOptions
    streams: Streams
    stepping: StepOnDevice
    state: StepState
    packed: Packed

    def extend(self, groups: list[ShardedGroup]) -> None:
        """Take new records into the plans and hooks of ``groups``, and add groups that had no records before."""
        known = {each.number for each in groups}
        for each in groups:
            each.reducer.extend()
        new = [
            number for number, records in enumerate(self.parameters.by_shard_group) if records and number not in known
        ]
        groups += map(self._new_group, new)
        groups.sort(key=lambda each: each.number)

    def _new_group(self, number: int) -> ShardedGroup:
        parameters, options = self.parameters, self.options
        group, records = parameters.shard_groups[number], parameters.by_shard_group[number]
        gradients = GradientStore(records, self.stepping.bucket_type(), self.state, self.streams)
        under_way = group.backend(records[0].padded.device).in_flight
        travel = options.communication
        divisor = travel.gradient_predivide_factor
        how = Reduction(group, options.stage == 2, divisor, self.streams, self.packed, under_way)
        buckets = BucketStore(records, how, self.stepping.bucket_type(), self.state)
        reducer = Reducer(parameters, options, gradients, buckets, number, self.state)
        wide = travel.pad_buckets_for_high_nccl_busbw
        gathers = GatherStore(group, self.streams, self.stepping, self.state, travel.overlap_gathers, wide)
        return ShardedGroup(number, group, records, gradients, reducer, gathers)
