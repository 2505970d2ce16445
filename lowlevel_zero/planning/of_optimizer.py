"""What an optimizer holds now, and who owns what of it: hangs on its records and bucket plans."""

from __future__ import annotations

import torch.distributed as dist

from ..bookkeeping.sharded_parameter import ShardedParameter
from ..sharded_optimizer import ShardedOptimizer
from .layout import Layout, ParameterLayout, layout_of, parameter_layout
from .memory import held_bytes
from .state_sizes import state_tensors


def memory_held(optimizer: ShardedOptimizer) -> dict[str, int]:
    """Bytes held on this rank now, by owner, every storage counted once."""
    parameters = optimizer.sharded_parameters
    gradients = [each for each in (record.unreduced for record in parameters) if each is not None]
    for group in optimizer.sharded_groups:
        gradients += group.gradients.held()
        gradients += [tensor for work in group.reducer.under_way() for tensor in work.tensors]
    return held_bytes(
        {
            "parameters": [
                *(p for members in parameters.groups for p in members),
                *(record.padded for record in parameters),
            ],
            "gradients": gradients,
            "masters": [record.p32 for record in parameters],
            "states": [tensor for state in optimizer.optim.state.values() for tensor in state_tensors(state)],
            "bucket_buffers": [buffer for ranks in parameters.shard_groups for buffer in ranks.held()],
        }
    )


def layout(optimizer: ShardedOptimizer) -> Layout:
    """Who owns what: each parameter's slices, place in bucket buffers and bytes."""
    groups = [
        ([_layout_of(optimizer, record, group.group.slice_ranks) for record in group.records], group.reducer.plan.whole)
        for group in optimizer.sharded_groups
    ]
    return layout_of(groups, 2 if optimizer.options.partition_grad else 1, dist.get_rank())


def _layout_of(optimizer: ShardedOptimizer, record: ShardedParameter, ranks: list[int]) -> ParameterLayout:
    p, state = record.p, sum(value.nbytes for value in state_tensors(optimizer.optim.state.get(record.p32, {})))
    return parameter_layout(record.name, p.shape, p.dtype, record.group, ranks, record.split, optimizer.options, state)
