"""Finding the optimizer that trains a parameter, and entering calls that all of its ranks make together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..bookkeeping.sharded_parameter import ShardedParameter
from ..communication.agreement import Alike, agree_apart, together
from ..lives import records_of
from ..sharded_optimizer import ShardedOptimizer

_CALLS = Alike("the same call", "call it for the same parameters on every rank, in the same order")


def owner_of(param: Tensor) -> tuple[ShardedOptimizer, ShardedParameter]:
    """Return the living optimizer that trains ``param``, and its record. Doesn't communicate.

    Raises:
        TypeError: not a tensor.
        ValueError: there is none, or it is gone.
    """
    if not isinstance(param, Tensor):
        raise TypeError(f"param: expected a parameter of the model, got {type(param).__name__}")
    for optimizer, (record,) in records_of([param]).items():
        return optimizer, record
    kind = f"a {tuple(param.shape)} tensor"
    if not param.requires_grad:
        raise ValueError(
            f"param: expected a parameter that an optimizer trains, got {kind} with requires_grad=False, of which no "
            "LowLevelZeroOptimizer has a slice: read and write it as it is"
        )
    raise ValueError(
        f"param: expected a parameter of a LowLevelZeroOptimizer that is alive, got {kind} that none holds: pass the "
        "model's own parameter, not a copy or a view, and keep its optimizer"
    )


def is_frozen(param: Tensor) -> bool:
    """Return whether ``param`` is a parameter that requires no gradient and that no optimizer has a slice of."""
    return isinstance(param, nn.Parameter) and not param.requires_grad and not records_of([param])


@contextmanager
def collective_call(optimizer: ShardedOptimizer, records: Sequence[ShardedParameter], call: str) -> Iterator[list[str]]:
    """Run checks in the body, and make sure that every rank makes the same ``call``. Communicates.

    The body may add to the lines that have to be alike on all ranks.

    Raises:
        ValueError: the lines of ranks differ.
        RuntimeError: ranks make different calls; another rank's body has raised (this one's own error is raised as it
            is); or a backward is going on.
    """
    groups = optimizer.sharded_parameters.shard_groups
    compared = [record for record in records if len(records) == 1 or record.shard_group == 0]
    doing = f"{call} of {records[0].name if len(records) == 1 else 'a model'}"
    with together(optimizer.shard_group, f"call {doing}", _CALLS) as lines:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{doing}: expected it after backward, got it within one: don't call it in a hook")
        optimizer.step_state.wake_up()
        for record in records:
            record.take_back()
        lines += [f"{call} of {record.common_name}, optimizer {optimizer.shard_group.number}" for record in compared]
        yield lines
    if len(records) > 1 and len(groups) > 1:  # ranks may have different numbers of experts
        of_experts = [[r.name for r in records if r.shard_group == number] for number in range(1, len(groups))]
        agree_apart(groups, of_experts, f"call {doing}")
