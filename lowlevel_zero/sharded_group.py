"""Sharded groups: the parameters that one shard group shares, with their gradients, reducer and gathers.

Collectives of several groups come in their order on every rank, and none waits for another's in the midst of a
backward: each rank belongs to one group of every number, so no rank waits in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence

from .bookkeeping.bucket_store import BucketStore, Packed, Reduction, StepOnDevice
from .bookkeeping.gather_store import GatherStore
from .bookkeeping.gradient_store import GradientStore
from .bookkeeping.parameter_store import ParameterStore
from .bookkeeping.sharded_parameter import ShardedParameter
from .bookkeeping.step_state import StepState
from .options import ZeroOptions
from .reducer import Reducer
from .streams import Streams


class ShardedGroup:
    """The records of one shard group, and the parts that reduce, keep and gather their values.

    Args:
        number: its place among the shard groups; 0 is that of all data-parallel ranks.
        parameters: the records.
        options: the options of the optimizer.
        streams: the device's streams, on which everything happens.
        stepping: says whether shards and masters are on the device or on the host.
        state: of the optimizer's step.
        packed: is called with each bucket buffer that is about to be reduced.

    Attributes:
        number: as given.
        group: the ranks.
        records: the parameters that they share.
        gradients: keeps the sums that reductions leave.
        reducer: turns backwards into these sums.
        gathers: brings stepped slices back into parameters.
    """

    def __init__(
        self,
        number: int,
        parameters: ParameterStore,
        options: ZeroOptions,
        streams: Streams,
        stepping: StepOnDevice,
        state: StepState,
        packed: Packed,
    ) -> None:
        self.number = number
        self.group = group = parameters.shard_groups[number]
        self.records: Sequence[ShardedParameter] = parameters.by_shard_group[number]
        new_bucket, travel = stepping.bucket_type(), options.communication
        under_way = group.backend(self.records[0].padded.device).in_flight
        reduction = Reduction(group, options.stage == 2, travel.gradient_predivide_factor, streams, packed, under_way)
        self.gradients = GradientStore(self.records, new_bucket, state, streams)
        buckets = BucketStore(self.records, reduction, new_bucket, state)
        self.reducer = Reducer(parameters, options, self.gradients, buckets, number, state)
        wide = travel.pad_buckets_for_high_nccl_busbw
        self.gathers = GatherStore(group, streams, stepping, state, travel.overlap_gathers, wide)
