"""fairscale's OSS and ShardedDDP: whole parameters, each owned by one rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import cast

from torch import Tensor
from torch.optim import AdamW

from .peer import HYPER, Peer, Setting, account

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS


class FairscaleOSS(Peer):
    """``ShardedDataParallel`` over ``OSS`` with fused AdamW, everything else as it comes."""

    model: ShardedDataParallel

    def __init__(self, setting: Setting) -> None:
        model = setting.model()
        optimizer = OSS(model.parameters(), optim=AdamW, fused=True, **HYPER)
        super().__init__(ShardedDataParallel(model, optimizer), optimizer)

    def reducing(self, last: bool) -> AbstractContextManager[object]:
        """Only the last micro-batch is reduced."""
        return nullcontext() if last else cast(AbstractContextManager[object], self.model.no_sync())

    def step(self) -> None:
        """The wrapped model lets go of the gradients."""
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """What the wrapped model and the optimizer lead to."""
        return account(self.model, self.optimizer.optim, self.optimizer)
