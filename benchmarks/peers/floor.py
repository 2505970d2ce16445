"""The floor: what no data-parallel training can undercut, since it communicates nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from .peer import Peer, Setting, adamw


class Floor(Peer):
    """Forward, backward, and the step of this rank's share of each parameter; ranks drift apart."""

    def __init__(self, setting: Setting) -> None:
        model = setting.model()
        self.rows = [_own(p.detach()) for p in model.parameters()]
        self.masters = [row.float() for row in self.rows]  # the row itself if it is fp32
        super().__init__(model, adamw(self.masters))

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters, and copy them back where they aren't the parameters themselves."""
        for p, master in zip(self.model.parameters(), self.masters, strict=True):
            assert p.grad is not None
            master.grad = _own(p.grad).float()
        self.optimizer.step()
        if self.masters[0].dtype != self.rows[0].dtype:
            torch._foreach_copy_(self.rows, self.masters)
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def tensors(self) -> Mapping[str, Iterable[Tensor]]:
        """As everybody's, and the masters."""
        return {**super().tensors(), "masters": self.masters}


def _own(tensor: Tensor) -> Tensor:
    return tensor.view(-1).tensor_split(dist.get_world_size())[dist.get_rank()]
