"""Steps that need whole parameters, of which each rank has a slice: the ranks take them together.

An optimizer that isn't elementwise has its entry in ``WHOLE_STEPS``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import ShardedParameter
from .lamb import Lamb, Update, scaled_step, with_gradients
from .muon import MuonStep
from .overrides import carry_overrides

# Steps the slices of records, which have gradients: shard group by shard group, each alike on the ranks that share it.
WholeStep: TypeAlias = Callable[[Sequence[ShardedParameter]], Any]

MUON = "torch.optim.Muon"  # torch 2.9 and later


def _lamb_step(updates: Callable[[Any], list[Update]], optim: Any, parameters: ParameterStore) -> WholeStep:
    """Return LAMB's step, which sums the squares of slices over the ranks: one all-reduce for each shard group.

    Args:
        updates: advances the moments of slices that have a gradient, and returns their updates.
        optim: the optimizer over slices.
        parameters: the records of the slices.
    """

    def total(slices: Sequence[Tensor], squares: Tensor) -> Tensor:
        members = [parameters[p32] for p32 in slices]
        device = members[0].padded.device  # which the group serves, wherever the slices are
        rows = list(squares.to(device).unbind())  # no indices on the device: the host would wait for them
        for number, group in enumerate(parameters.shard_groups):
            own = [place for place, record in enumerate(members) if record.shard_group == number]
            if own:
                whole = group.sum_scalar(torch.stack([rows[place] for place in own])).wait()
                for place, row in zip(own, whole.unbind(), strict=True):
                    rows[place] = row
        return torch.stack(rows).to(squares.device)

    return lambda records: scaled_step(updates(optim), total)


def _updates_of_colossalai(optim: Any) -> list[Update]:
    """Return updates like ``colossalai.nn.optimizer.Lamb``'s, which corrects the learning rate, not the moments."""
    return [_update_of_colossalai(optim, *each) for each in with_gradients(optim)]


def _update_of_colossalai(optim: Any, settings: dict[str, Any], params: list[Tensor]) -> Update:
    directions: list[Tensor] = []
    rates: list[Any] = []
    beta1, beta2 = settings["betas"]
    for p in params:
        state = optim.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        mean = state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        direction = mean / square.sqrt().add_(settings["eps"])
        directions.append(direction.add_(p, alpha=settings["weight_decay"]))
        corrected = settings["bias_correction"]
        correction = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"]) if corrected else 1.0
        rates.append(settings["lr"] * correction)
    return Update(params, directions, rates, scaled=not optim.adam)


# By full name, so that what isn't installed needn't be imported.
WHOLE_STEPS: dict[str, Callable[[Any, ParameterStore], WholeStep]] = {
    MUON: MuonStep,
    "lowlevel_zero.optim.lamb.Lamb": partial(_lamb_step, Lamb.updates),
    "colossalai.nn.optimizer.lamb.Lamb": partial(_lamb_step, _updates_of_colossalai),
}


def whole_step(optim: Optimizer, parameters: ParameterStore) -> WholeStep:
    """Return the function that steps slices: the step of ``optim``, or one that the ranks take together.

    Hooks on the steps of ``optim`` run as they would, and settings by parameter hold for the slices.
    """
    carry_overrides(optim, parameters)
    together = WHOLE_STEPS.get(full_name(optim))
    if together is None:
        return lambda records: optim.step()
    step = together(optim, parameters)

    def hooked(records: Sequence[ShardedParameter]) -> None:
        Optimizer.profile_hook_step(lambda _: step(records))(optim)
        optim._opt_called = True  # type: ignore[attr-defined]  # a scheduler looks for it

    return hooked


def check_matrices(optimizer: Optimizer, parameters: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
    """Raise if ``optimizer`` steps matrices alone, for the first parameter that isn't one."""
    others = [p for p in parameters if p.dim() != 2]
    if others and full_name(optimizer) == MUON:
        raise ValueError(
            f"{names[others[0]]}: expected a matrix, which Muon steps, got shape {tuple(others[0].shape)}: "
            "give what isn't one to an optimizer of its own, such as torch.optim.AdamW"
        )


def full_name(optimizer: Optimizer) -> str:
    """Return the full name of the optimizer's class, without private modules, from which torch moves classes."""
    cls = type(optimizer)
    return re.sub(r"\._[a-z]\w*\.", ".", f"{cls.__module__}.{cls.__qualname__}")
