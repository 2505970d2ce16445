"""This project's own optimizer, in both stages."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from lowlevel_zero import LowLevelZeroOptimizer

from .peer import Peer, Setting, adamw


class Ours(Peer):
    """``LowLevelZeroOptimizer`` around AdamW.

    Args:
        setting: what all have in common.
        stage: 1 or 2.
        implementation: of AdamW.
        reduce_each: reduce every micro-batch, so that no rank ever holds whole gradients, not the last alone.
    """

    optimizer: LowLevelZeroOptimizer

    def __init__(self, setting: Setting, stage: int, implementation: str = "fused", reduce_each: bool = False) -> None:
        model = setting.model()
        wrapped = adamw(model.parameters(), implementation)
        super().__init__(model, LowLevelZeroOptimizer(wrapped, partition_grad=stage == 2, model=model))
        self._reduce_each = reduce_each

    def reducing(self, last: bool) -> AbstractContextManager[object]:
        """Every micro-batch is reduced, or the last alone."""
        return nullcontext() if last or self._reduce_each else self.optimizer.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Through the optimizer, as its users call it."""
        self.optimizer.backward(loss)

    def handed_over(self) -> float:
        """The optimizer keeps account: what goes through shared memory is seen by no interface."""
        return sum(self.optimizer.traffic().values())

    def held(self) -> dict[str, int]:
        """The optimizer keeps account itself."""
        return self.optimizer.memory_held()
