"""Modes of schedule-free optimizers: parameters hold either the trained values or the evaluated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import follow_edits
from ..bookkeeping.step_state import Damage, Failure
from ..communication.agreement import Call
from ..sharded_group import ShardedGroup
from .owned_step import OwnedStep


@torch.no_grad()
def switch(
    optim: Optimizer,
    parameters: ParameterStore,
    groups: Sequence[ShardedGroup],
    agree: Callable[[Call, Callable[[ShardedGroup, Call], object]], None],
    call: Call,
    back: str,
    failure: Failure,
) -> None:
    """Call the wrapped optimizer's ``train`` or ``eval``, and gather slices; switch back if a rank fails. Communicates.

    Args:
        optim, parameters, groups: the wrapped optimizer, the records of its slices, and these by shard group.
        agree: has the ranks agree on the call in each of ``groups``.
        call: the call on this rank, named like the method of ``optim`` that switches.
        back: the method that switches back, if other ranks couldn't follow.
        failure: is told of an error that leaves slices between the modes.
    """
    if call.error is None:
        follow_edits(parameters)
        before = list(_traces(optim, parameters))
        try:
            _switch(optim, call.name, parameters)
        except Exception as error:  # of whatever kind: others would wait for the agreement
            call = call._replace(error=error)
            if before != list(_traces(optim, parameters)):
                failure.note(error, Damage.PARAMETERS)
    try:
        agree(call, lambda each, call: each.reducer.agree_on_syncs(call))
    except BaseException:  # of whatever kind: the parameters go back to the mode that others are in
        if call.error is None:
            _switch(optim, back, parameters)
        raise
    finally:
        del call  # the traceback of its error holds this frame
    for each in groups:
        each.gathers.gather(each.records)


def _switch(optim: Optimizer, name: str, parameters: ParameterStore) -> None:
    """Call the wrapped optimizer's method ``name`` on this rank's slices, and note its writes as no caller's edits."""
    try:
        OwnedStep(optim, parameters)(name)
    finally:
        for record in parameters:
            record.note_slice()


def _traces(optim: Optimizer, parameters: ParameterStore) -> Iterator[Any]:
    """Yield versions of slices, settings and plain attributes, by which a switch of modes can be seen.

    A class that writes through ``p.data`` changes no version, but has to note its mode somewhere.
    """
    yield [record.p32._version for record in parameters]
    for settings in (vars(optim), *optim.param_groups):
        yield {name: value for name, value in settings.items() if isinstance(value, (bool, int, float, str))}
