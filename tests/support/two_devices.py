"""Two devices on one: memory that knows which of them it would be on, and operations that mustn't mix the two.

Everything passes its side on; what is made out of nothing takes the side of what it first meets. As on CUDA, a 0-d
tensor of the host goes with anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

HOST, DEVICE = "host", "device"


class TwoDevices(TorchDispatchMode):
    """A mode in which operations are watched.

    Attributes:
        crossings: how often memory was copied from side to side.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossings = 0
        self._crossing = False

    def put(self, tensor: Tensor, side: str) -> Tensor:
        """Say on which side a tensor's memory is."""
        tensor.untyped_storage().side = side
        return tensor

    def side(self, tensor: Tensor) -> str | None:
        return getattr(tensor.untyped_storage(), "side", None)

    def crossing(self, side: str, move: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``move``, which may touch both sides, with its result on ``side``."""

        def moved(*args: Any, **keywords: Any) -> Tensor:
            before, self._crossing = self._crossing, True
            self.crossings += 1
            try:
                return self.put(move(*args, **keywords), side)
            finally:
                self._crossing = before

        return moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._crossing:
            return result
        inputs = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        sides = {self.side(each) for each in inputs if each.dim() > 0 or self.side(each) == DEVICE} - {None}
        if len(sides) > 1:
            told = [(self.side(each), tuple(each.shape)) for each in inputs]
            raise AssertionError(f"{func} mixes tensors of the host and of the device: {told}")
        for side in sides:
            for each in (*inputs, *(out for out in pytree.tree_leaves(result) if isinstance(out, Tensor))):
                if self.side(each) is None:
                    self.put(each, side)
        return result
