"""ColossalAI's own low-level ZeRO, stages 1 and 2."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import cast

from torch import Tensor
from torch.optim import Optimizer

from .peer import Peer, Setting, account, adamw

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from colossalai.accelerator import set_accelerator
    from colossalai.zero.low_level import LowLevelZeroOptimizer

    from lowlevel_zero.plugin.host_accelerator import HostAccelerator


class _NoStream:
    """A stream of a machine that has none: everything is done when the call returns."""

    def wait_stream(self, other: object) -> None:
        """Nothing to wait for."""


class _Host(HostAccelerator):
    """A CPU accelerator with streams that do nothing."""

    def Stream(self, *args: object, **kwargs: object) -> _NoStream:
        """A stream."""
        return _NoStream()

    def current_stream(self, device: object = None) -> _NoStream:
        """A stream."""
        return _NoStream()

    def stream(self, stream: object) -> AbstractContextManager[None]:
        """The context in which ``stream`` is the current one."""
        return nullcontext()


class _Anywhere(LowLevelZeroOptimizer):  # type: ignore[misc]  # ColossalAI ships no types
    """Theirs, on any device: the check that there is a GPU is all that is left out."""

    def _sanity_checks(self) -> None:
        """Don't ask for a GPU."""


def low_level_zero(inner: Optimizer, stage: int) -> Optimizer:
    """Their optimizer around ``inner``, on CUDA or on the host, without overlap: that is of several streams."""
    if inner.param_groups[0]["params"][0].device.type == "cpu":
        set_accelerator(_Host())
    return _Anywhere(inner, partition_grad=stage == 2)


class ColossalAI(Peer):
    """ColossalAI's ``LowLevelZeroOptimizer`` around AdamW.

    Args:
        setting: what all have in common.
        stage: 1 or 2.
    """

    def __init__(self, setting: Setting, stage: int) -> None:
        model = setting.model()
        super().__init__(model, low_level_zero(adamw(model.parameters()), stage))
        self._stage = stage

    def reducing(self, last: bool) -> AbstractContextManager[object]:
        """Only the last micro-batch is reduced in stage 1; stage 2 refuses that."""
        if last or self._stage == 2:
            return nullcontext()
        return cast(AbstractContextManager[object], self.optimizer.no_sync())

    def backward(self, loss: Tensor) -> None:
        """Through the optimizer."""
        self.optimizer.backward(loss)

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """What the optimizer leads to."""
        return account(self.model, self.optimizer.optim, self.optimizer)
