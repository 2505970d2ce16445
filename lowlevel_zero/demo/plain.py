"""The plain way, to compare with: AdamW on whole parameters, their gradients averaged by DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class PlainAdamW(torch.optim.AdamW):
    """AdamW with the face of LowLevelZeroOptimizer, so that one training loop serves both."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], clip: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, fused=True)
        self._largest_norm = clip or float("inf")
        self._norm = torch.zeros(())

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._norm = torch.nn.utils.clip_grad_norm_(self._parameters(), self._largest_norm)
        return super().step(closure)

    def get_grad_norm(self) -> Tensor:
        return self._norm

    def memory_held(self) -> dict[str, int]:
        """Bytes, by owner, in LowLevelZeroOptimizer's words."""
        parameters = self._parameters()
        states = (value for state in self.state.values() for value in state.values())
        return {
            "parameters": sum(p.nbytes for p in parameters),
            "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
            "masters": 0,
            "states": sum(value.nbytes for value in states if isinstance(value, Tensor)),
        }

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]
