"""The loss scale: a state machine whose scale, hysteresis and skip counts are device tensors.

The rules are those of ColossalAI's ``DynamicGradScaler`` (after Megatron-LM's). They are written as
arithmetic on small tensors: an overflow is counted and answered, and the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_FP32 = torch.finfo(torch.float32)

# One update is counts * keep + add, with one pair of rows for a clean step and one for an overflow.
# The columns: growth_step, hysteresis_step, skipped_in_a_row, skipped
_RULES = (
    ((1, 1, 0, 1), (1, 0, 0, 0)),
    ((0, 1, 1, 1), (0, 1, 1, 1)),
)
_COUNT_KEYS = ("growth_step", "hysteresis_step", "skipped_in_a_row", "skipped")
_NEEDED_KEYS = ("scale", "growth_factor", "backoff_factor", "hysteresis")
_SCALES = ("min_scale", "initial_scale", "max_scale")
_OPTIONS = (*_SCALES, "growth_factor", "backoff_factor", "growth_interval", "hysteresis")
# What is an integer, with the least that it may be.
_LEAST = {"growth_interval": 1, "hysteresis": 0, **dict.fromkeys(_COUNT_KEYS, 0)}


class LossScaler:
    """What a loss is multiplied by before its backward, so that fp16 gradients neither vanish nor overflow.

    An overflow raises ``hysteresis_step`` by one; the overflow that brings it to ``hysteresis``, and every
    further one, multiplies the scale by ``backoff_factor``, down to ``min_scale``. After ``growth_interval``
    clean steps in a row the scale is multiplied by ``growth_factor``, up to ``max_scale``, and
    ``hysteresis_step`` restarts at 0.

    Args:
        initial_scale: the scale before the first update.
        min_scale: no back-off goes below it.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: clean steps in a row before the scale grows.
        hysteresis: overflows before the scale backs off; 0 and 1 both mean "at the first".
        max_scale: no growth goes above it; the scale is static where ``min_scale`` is the same.
        device: where the tensors live; best where ``found_inf`` is made.

    Attributes:
        scale: 0-d float32; changed in place, so its address stays (a captured CUDA graph may read it).

    Raises:
        ValueError: a keyword is out of its range; the message names it, the range and what came.
    """

    def __init__(
        self,
        *,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        max_scale: float = 2**24,
        device: torch.device | str = "cpu",
    ) -> None:
        keywords = locals()
        _check({name: keywords[name] for name in _OPTIONS})
        self.min_scale, self.max_scale = float(min_scale), float(max_scale)
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.scale = torch.tensor(float(initial_scale), dtype=torch.float32, device=device)  # 0-d
        self._counts = torch.zeros(len(_COUNT_KEYS), dtype=torch.int64, device=device)
        self._clean, self._overflow = torch.tensor(_RULES, dtype=torch.int64, device=device)  # [keep or add, counts]
        self._set_factors(growth_factor, backoff_factor)

    @classmethod
    def chosen(cls, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Those among ``keywords`` that a scaler takes.

        Raises:
            ValueError: one is out of its range.
        """
        chosen = {name: keywords[name] for name in _OPTIONS if name in keywords}
        cls(**chosen)
        return chosen

    def update(self, found_inf: Tensor) -> None:
        """Count one step and move the scale; a dozen tiny kernels, no host synchronisation.

        Args:
            found_inf: one element of any shape and dtype, on the scaler's device. Zero: the step was clean;
                all else: it overflowed and was skipped. All ranks must bring the same value.
        """
        overflow = found_inf.reshape(()) != 0
        keep, add = torch.where(overflow, self._overflow, self._clean)
        self._counts.mul_(keep).add_(add)
        of_this_scale = self._counts[:2]
        growth_step, hysteresis_step = of_this_scale.unbind()
        backs_off = overflow & (hysteresis_step >= self.hysteresis)
        grows = growth_step == self.growth_interval
        factor = torch.where(backs_off, self._backoff, torch.where(grows, self._growth, self._stay))
        self.scale.mul_(factor).clamp_(self.min_scale, self.max_scale)
        of_this_scale.masked_fill_(grows, 0)

    @property
    def skipped_in_a_row(self) -> Tensor:
        """0-d int64: overflows since the last clean step; a view that later updates change."""
        return self._counts[2]

    @property
    def skipped(self) -> Tensor:
        """0-d int64: all overflows so far; a view that later updates change."""
        return self._counts[3]

    @property
    def loss_scale(self) -> float:
        """The scale as a number. Reading it waits for the device: for logs, not for every step."""
        return float(self.scale.item())

    def settings(self) -> dict[str, Any]:
        """Return the scale and what its updates go by, by name: alike on all ranks."""
        names = ("scale", "min_scale", "max_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")
        return {f"{name} of the loss scaler": getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Copies of the 0-d tensors, and the numbers; ColossalAI's four keys and the counts."""
        numbers = {key: getattr(self, key) for key in _NEEDED_KEYS[1:]}
        counts = dict(zip(_COUNT_KEYS, self._counts.clone().unbind(), strict=True))
        return {"scale": self.scale.clone(), **numbers, **counts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a ``state_dict()``, or ColossalAI's, which has no counts: they restart at 0.

        A scale outside ``min_scale`` .. ``max_scale`` is moved to the nearer end. Tensors are read, so this waits for
        their device.

        Raises:
            ValueError: a key is missing or unknown, or a value is out of its range; nothing has changed then.
        """
        _check_keys(state_dict)
        state = dict.fromkeys(_COUNT_KEYS, 0) | {key: _as_number(value) for key, value in state_dict.items()}
        _check(state)
        self._counts.copy_(torch.tensor([state[key] for key in _COUNT_KEYS], device="cpu"))
        self.scale.fill_(min(max(state["scale"], self.min_scale), self.max_scale))
        self.hysteresis = state["hysteresis"]
        self._set_factors(state["growth_factor"], state["backoff_factor"])

    def _set_factors(self, growth_factor: float, backoff_factor: float) -> None:
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        factors = self.scale.new_tensor([growth_factor, backoff_factor, 1.0])
        self._growth, self._backoff, self._stay = factors.unbind()  # 0-d float32 each


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _check(values: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a value that isn't in the range of its keyword, or of its key in a state."""
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name in _LEAST and not (is_number and isinstance(value, int) and value >= _LEAST[name]):
            raise ValueError(f"expected {name} to be an integer of at least {_LEAST[name]}, got {value!r}")
        if name not in _LEAST and not (is_number and _FP32.tiny <= value <= _FP32.max):
            raise ValueError(f"expected {name} to be a positive number within float32's range, got {value!r}")
    if not values["growth_factor"] > 1:
        raise ValueError(f"expected growth_factor > 1, got {values['growth_factor']!r}")
    if not values["backoff_factor"] < 1:
        raise ValueError(f"expected 0 < backoff_factor < 1, got {values['backoff_factor']!r}")
    scales = [values[name] for name in _SCALES if name in values]
    if scales != sorted(scales):
        raise ValueError(
            "expected min_scale <= initial_scale <= max_scale, got "
            + ", ".join(f"{name}={values[name]!r}" for name in _SCALES)
        )


def _check_keys(state_dict: Mapping[str, Any]) -> None:
    missing = [key for key in _NEEDED_KEYS if key not in state_dict]
    unknown = [key for key in state_dict if key not in (*_NEEDED_KEYS, *_COUNT_KEYS)]
    if missing or unknown:
        raise ValueError(
            f"expected a loss scaler's state with the keys {list(_NEEDED_KEYS)} and, optionally, "
            f"{list(_COUNT_KEYS)}; missing: {missing}, unknown: {unknown}"
        )
