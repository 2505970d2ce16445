"""What ``Booster.boost`` hands out: a ColossalAI model wrapper, and an optimizer that is ColossalAI's and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from colossalai.booster.plugin.low_level_zero_plugin import LowLevelZeroModel
from colossalai.interface import OptimizerWrapper
from torch import Tensor, nn

from ..lives import alive
from ..optimizer import LowLevelZeroOptimizer


class BoostedOptimizer(LowLevelZeroOptimizer, OptimizerWrapper):  # type: ignore[misc]  # ColossalAI ships no types
    """A ``LowLevelZeroOptimizer`` that is a ``colossalai.interface.OptimizerWrapper`` as well."""

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *_: Any, **__: Any
    ) -> Tensor:
        """Clip the gradients to a global L2 norm, after backward; returns the norm before. All ranks call it.

        Raises:
            ValueError: ``norm_type`` isn't 2.
            RuntimeError: the norm isn't finite, and ``error_if_nonfinite``.
        """
        if norm_type != 2:
            raise ValueError(f"norm_type: expected 2, got {norm_type}")
        norm = self.clip_grad_norm_(max_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"expected a finite gradient norm, got {norm.item()}")
        return norm

    def clip_grad_by_value(self, clip_value: float, *_: Any, **__: Any) -> None:
        """Not available: gradients have left the parameters for their slices."""
        raise NotImplementedError(
            "clip_grad_by_value is not available: clip by norm, with the plugin's max_norm or clip_grad_by_norm"
        )


class BoostedModel(LowLevelZeroModel):  # type: ignore[misc]  # ColossalAI ships no types
    """ColossalAI's model wrapper (dtype, device, input casting), which knows its optimizer.

    It knows it weakly: the optimizer holds the module, and a pair that nobody uses goes at once.
    """

    def __init__(self, module: nn.Module, precision: str, cast_inputs: bool) -> None:
        super().__init__(module, precision, cast_inputs=cast_inputs)
        self._attached: Callable[[], BoostedOptimizer | None] = lambda: None

    def attach(self, optimizer: BoostedOptimizer) -> None:
        """Tell ``optimizer`` from now on when values are loaded into the model."""
        self._attached = ref(optimizer)

    def update_master_params(self) -> None:
        """Overwrite the optimizer's master slices with what the parameters hold now."""
        optimizer = self._attached()
        if optimizer is not None:
            optimizer.update_master_params(self.module)

    def finish_gathers(self) -> None:
        """Return when all parameters are up to date."""
        optimizer = self._attached()
        if optimizer is not None:
            optimizer.finish_gathers()

    def _force_wait_all_gather(self) -> None:  # ColossalAI's name for it
        self.finish_gathers()


def is_boosted(module: nn.Module) -> bool:
    """Whether a boosted optimizer that is still alive trains ``module``."""
    return any(isinstance(other, BoostedOptimizer) and other.model is module for other in alive().values())
