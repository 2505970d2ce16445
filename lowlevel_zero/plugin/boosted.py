"""The pair that ``Booster.boost`` returns: a ColossalAI model wrapper, and an optimizer of both packages."""

from __future__ import annotations

from typing import Any

from colossalai.booster.plugin.low_level_zero_plugin import LowLevelZeroModel
from colossalai.interface import OptimizerWrapper
from torch import Tensor, nn

from ..clipping import clip_grad_norm_, clip_grad_value_
from ..lives import alive
from ..optimizer import LowLevelZeroOptimizer
from ..sharded_optimizer import ShardedOptimizer


class BoostedOptimizer(LowLevelZeroOptimizer, OptimizerWrapper):  # type: ignore[misc]  # ColossalAI ships no types
    """A ``LowLevelZeroOptimizer`` that is a ``colossalai.interface.OptimizerWrapper`` as well."""

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *_: Any, **__: Any
    ) -> Tensor:
        """Clip the gradients to a global norm, after backward; return the norm before. Communicates: all ranks call it.

        Args:
            max_norm: the largest norm that is left.
            norm_type: above 0, or inf.
            error_if_nonfinite: raise ``RuntimeError`` where the norm is inf or NaN, before anything is clipped.
        """
        return clip_grad_norm_(self._trained, max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float, *_: Any, **__: Any) -> None:
        """Clamp each element of the averaged gradients to ``[-clip_value, clip_value]``. All ranks call it."""
        clip_grad_value_(self._trained, clip_value)

    @property
    def _trained(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer trains."""
        return [record.p for record in self.sharded_parameters]


class BoostedModel(LowLevelZeroModel):  # type: ignore[misc]  # ColossalAI ships no types
    """ColossalAI's model wrapper (dtype, device, input casting), which finds the optimizers that train its module.

    It holds no reference to them: the optimizers hold the module, and an unused pair is freed at once.
    """

    def _optimizers(self) -> list[ShardedOptimizer]:
        return [each for each in alive() if each.model is self.module]

    def update_master_params(self) -> None:
        """Overwrite the optimizers' master slices with the parameters' values. Doesn't communicate."""
        for optimizer in self._optimizers():
            optimizer.update_master_params(self.module)

    def finish_gathers(self) -> None:
        """Wait until all parameters are up to date. Doesn't start any communication."""
        for optimizer in self._optimizers():
            optimizer.finish_gathers()

    _force_wait_all_gather = finish_gathers  # ColossalAI's name for it
