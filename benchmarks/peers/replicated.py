"""Contestants that replicate everything, or all but the optimizer's state: DDP and what torch builds on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from .peer import HYPER, Peer, Setting, adamw, state_tensors

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch scripts optimizers beside it, which is deprecated
    from torch.distributed.optim import ZeroRedundancyOptimizer


_ONE_BUCKET = 2**20  # MiB: more than any model here has


class DDP(Peer):
    """``DistributedDataParallel`` with ``gradient_as_bucket_view``, and AdamW.

    Args:
        setting: what all have in common.
        implementation: of AdamW.
        compression: of gradients on their way: "bf16", or "powersgd", torch's hook, of rank 4; empty: none.
    """

    model: DistributedDataParallel

    def __init__(self, setting: Setting, implementation: str = "fused", compression: str = "") -> None:
        # torch's PowerSGD goes on to its next collective in a callback, which over gloo comes in no order of buckets.
        most = _ONE_BUCKET if compression == "powersgd" else None
        model = DistributedDataParallel(setting.model(), gradient_as_bucket_view=True, bucket_cap_mb=most)
        if compression == "bf16":
            model.register_comm_hook(None, _in_bf16)
        elif compression == "powersgd":
            state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook)
        super().__init__(model, self.make_optimizer(model, implementation))
        self._buckets: list[Tensor] = []

    def make_optimizer(self, model: DistributedDataParallel, implementation: str) -> Optimizer:
        """The optimizer of the wrapped model."""
        return adamw(model.parameters(), implementation)

    def reducing(self, last: bool) -> AbstractContextManager[object]:
        """Only the last micro-batch is reduced."""
        return nullcontext() if last else cast(AbstractContextManager[object], self.model.no_sync())

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """As everybody's, but DDP keeps its buckets when the gradients, which are views of them, are gone."""
        listed = dict(super().tensors())
        self._buckets = list(listed["gradients"]) or self._buckets
        return {**listed, "gradients": self._buckets}


class ZeRORedundancy(DDP):
    """DDP and ``ZeroRedundancyOptimizer``: every rank steps whole parameters of its own and broadcasts them."""

    def make_optimizer(self, model: DistributedDataParallel, implementation: str) -> Optimizer:
        """Without ``parameters_as_bucket_view``, which was the slower way."""
        return ZeroRedundancyOptimizer(model.parameters(), AdamW, fused=implementation == "fused", **HYPER)

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """The state is the inner optimizer's, of this rank's parameters."""
        return {**super().tensors(), "states": state_tensors(cast(ZeroRedundancyOptimizer, self.optimizer).optim)}


class DDPMasters(DDP):
    """Mixed precision without sharding: a bf16 model in DDP, and fp32 masters that fused AdamW steps.

    The masters' gradients are kept from step to step: making them anew costs the first touch of every page.
    """

    def make_optimizer(self, model: DistributedDataParallel, implementation: str) -> Optimizer:
        """AdamW over the masters."""
        self.masters = [p.detach().float() for p in model.parameters()]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        return adamw(self.masters, implementation)

    @torch.no_grad()
    def step(self) -> None:
        """Gradients to the masters, step, and the masters back to the model."""
        parameters: list[Tensor] = list(self.model.parameters())
        torch._foreach_copy_(_gradients(self.masters), _gradients(parameters))
        self.optimizer.step()
        torch._foreach_copy_(parameters, self.masters)
        self.model.zero_grad()

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """As DDP's, and the masters with their gradients."""
        return {**super().tensors(), "masters": self.masters, "masters' gradients": _gradients(self.masters)}


def _in_bf16(_, bucket):  # type: ignore[no-untyped-def]  # DDP wants the annotations themselves, not their names
    """What torch's ``bf16_compress_hook`` does, which refuses gloo."""
    buffer = bucket.buffer()
    compressed = buffer.div(dist.get_world_size()).to(torch.bfloat16)
    work = dist.all_reduce(compressed, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
