"""The loss scaler: a state machine whose scale, hysteresis and skip counts are device tensors.

The rules are those of ColossalAI's ``DynamicGradScaler`` (after Megatron-LM's). They are written as
arithmetic on small tensors: an overflow is counted and answered, and the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .options import LossScale, Takes, abouts

# One update is counts * keep + add, with one pair of rows for a clean step and one for an overflow.
# The columns: growth_step, hysteresis_step, skipped_in_a_row, skipped
_RULES = (
    ((1, 1, 0, 1), (1, 0, 0, 0)),
    ((0, 1, 1, 1), (0, 1, 1, 1)),
)
_COUNT_KEYS = ("growth_step", "hysteresis_step", "skipped_in_a_row", "skipped")
_NEEDED_KEYS = ("scale", "growth_factor", "backoff_factor", "hysteresis")
_COUNT = Takes("an int of at least 0", (int,), lambda count: count >= 0)


class LossScaler:
    """The dynamic loss scale: it grows after clean steps, and shrinks after overflows.

    An overflow raises ``hysteresis_step`` by one; the overflow that brings it to ``hysteresis``, and every
    further one, multiplies the scale by ``backoff_factor``, down to ``min_scale``. After ``growth_interval``
    clean steps in a row the scale is multiplied by ``growth_factor``, up to ``max_scale``, and
    ``hysteresis_step`` restarts at 0. All tensors are on ``device``, best the one where ``found_inf`` is made.
    """

    def __init__(self, options: LossScale, device: torch.device | str = "cpu") -> None:
        self.min_scale, self.max_scale = float(options.min_scale), float(options.max_scale)
        self.growth_interval, self.hysteresis = options.growth_interval, options.hysteresis
        # 0-d, and changed in place, so its address stays (a captured CUDA graph may read it).
        self.scale = torch.tensor(float(options.initial_scale), dtype=torch.float32, device=device)
        self._counts = torch.zeros(len(_COUNT_KEYS), dtype=torch.int64, device=device)
        self._clean, self._overflow = torch.tensor(_RULES, dtype=torch.int64, device=device)  # [keep or add, counts]
        self._set_factors(options.growth_factor, options.backoff_factor)

    def update(self, found_inf: Tensor) -> None:
        """Count one step and adjust the scale, on the device, without a host synchronisation.

        Args:
            found_inf: one element of any shape and dtype, on the scaler's device. Zero: the step was clean;
                any other value: it overflowed and was skipped. The value must be the same on all ranks.
        """
        overflow = found_inf.reshape(()) != 0
        keep, add = torch.where(overflow, self._overflow, self._clean)
        self._counts.mul_(keep).add_(add)
        of_this_scale = self._counts[:2]
        growth_step, hysteresis_step = of_this_scale.unbind()
        backs_off = overflow & (hysteresis_step >= self.hysteresis)
        grows = growth_step >= self.growth_interval  # a loaded count may be beyond
        factor = torch.where(backs_off, self._backoff, torch.where(grows, self._growth, self._stay))
        self.scale.mul_(factor).clamp_(self.min_scale, self.max_scale)
        of_this_scale.masked_fill_(grows, 0)

    @property
    def skipped_in_a_row(self) -> Tensor:
        """Return the overflows since the last clean step: 0-d int64, a view that later updates change."""
        return self._counts[2]

    @property
    def loss_scale(self) -> float:
        """Return the scale as a number. Waits for the device."""
        return float(self.scale.item())

    def settings(self) -> dict[str, float | Tensor]:
        """Return the scale and the numbers of its updates by name; they must be alike on all ranks."""
        names = ("scale", "min_scale", "max_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")
        return {f"{name} of the loss scaler": getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, float | Tensor]:
        """Return the scale and counts, as copies on the device, and the updates' numbers, under ColossalAI's keys."""
        numbers = {key: getattr(self, key) for key in _NEEDED_KEYS[1:]}
        counts = dict(zip(_COUNT_KEYS, self._counts.clone().unbind(), strict=True))
        return {"scale": self.scale.clone(), **numbers, **counts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``state_dict()``, or ColossalAI's (counts become 0), factors included; clamp the scale to its limits.

        A scale outside ``min_scale`` .. ``max_scale`` is moved to the nearer end. Tensors are read, so this waits for
        their device.

        Raises:
            TypeError, ValueError: a key is missing or unknown, or a value is out of its range. Nothing has changed.
        """
        state = check_loss_scale(state_dict)
        self._counts.copy_(torch.tensor([state[key] for key in _COUNT_KEYS], device="cpu"))
        self.scale.fill_(min(max(state["scale"], self.min_scale), self.max_scale))
        self.hysteresis = int(state["hysteresis"])
        self._set_factors(state["growth_factor"], state["backoff_factor"])

    def _set_factors(self, growth_factor: float, backoff_factor: float) -> None:
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        factors = self.scale.new_tensor([growth_factor, backoff_factor, 1.0])
        self._growth, self._backoff, self._stay = factors.unbind()  # 0-d float32 each


def check_loss_scale(state_dict: Mapping[str, Any]) -> dict[str, float]:
    """Return a scaler's state as numbers; raise if a key is missing or unknown, or a value is out of range."""
    missing = [key for key in _NEEDED_KEYS if key not in state_dict]
    unknown = [key for key in state_dict if key not in (*_NEEDED_KEYS, *_COUNT_KEYS)]
    if missing or unknown:
        raise ValueError(
            f"expected a loss scaler's state with the keys {list(_NEEDED_KEYS)} and, optionally, "
            f"{list(_COUNT_KEYS)}; missing: {missing}, unknown: {unknown}: pass what state_dict() of one returned"
        )
    state = dict.fromkeys(_COUNT_KEYS, 0) | dict(state_dict)
    options = abouts(LossScale)
    for key, value in state.items():
        state[key] = value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        check = _COUNT if key in _COUNT_KEYS else options["initial_scale" if key == "scale" else key].check
        check(f"{key} of the loss scaler's state", value)
    return state
