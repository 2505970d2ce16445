"""FSDP2: torch's ``fully_shard``, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .peer import Peer, Setting, adamw, state_tensors


class FSDP2(Peer):
    """``fully_shard`` over each block and the rest, and fused AdamW.

    bf16 is its mixed precision: fp32 shards are what the optimizer steps, and are gathered as bf16.

    Args:
        setting: what all have in common.
        reshard: let go of a block's gathered parameters after forward (ZeRO-3), or keep them for backward.
    """

    def __init__(self, setting: Setting, reshard: bool) -> None:
        model = setting.rounded_model()
        mesh = init_device_mesh(setting.device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if setting.dtype == "bf16" else None)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        super().__init__(model, adamw(model.parameters()))

    def reducing(self, last: bool) -> AbstractContextManager[object]:
        """Only the last micro-batch is reduced."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """Shards, and what is gathered at the moment (freed storages have no bytes)."""
        shards = list(self.model.parameters())
        return {
            "parameters": map(_local, shards),
            "gathered": list(_gathered(self.model)),
            "gradients": [_local(shard.grad) for shard in shards if shard.grad is not None],
            "states": map(_local, state_tensors(self.optimizer)),
        }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def _gathered(model: nn.Module) -> Iterator[Tensor]:
    """FSDP2's own records tell; there is no public way to ask."""
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group else ():
            yield from parameter.all_gather_outputs
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                yield from (_local(each) for each in (whole, whole.grad) if each is not None)
