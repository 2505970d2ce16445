"""Steps that take whole parameters, which no rank has: of optimizers that aren't elementwise, by the ranks together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..bookkeeping.parameter_store import ParameterStore, ShardedParameter
from .elementwise import MUON, full_name
from .lamb import Way, scaled_step, with_gradients
from .muon import MuonStep

# Steps the slices of records, which have gradients: family by family, each alike on the ranks that share it.
WholeStep = Callable[[Sequence[ShardedParameter]], Any]


class LambStep:
    """LAMB's step: the squares of slices are summed over the ranks, those of a family of parameters in one all-reduce.

    Args:
        ways: advances the moments of slices that have a gradient, and tells where they are to go.
        parameters: whose the slices are, and who shares them.
    """

    def __init__(self, ways: Callable[[], list[Way]], parameters: ParameterStore) -> None:
        self._ways = ways
        self._parameters = parameters

    def __call__(self, records: Sequence[ShardedParameter]) -> None:
        """Step them."""
        scaled_step(self._ways(), self._total)

    def _total(self, slices: Sequence[Tensor], squares: Tensor) -> Tensor:
        members = [self._parameters.of_slice(p32) for p32 in slices]
        device = members[0].padded.device  # which the group serves, wherever the slices are
        rows = list(squares.to(device).unbind())
        for family, group in enumerate(self._parameters.shard_groups):
            own = [place for place, record in enumerate(members) if record.family == family]
            if own:
                whole = group.sum_scalar(torch.stack([rows[place] for place in own])).wait()
                for place, row in zip(own, whole.unbind(), strict=True):
                    rows[place] = row
        return torch.stack(rows).to(squares.device)


def _way_of_colossalai(optim: Any, settings: dict[str, Any], params: list[Tensor]) -> Way:
    """As ``colossalai.nn.optimizer.Lamb`` has it: it corrects the learning rate instead of the moments."""
    updates: list[Tensor] = []
    rates: list[Any] = []
    beta1, beta2 = settings["betas"]
    for p in params:
        state = optim.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        mean = state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        update = mean / square.sqrt().add_(settings["eps"])
        updates.append(update.add_(p, alpha=settings["weight_decay"]))
        corrected = settings["bias_correction"]
        correction = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"]) if corrected else 1.0
        rates.append(settings["lr"] * correction)
    return Way(params, updates, rates, scaled=not optim.adam)


# By full name, so that what isn't installed needn't be imported: the same names as in ``elementwise.TOGETHER``.
_STEPS: dict[str, Callable[[Any, ParameterStore], WholeStep]] = {
    MUON: MuonStep,
    "lowlevel_zero.optim.lamb.Lamb": lambda optim, parameters: LambStep(optim.ways, parameters),
    "colossalai.nn.optimizer.lamb.Lamb": lambda optim, parameters: LambStep(
        lambda: [_way_of_colossalai(optim, *each) for each in with_gradients(optim)], parameters
    ),
}


def whole_step(optim: Optimizer, parameters: ParameterStore) -> WholeStep:
    """How slices of all parameters are stepped: by ``optim`` itself, or by the ranks together where it must be.

    Hooks on the steps of ``optim`` run as they would.
    """
    together = _STEPS.get(full_name(optim))
    if together is None:
        return lambda records: optim.step()
    step = together(optim, parameters)

    def hooked(records: Sequence[ShardedParameter]) -> None:
        Optimizer.profile_hook_step(lambda _: step(records))(optim)
        optim._opt_called = True  # type: ignore[attr-defined]  # a scheduler looks for it

    return hooked
