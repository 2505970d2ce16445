"""The step of an optimizer that steps whole parameters: each rank steps the ones that it owns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..bookkeeping.sharded_parameter import ShardedParameter
from .trials import needs_a_parameter


class OwnedStep:
    """Steps the wrapped optimizer while its param groups hold only the parameters that this rank owns.

    Some classes fail on a param group that is empty. They are given a small parameter in it, which is dropped
    afterwards with its state, so that a group's settings change as on the other ranks.

    Args:
        optim: the wrapped optimizer.
    """

    def __init__(self, optim: Optimizer) -> None:
        self._optim = optim
        self._needs_a_parameter: bool | None = None  # None: no group was empty so far

    def __call__(self, records: Iterable[ShardedParameter]) -> None:
        """Step the wrapped optimizer with only this rank's own ``records`` in its groups. Doesn't communicate."""
        groups: list[dict[str, Any]] = self._optim.param_groups
        others = {record.p32: record for record in records if not record.owns_some}
        whole = [group["params"] for group in groups]
        stand_ins: list[Tensor] = []
        try:
            for group, members in zip(groups, whole, strict=True) if others else ():
                group["params"] = [p32 for p32 in members if p32 not in others]
                if members and not group["params"] and self._fails_on_nothing():
                    smallest = min((others[p32] for p32 in members), key=lambda record: record.split.numel)
                    group["params"] = [_stand_in(smallest)]
                    stand_ins += group["params"]
            self._optim.step()
        finally:
            for group, members in zip(groups, whole, strict=True):
                group["params"] = members
            for each in stand_ins:
                self._optim.state.pop(each, None)

    def _fails_on_nothing(self) -> bool:
        if self._needs_a_parameter is None:
            self._needs_a_parameter = needs_a_parameter(self._optim)
        return self._needs_a_parameter


def _stand_in(record: ShardedParameter) -> Tensor:
    """Return a parameter of the record's shape with a gradient; it keeps a param group from being empty."""
    own = torch.nn.Parameter(record.p32.new_ones(record.p.shape))
    own.grad = torch.linspace(1, 2, own.numel(), dtype=own.dtype, device=own.device).view(own.shape)
    return own
