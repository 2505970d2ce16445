"""Format 1, of versions before this one: tensors were stored flat, in memory order, and states by other names.

``model.<name>`` and ``optimizer.<name>.<key>`` had ``numel`` elements, whose shape and strides are in the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..bookkeeping.sharding import SCALARS
from ..bookkeeping.storages import flat_in_memory_order
from ..state.boxes import BoxedTensor
from ..state.sharded import States
from .manifest import SavedTensor

STATE = "optimizer."


def read_flat(
    read: Callable[[dict[str, Any]], None],
    saved: Mapping[str, SavedTensor],
    model: Mapping[str, Tensor],
    states: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Fill tensors of the parameters' shapes.

    Args:
        read: fills tensors that are as stored, in nested dicts by what they are called there.
        saved: the manifest's.
        model, states: what to fill: all of a dense tensor, or this rank's boxes.
    """
    reordered: list[tuple[SavedTensor, BoxedTensor, Tensor]] = []

    def stored(name: str, tensor: Tensor, key: str = "") -> Tensor:
        entry = saved[name]
        if key in SCALARS or tensor.shape != entry.shape:
            return tensor
        boxes = tensor if isinstance(tensor, BoxedTensor) else _all_of(tensor)
        if boxes.strides == entry.stride:
            return BoxedTensor(boxes.local, boxes.start, (entry.numel,), (1,))
        whole = torch.empty(entry.numel, dtype=tensor.dtype, device=tensor.device)
        reordered.append((entry, boxes, whole))
        return whole

    flat_states: States = {n: {key: stored(n, each, key) for key, each in s.items()} for n, s in states.items()}
    read({"model": {name: stored(name, each) for name, each in model.items()}, "optimizer": flat_states})
    for entry, boxes, whole in reordered:
        like = torch.empty_strided(entry.shape, boxes.strides, device="meta")
        ours = flat_in_memory_order(whole.as_strided(entry.shape, entry.stride), like)
        boxes.local.copy_(ours[boxes.start : boxes.start + len(boxes.local)])


def _all_of(tensor: Tensor) -> BoxedTensor:
    return BoxedTensor(tensor.as_strided((tensor.numel(),), (1,)), 0, tensor.shape, tensor.stride())
