"""Steps the wrapped optimizer, bucket by bucket where that is the same as stepping it once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as _torch_optimizer

from .bookkeeping.parameter_store import ShardedParameter

# torch's own, whose state is per parameter, step counters included.
_BY_PARAMETER = {
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
}


def steps_in_parts(optim: Optimizer) -> bool:
    """Whether stepping some parameters after others is one step of ``optim``: nobody counts or watches its steps."""
    watched = (
        optim._optimizer_step_pre_hooks,
        optim._optimizer_step_post_hooks,
        _torch_optimizer._global_optimizer_pre_hooks,
        _torch_optimizer._global_optimizer_post_hooks,
    )
    return type(optim) in _BY_PARAMETER and not any(watched)


def step_part(optim: Optimizer, part: Sequence[ShardedParameter]) -> None:
    """Step ``part`` alone: for the time of the call each param group holds only its members of it."""
    groups: list[dict[str, Any]] = optim.param_groups
    members: list[list[torch.Tensor]] = [[] for _ in groups]
    for record in part:
        members[record.group].append(record.p32)
    whole = [group["params"] for group in groups]
    try:
        for group, some in zip(groups, members, strict=True):
            group["params"] = some
        optim.step()
    finally:
        for group, all_of_it in zip(groups, whole, strict=True):
            group["params"] = all_of_it
    release_gradients(part)


def release_gradients(stepped: Iterable[ShardedParameter]) -> None:
    """Let go of the gradients that the wrapped optimizer was given."""
    for record in stepped:
        record.p32.grad = None
