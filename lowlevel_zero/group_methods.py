"""More parameters after construction: a param group is checked and agreed on by the ranks, then sharded."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .agreement import Call, agree_apart, together
from .bookkeeping.parameter_store import ParameterStore
from .communication.collectives import ShardGroup
from .construction import (
    check_matrices,
    check_parameters,
    check_steps_on_host,
    describe,
    parameter_names,
)
from .diagnostics.guards import Guard
from .families import Families
from .loss_scaler import LossScaler
from .optim.elementwise import check_elementwise
from .options import ZeroOptions
from .sharding import Sharding

_ADD = "add a param group"


class GroupMethods:
    """``add_param_group``."""

    optim: Optimizer
    _model: nn.Module | None
    _group: ShardGroup
    _options: ZeroOptions
    _scaler: LossScaler | None
    _parameters: ParameterStore
    _families: Families
    _guard: Guard

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard one more group, as the wrapped optimizer's ``add_param_group`` would take it; every rank calls it.

        Parameters that were frozen at construction, and aren't any more, come in this way too. Those that
        ``pg_to_param_list`` had are shared as it says, all others by all data-parallel ranks.
        """
        self._guard.enter("add_param_group")
        self._families.even_out(Call("add_param_group"))
        known = len(self.optim.param_groups)
        with ExitStack() as undo:
            undo.callback(lambda: self.optim.param_groups.__delitem__(slice(known, None)))
            names = self._try_group(param_group)
            with together(self._group, _ADD):
                sharding = Sharding(self.optim, self._parameters, self._options, names)
            undo.pop_all()
        sharding.start_alike()
        with together(self._group, _ADD):
            sharding.take_slices()
            self._families.extend()

    def _try_group(self, param_group: dict[str, Any]) -> dict[Tensor, str]:
        """Add a group to the wrapped optimizer and check it, on all ranks alike; the parameters' names."""
        parameters = self._parameters
        with together(self._group, _ADD) as agreed:
            _check_group(param_group)
            self._refuse_known(param_group)
            self.optim.add_param_group(param_group)
            names = parameter_names(self.optim, self._model)
            new = [p for p in self.optim.param_groups[-1]["params"] if p.requires_grad]
            known: dict[Tensor, str] = {record.p: record.name for record in parameters}
            check_parameters(new, names, self._group, self._options.fp8_communication, known)
            check_matrices(self.optim, new, names)
            check_elementwise(self.optim, assume_elementwise=self._options.assume_elementwise)
            if self._options.cpu_offload:
                check_steps_on_host(self.optim)
            self._refuse_first_half(new)
            families = range(len(parameters.shard_groups))
            lines = [list(describe(self.optim, names, None, parameters.family_of, at)) for at in families]
            agreed += lines[0]
        if self._families.several:
            agree_apart(parameters.shard_groups, lines[1:], _ADD)
        return names

    def _refuse_known(self, param_group: dict[str, Any]) -> None:
        for p in param_group["params"]:
            record = self._parameters.find(p)
            if record is not None:
                raise ValueError(f"{record.name}: expected a parameter this optimizer doesn't have yet, got one it has")

    def _refuse_first_half(self, new: list[Tensor]) -> None:
        if self._scaler is None and any(p.dtype == torch.float16 for p in new):
            raise ValueError(
                "param_group: expected no fp16 parameters, since there were none at construction and losses aren't "
                "scaled: construct the optimizer with them"
            )


def _check_group(param_group: Any) -> None:
    """Raise unless it is a group as torch has them; make a list of its parameters."""
    if not isinstance(param_group, dict) or "params" not in param_group:
        got = list(param_group) if isinstance(param_group, dict) else type(param_group).__name__
        raise TypeError(
            f"param_group: expected a dict with 'params', got {got}: pass {{'params': [p, ...], 'lr': ...}}"
        )
    params = param_group["params"]
    param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
