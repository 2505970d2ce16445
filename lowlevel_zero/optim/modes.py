"""Modes of an optimizer that has some: a schedule-free one's parameters are those that are trained, or evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..bookkeeping.sharded_parameter import follow_edits
from ..sharded_optimizer import ShardedOptimizer


@torch.no_grad()
def switch(optimizer: ShardedOptimizer, mode: str, back: str) -> None:
    """Switch the wrapped optimizer's slices to another mode, and gather them.

    All ranks call it. Nothing is gathered, and nothing communicates, when the optimizer was switched to this mode
    before and the call changes no slice and no setting: trainers switch in every step.

    Args:
        optimizer: the sharded one.
        mode: the method that switches.
        back: the one that switches back, if other ranks couldn't follow.
    """
    call = optimizer.enter(mode)
    if call.error is None:
        follow_edits(optimizer.sharded_parameters)
        before = list(_traces(optimizer))
        _method(optimizer, mode)()
        if optimizer.mode == mode and before == list(_traces(optimizer)):
            return
    try:
        for each in optimizer.sharded_groups:
            each.reducer.agree_on_syncs(call)
    except BaseException:  # of whatever kind: the parameters go back to the mode that others are in
        if call.error is None:
            _method(optimizer, back)()
        raise
    optimizer.mode = mode
    for each in optimizer.sharded_groups:
        each.gathers.gather(each.records)


def _method(optimizer: ShardedOptimizer, name: str) -> Callable[[], None]:
    method: Callable[[], None] = getattr(optimizer.optim, name)
    return method


def _traces(optimizer: ShardedOptimizer) -> Iterator[Any]:
    """Yield what shows that an optimizer has switched: versions of slices, and its plain settings and attributes.

    A class that writes through ``p.data`` changes no version, but has to note its mode somewhere.
    """
    yield [record.p32._version for record in optimizer.sharded_parameters]
    for settings in (vars(optimizer.optim), *optimizer.param_groups):
        yield {name: value for name, value in settings.items() if isinstance(value, (bool, int, float, str))}
