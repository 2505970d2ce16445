"""What an optimizer holds now, and who owns what of it: hangs on its records and bucket plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..construction import ShardedGroup
from ..sharded_optimizer import ShardedOptimizer
from .layout import Layout, Owned, Shared, layout_of
from .memory import held_bytes


def memory_held(optimizer: ShardedOptimizer) -> dict[str, int]:
    """Bytes held on this rank now, by owner, every storage counted once."""
    parameters = optimizer.sharded_parameters
    gradients = [record.p.grad for record in parameters if record.p.grad is not None]
    for group in optimizer.sharded_groups:
        gradients += [*group.gradients.held(), *group.reducer.held()]
    return held_bytes(
        {
            "parameters": [p for members in parameters.groups for p in members],
            "gradients": gradients,
            "masters": [record.p32 for record in parameters],
            "states": [tensor for state in optimizer.optim.state.values() for tensor in _tensors(state)],
            "wires": [buffer for ranks in parameters.shard_groups for buffer in ranks.communicator.held()],
        }
    )


def layout(optimizer: ShardedOptimizer) -> Layout:
    """Who owns what: each parameter's slices, place in bucket buffers and bytes."""
    shared = [
        Shared(tuple(group.group.slice_ranks), _owned(optimizer, group), group.reducer.plan.whole)
        for group in optimizer.sharded_groups
    ]
    return layout_of(shared, optimizer.options, dist.get_rank())


def _owned(optimizer: ShardedOptimizer, group: ShardedGroup) -> list[Owned]:
    return [
        Owned(
            name=record.name,
            shape=tuple(record.p.shape),
            dtype=record.p.dtype,
            communication_dtype=record.communication_dtype,
            split=record.split,
            group=record.group,
            p32_bytes=0 if record.shares_storage else record.p32.nbytes,
            state_bytes=sum(value.nbytes for value in _tensors(optimizer.optim.state.get(record.p32, {}))),
        )
        for record in group.records
    ]


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]
