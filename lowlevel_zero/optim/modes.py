"""Modes of an optimizer that has some: a schedule-free one's parameters are those that are trained, or evaluated."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..bookkeeping.sharded_parameter import follow_edits
from ..sharded_optimizer import ShardedOptimizer


@torch.no_grad()
def switch(optimizer: ShardedOptimizer, mode: str, back: str) -> None:
    """Have the wrapped optimizer switch its slices, and gather them if that has changed any.

    It does on all ranks, if all call it.

    Args:
        optimizer: the sharded one.
        mode: the method that switches.
        back: the one that switches back, if other ranks couldn't follow.
    """
    call = optimizer.enter(mode)
    if call.error is None:
        follow_edits(optimizer.sharded_parameters)
        before = _versions(optimizer)
        _method(optimizer, mode)()
        if before == _versions(optimizer):
            return
    try:
        for each in optimizer.sharded_groups:
            each.reducer.agree_on_syncs(call)
    except BaseException:  # of whatever kind: the parameters go back to the mode that others are in
        if call.error is None:
            _method(optimizer, back)()
        raise
    for each in optimizer.sharded_groups:
        each.gathers.gather(each.records)


def _method(optimizer: ShardedOptimizer, name: str) -> Callable[[], None]:
    method: Callable[[], None] = getattr(optimizer.optim, name)
    return method


def _versions(optimizer: ShardedOptimizer) -> list[int]:
    return [record.p32._version for record in optimizer.sharded_parameters]
