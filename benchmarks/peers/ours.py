"""This project's own optimizer, in both stages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from random import Random
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lowlevel_zero import Communication, LowLevelZeroOptimizer
from lowlevel_zero.layout import memory_held, traffic_of

from ..gpt import GPT
from .older import older_class
from .peer import Peer, Setting, adamw

_SWITCH = "LOWLEVEL_ZERO_SHARED_MEMORY"


class Ours(Peer):
    """``LowLevelZeroOptimizer`` around AdamW.

    Args:
        setting: what all have in common.
        stage: 1 or 2.
        implementation: of AdamW.
        reduce_each: reduce every micro-batch, so that no rank ever holds whole gradients, not the last alone.
        messages: let ranks send messages, as between hosts, instead of sharing memory.
        older: take the class of the older tree.
        hybrid_shard: shard over the ranks of a host, and keep replicas on the other hosts.
        options: further ones of ``LowLevelZeroOptimizer``.
    """

    optimizer: Any

    def __init__(
        self,
        setting: Setting,
        stage: int,
        implementation: str = "fused",
        reduce_each: bool = False,
        messages: bool = False,
        older: bool = False,
        hybrid_shard: bool = False,
        **options: Any,
    ) -> None:
        model = setting.model()
        wrapped = adamw(model.parameters(), implementation)
        make: Any = older_class() if older else LowLevelZeroOptimizer
        with _without_shared_memory() if messages else nullcontext():
            if hybrid_shard:
                options["dp_process_group"] = _hosts()
                options["communication"] = Communication(hybrid_shard=True)
            super().__init__(model, make(wrapped, partition_grad=stage == 2, model=model, **options))
        self._reduce_each = reduce_each

    def reducing(self, last: bool) -> AbstractContextManager[object]:
        """Every micro-batch is reduced, or the last alone."""
        return nullcontext() if last or self._reduce_each else self.optimizer.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Through the optimizer, as its users call it."""
        self.optimizer.backward(loss)

    def handed_over(self) -> float:
        """The optimizer keeps account: what goes through shared memory is seen by no interface.

        Where ``torchrun`` has started ranks of several hosts, what goes to the others' of it: all ranks get alike.
        """
        sent, ranks = traffic_of(self.optimizer), dist.get_world_size()
        if "reduce_outer" in sent:
            return float(sent["reduce_outer"] + sent["gather_outer"])
        near = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return sum(sent.values()) * (ranks - near) / max(1, ranks - 1)

    def held(self) -> dict[str, int]:
        """The optimizer keeps account itself."""
        return asdict(memory_held(self.optimizer))


def _hosts() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's column, across hosts, and its row, within one; as ``torchrun`` has numbered them."""
    near = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (dist.get_world_size() // near, near), mesh_dim_names=("outer", "inner"))
    return mesh.get_group("outer"), mesh.get_group("inner")


@contextmanager
def _without_shared_memory() -> Iterator[None]:
    """For optimizers that are made within."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "0"
    try:
        yield
    finally:
        del os.environ[_SWITCH]
        if before is not None:
            os.environ[_SWITCH] = before


class OursDropping(Ours):
    """Half of the blocks are left out of each step: others each time, the same on all ranks (Fan et al., 2020)."""

    model: GPT

    def __init__(self, setting: Setting, stage: int) -> None:
        super().__init__(setting, stage)
        self._blocks = list(self.model.blocks)
        self._draw = Random(0)

    def forward_backward(self, batches: Sequence[Tensor]) -> Tensor:
        """With half of the blocks."""
        chosen = self._draw.sample(range(len(self._blocks)), len(self._blocks) // 2)
        self.model.blocks = nn.ModuleList(self._blocks[number] for number in sorted(chosen))
        return super().forward_backward(batches)
