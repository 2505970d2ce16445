"""The step of an optimizer that steps whole parameters: each rank steps the ones that it owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import ShardedParameter
from .trials import fails_without_gradients

_NAMES = "param_names"  # of a group that was made of named parameters: one for each of its "params"


class OwnedStep:
    """Steps the wrapped optimizer while its param groups hold only the parameters that this rank owns.

    Names that a group has of its parameters become those of what it holds then. Some classes fail on a param group that
    is empty, or has no gradient, as where its parameters are frozen or other ranks own them. They are given a small
    parameter in it, which is dropped afterwards with its state, so that a group's settings change as on other ranks. So
    are classes that can't be tried, where other ranks own parameters.
    """

    def __init__(self, optim: Optimizer, parameters: ParameterStore) -> None:
        self._optim = optim
        self._parameters = parameters
        self._fails = cache(partial(fails_without_gradients, optim))

    def __call__(self, method: str = "step") -> None:
        """Call a method of the wrapped optimizer while its groups hold this rank's slices alone. Doesn't communicate.

        Nothing stands in for parameters unless it is ``step``.
        """
        groups: list[dict[str, Any]] = self._optim.param_groups
        others = {record.p32: record for record in self._parameters if not record.owns_some}
        whole = [{key: group[key] for key in ("params", _NAMES) if key in group} for group in groups]
        stand_ins: list[Tensor] = []
        try:
            if others or self._parameters.frozen:
                pairs = zip(groups, self._parameters.groups, strict=True)
                # All before any is emptied: a class is tried with the groups that it has between steps.
                own = [self._own(group, members, others, method, stand_ins) for group, members in pairs]
                for group, some in zip(groups, own, strict=True):
                    group.update(some)
            getattr(self._optim, method)()
        finally:
            for group, held in zip(groups, whole, strict=True):
                group.update(held)
            for each in stand_ins:
                self._optim.state.pop(each, None)

    def _own(
        self,
        group: Mapping[str, Any],
        members: Sequence[Tensor],
        others: Mapping[Tensor, ShardedParameter],
        method: str,
        stand_ins: list[Tensor],
    ) -> dict[str, Any]:
        """Return this rank's slices of a group, and a stand-in if a step would fail, with names as the group has them.

        The stand-in is added to ``stand_ins``.
        """
        held = group["params"]
        own = [p32 for p32 in held if p32 not in others]
        stand_in: dict[Tensor, Tensor] = {}
        absent = [others[p32].p for p32 in held if p32 in others] if held else members
        if absent and method == "step" and all(p32.grad is None for p32 in own):
            used = [p for p in absent if self._is_used(p)]
            wanted = used or (absent if not own else ())  # without gradients, those that are there do
            if wanted and self._fails(not own, bool(held)):
                smallest = min(wanted, key=Tensor.numel)
                stand_in = {smallest: self._stand_in(smallest)}
                own += stand_in.values()
                stand_ins += stand_in.values()
        if _NAMES not in group or len(group[_NAMES]) != len(members):
            return {"params": own}
        slices = {record.p: record.p32 for record in map(self._parameters.find, held) if record} | stand_in
        names = {slices.get(p): name for p, name in zip(members, group[_NAMES], strict=True)}
        return {"params": own, _NAMES: [names[p32] for p32 in own]}

    def _is_used(self, p: Tensor) -> bool:
        """Return whether a rank has a gradient for ``p`` in this step, whoever owns it."""
        record = self._parameters.find(p)
        return record is not None and record.worked

    def _stand_in(self, p: Tensor) -> Tensor:
        """Return a new parameter of ones in ``p``'s shape, to fill a group; with a gradient if a rank has one."""
        record = self._parameters.find(p)
        own = torch.nn.Parameter((p if record is None else record.p32).new_ones(p.shape))
        if self._is_used(p):
            own.grad = torch.linspace(1, 2, own.numel(), dtype=own.dtype, device=own.device).view(own.shape)
        return own
