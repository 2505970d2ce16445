"""Sharded groups: the parameters that one shard group shares, with their gradients, reducer and gathers.

Collectives of several groups come in their order on every rank, and none waits for another's in the midst of a
backward: each rank belongs to one group of every number, so no rank waits in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence

from .bookkeeping.bucket_plan import LearntPlan
from .bookkeeping.bucket_store import BucketStore, Packed, Reduction, StepOnDevice
from .bookkeeping.gather_store import GatherStore
from .bookkeeping.gradient_store import GradientStore
from .bookkeeping.gradient_sync import GradientSyncs
from .bookkeeping.parameter_store import ParameterStore
from .bookkeeping.sharded_parameter import ShardedParameter
from .bookkeeping.step_state import StepState
from .bookkeeping.unused_parameters import UnusedParameters
from .options import ZeroOptions
from .reducer import Reducer
from .streams import Streams


class ShardedGroup:
    """The records of one shard group, and the parts that reduce, keep and gather their values."""

    def __init__(
        self,
        number: int,  # its place among the shard groups; 0 is that of all data-parallel ranks
        parameters: ParameterStore,
        options: ZeroOptions,
        streams: Streams,  # the device's, on which everything happens
        stepping: StepOnDevice,  # says whether shards and masters are on the device or on the host
        state: StepState,
        packed: Packed,  # is called with each bucket buffer that is about to be reduced
    ) -> None:
        self.number = number
        self.group = group = parameters.shard_groups[number]
        self.records: Sequence[ShardedParameter] = parameters.by_shard_group[number]
        device, travel = self.records[0].padded.device, options.communication
        backend, wide = group.backend(device), travel.pad_buckets_for_high_nccl_busbw
        # A rank must not wait in one shard group for a peer that may be waiting for it in another.
        alone = len(parameters.by_shard_group) == 1
        most = backend.in_flight if alone and (options.stage == 2 or backend.limits_all_reduce) else None
        in_order = group.has_others and not group.on_gloo(device)
        divisor, under_way = travel.gradient_predivide_factor, backend.in_flight
        reduction = Reduction(group, options.stage == 2, divisor, streams, packed, under_way)
        self.gradients = GradientStore(self.records, stepping, state, streams)
        buckets = BucketStore(self.records, reduction, stepping, state)
        plan = LearntPlan(self.records, group, travel.bucket_size or group.bucket_size(device), wide)
        syncs = GradientSyncs(
            group,
            parameters.shard_groups[0],
            plan,
            UnusedParameters(parameters, number),
            self.gradients,
            buckets,
            state,
            most,
            in_order,
        )
        self.reducer = Reducer(number, group, self.records, syncs, travel.overlap_reductions, state)
        self.gathers = GatherStore(group, streams, stepping, state, travel.overlap_gathers, wide)
