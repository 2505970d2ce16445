"""Warns of parameters that get gradients, but that no optimizer of this package trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ..bookkeeping.module_names import own_names
from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import Handle
from ..communication.progress import listed

_log = logging.getLogger("lowlevel_zero")

_EVERY = 64  # steps between two checks, in the long run


def is_due(steps: int) -> bool:
    """Return whether a slow check is due after ``steps`` steps: after 0, 1, 2, 4, 8, ... and every 64th."""
    return steps % _EVERY == 0 or steps & (steps - 1) == 0


class Untrained:
    """Warns once of parameters of ``model`` that get gradients and that no optimizer trains.

    A check takes about a microsecond for each parameter. It runs after steps 1, 2, 4, ... and then after every 64th,
    and after the first step in which some rank lacked a gradient, as of a layer that was replaced. Each rank checks by
    itself. ``alive`` returns all optimizers of this process, in the order of their construction.
    """

    def __init__(self, model: nn.Module | None, parameters: ParameterStore, alive: Callable[[], Sequence[Any]]) -> None:
        self._model = model
        self._parameters = parameters
        self._alive = alive
        self._lacked = False
        self._told: set[str] = set()

    def look(self, steps: int, lacked: bool) -> None:
        """If ``steps`` or ``lacked`` makes a look due, warn once of each parameter with a gradient and no optimizer."""
        due = is_due(steps) or lacked > self._lacked
        self._lacked = lacked
        if not due or self._model is None:
            return
        with_gradients = (p for p in self._model.parameters() if p.requires_grad and p.grad is not None)
        untrained = {p for p in with_gradients if not isinstance(p.grad, Handle)}
        if not untrained:
            return
        alive = self._alive()
        of_model = [each.sharded_parameters for each in alive if each.model is self._model]
        if not of_model or of_model[0] is not self._parameters:  # a model's first optimizer checks for all of them
            return
        untrained -= {record.p for each in alive for record in each.sharded_parameters.records}
        new = [name for p, name in own_names(self._model).items() if p in untrained and name not in self._told]
        if new:
            self._told.update(new)
            _log.warning(
                "%s: got gradients on rank %d, but no LowLevelZeroOptimizer trains them or averages their gradients "
                "over the ranks. If their layers were replaced after the optimizer was constructed, as by "
                "load_state_dict(assign=True), construct a new LowLevelZeroOptimizer over model.parameters(). If they "
                "were left out, call optimizer.add_param_group({'params': [...]}) on every rank. If they shall stay as "
                "they are, call requires_grad_(False)",
                listed(new),
                dist.get_rank(),
            )
