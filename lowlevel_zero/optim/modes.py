"""Modes of schedule-free optimizers: parameters hold either the trained values or the evaluated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from ..bookkeeping.sharded_parameter import follow_edits
from ..communication.agreement import Call
from ..sharded_group import ShardedGroup


@torch.no_grad()
def switch(
    optim: Optimizer,
    groups: Sequence[ShardedGroup],
    agree: Callable[[Call, Callable[[ShardedGroup, Call], object]], None],
    call: Call,
    back: str,
    again: bool,
) -> None:
    """Call the wrapped optimizer's ``train`` or ``eval``, and gather its slices, unless a repeated call changes none.

    Communicates: all ranks call it. Nothing is gathered, and nothing communicates, when the optimizer was switched to
    this mode before and the call changes no slice and no setting: trainers switch in every step.

    Args:
        optim: the wrapped optimizer.
        groups: the parameters whose slices it steps.
        agree: has the ranks agree on the call in each of ``groups``.
        call: the call on this rank, named like the method of ``optim`` that switches.
        back: the method that switches back, if other ranks couldn't follow.
        again: whether the optimizer was switched to the same mode before.
    """
    if call.error is None:
        follow_edits(chain.from_iterable(each.records for each in groups))
        before = list(_traces(optim, groups))
        _switch(optim, call.name, groups)
        whole = any(record.split.owner is not None for each in groups for record in each.records)
        if again and not whole and before == list(_traces(optim, groups)):  # others don't see what one rank owns
            return
    try:
        agree(call, lambda each, call: each.reducer.agree_on_syncs(call))
    except BaseException:  # of whatever kind: the parameters go back to the mode that others are in
        if call.error is None:
            _switch(optim, back, groups)
        raise
    for each in groups:
        each.gathers.gather(each.records)


def _switch(optim: Optimizer, name: str, groups: Iterable[ShardedGroup]) -> None:
    """Call the wrapped optimizer's method ``name``, which may write slices."""
    getattr(optim, name)()
    for record in chain.from_iterable(each.records for each in groups):
        record.note_slice()


def _traces(optim: Optimizer, groups: Sequence[ShardedGroup]) -> Iterator[Any]:
    """Yield versions of slices, settings and plain attributes, by which a switch of modes can be seen.

    A class that writes through ``p.data`` changes no version, but has to note its mode somewhere.
    """
    yield [record.p32._version for each in groups for record in each.records]
    for settings in (vars(optim), *optim.param_groups):
        yield {name: value for name, value in settings.items() if isinstance(value, (bool, int, float, str))}
