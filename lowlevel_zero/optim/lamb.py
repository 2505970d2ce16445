"""Lamb: an optimizer of our own, since torch has none that scales the step of each parameter to its norm.

It steps whole parameters like any torch optimizer. Over slices, what it needs of the others is one pair of numbers a
parameter: ``scaled_step`` takes a function that makes squares of slices those of whole parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

# Makes the squares of slices, one row of them a parameter, those of whole parameters.
Total = Callable[[Sequence[Tensor], Tensor], Tensor]


class Update(NamedTuple):
    """The update of some parameters, before it is scaled to their norms.

    Attributes:
        params: the parameters.
        directions: one of each one's shape; overwritten.
        rates: what each one's update is multiplied with, before it is subtracted.
        scaled: whether the norms scale it, too.
        bounds: the least and the largest ratio that they may scale it by; None: any.
    """

    params: list[Tensor]
    directions: list[Tensor]
    rates: list[Any]
    scaled: bool = True
    bounds: tuple[float, float | None] = (0.0, None)


class Lamb(Optimizer):
    """LAMB (You et al., 2020): Adam, but each parameter's update is scaled to the norm of the parameter.

    ``p -= lr * ratio * update``, with ``ratio = |p| / |update|``, or 1 where one of the norms is 0. Names and
    defaults are those of Apex's ``FusedLAMB`` (and of DeepSpeed's, for the two coefficients), which clips gradients,
    too; here ``clip_grad_norm`` of ``LowLevelZeroOptimizer`` does. Nothing waits for a device.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, a number or a 0-d tensor.
        bias_correction: divide the moments by ``1 - beta ** step``, as Adam does.
        betas: how much is kept of the mean of gradients, and of squares.
        eps: added to the root of the mean of squares.
        weight_decay: added to the update, times the parameter.
        adam_w_mode: False: add it to the gradient instead.
        grad_averaging: False: add gradients to their mean in full.
        use_nvlamb: scale groups without weight decay, too.
        min_coeff, max_coeff: bounds of the ratio; None: there is no largest.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        use_nvlamb: bool = False,
        *,
        min_coeff: float = 0.0,
        max_coeff: float | None = None,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay), ("min_coeff", min_coeff)):
            if not value >= 0:
                raise ValueError(f"{name}: expected a number >= 0, got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: expected two numbers from 0 to below 1, got {betas}")
        if max_coeff is not None and not max_coeff >= min_coeff:
            raise ValueError(f"max_coeff: expected at least min_coeff, {min_coeff}, or None, got {max_coeff}")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have a gradient; returns what ``closure``, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaled_step(self.updates(), lambda params, squares: squares)
        return loss

    def updates(self) -> list[Update]:
        """Advance the moments of parameters with a gradient, and return their updates."""
        return [self._update(group, params) for group, params in with_gradients(self)]

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> Update:
        gradients = [_dense_gradient(p) for p in params]
        states = [self._state_of(p) for p in params]
        decay, (beta1, beta2) = group["weight_decay"], group["betas"]
        if decay and not group["adam_w_mode"]:
            gradients = list(torch._foreach_add(gradients, params, alpha=decay))
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_([state["step"] for state in states], 1)
        steps = [state["step"].item() for state in states] if group["bias_correction"] else []
        if steps:
            torch._foreach_div_(roots, [math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(means, roots))
        if steps:
            torch._foreach_div_(updates, [1 - beta1**step for step in steps])
        if decay and group["adam_w_mode"]:
            torch._foreach_add_(updates, params, alpha=decay)
        scaled = bool(decay) or group["use_nvlamb"]
        return Update(params, updates, [group["lr"]] * len(params), scaled, (group["min_coeff"], group["max_coeff"]))

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device="cpu")  # the host reads it
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state


def with_gradients(optim: Optimizer) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """Return the param groups that have parameters with a gradient, and these parameters."""
    groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in optim.param_groups]
    return [(group, params) for group, params in groups if params]


def scaled_step(updates: Sequence[Update], total: Total) -> None:
    """Move parameters by their updates, scaled by the ratio of their norms.

    Args:
        updates: of all parameters that are stepped.
        total: called at most once, with the parameters that are scaled, and the squared norms of each one and of its
            direction, ``[n, 2]``, fp32 (fp64 if one is); what it returns is taken for those of whole parameters.
    """
    scaled = [update for update in updates if update.scaled]
    if scaled:
        params = [p for update in scaled for p in update.params]
        directions = [direction for update in scaled for direction in update.directions]
        norms = total(params, torch.stack([_squares(params), _squares(directions)], dim=1)).sqrt()
        for update, part in zip(scaled, torch.split(norms, [len(update.params) for update in scaled]), strict=True):
            of_params, of_directions = part.unbind(1)
            ratios = (of_params / of_directions).clamp(*update.bounds)
            ratios = torch.where((of_params > 0) & (of_directions > 0), ratios, 1.0)
            own = [ratio.to(p.device) for ratio, p in zip(ratios, update.params, strict=True)]
            torch._foreach_mul_(update.directions, own)
    for update in updates:
        torch._foreach_mul_(update.directions, [-rate for rate in update.rates])
        torch._foreach_add_(update.params, update.directions)


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return squared norms, ``[n]``, on the first tensor's device."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    norms = torch._foreach_norm(wide)
    return torch.stack([norm.to(tensors[0].device, dtype) for norm in norms]).square()


def _dense_gradient(p: Tensor) -> Tensor:
    gradient = p.grad
    assert gradient is not None, "only what has a gradient is stepped"
    if gradient.layout != torch.strided:
        raise RuntimeError(f"expected a dense gradient, got a {gradient.layout} one: build the layer with sparse=False")
    return gradient
