"""Storages: the memory behind parameters, which is padded so that the ranks divide it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..partition import Split


def flat_in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` as 1-D in the memory order of ``like``, which is dense and of its shape; a view if possible."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if like.is_contiguous():
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def move_to_padded(p: nn.Parameter, split: Split) -> Tensor:
    """Move ``p`` to padded memory, unless it is alone in its storage and needs no padding; return the memory, 1-D.

    The storage of ``p`` is exactly its bytes of it, since safetensors saves no tensor that leaves some of its storage
    out. A storage that is so already is kept where there is nothing to pad: what else looks at it (``p.data`` taken
    before, a numpy array, another process) goes on following ``p``. From any other one ``p`` moves out, even if it has
    the padded size: a neighbour may be where the padding would go.

    Padding is zeros, which no norm sees. Dense strides (a transposed or channels_last parameter) stay as they are;
    others become contiguous.
    """
    stride = p.stride()
    if not p.is_contiguous():
        stride = torch.empty_like(p.detach(), device="meta").stride()  # keeps dense strides, and makes others dense
    alone = p.untyped_storage().nbytes() == split.numel * p.element_size() and p.storage_offset() == 0
    if alone and p.stride() == stride and not split.padding:
        return torch.as_strided(p.detach(), (split.numel,), (1,))
    padded = torch.zeros(split.padded_numel, dtype=p.dtype, device=p.device)
    move_onto(padded, torch.as_strided(padded, p.shape, stride), p)
    return padded


def move_onto(padded: Tensor, view: Tensor, p: nn.Parameter) -> None:
    """Copy ``p``'s values to ``view``, and make ``p`` a view of ``padded`` with a storage of exactly its bytes."""
    view.copy_(p.detach())
    own = padded.untyped_storage()[: view.nbytes]
    p.data = torch.empty(0, dtype=view.dtype, device=view.device).set_(own, 0, view.shape, view.stride())


def overlapping(parameters: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the places of two dense parameters that share memory, in ascending order, or None."""
    memory = [(*memory_of(p), place) for place, p in enumerate(parameters)]
    # Without those whose own elements overlap, or leave gaps.
    spans = sorted(span for span in memory if span[1] - span[0] == parameters[span[2]].nbytes)
    for (_, stop, one), (start, _, other) in pairwise(spans):
        if start < stop:
            return (one, other) if one < other else (other, one)
    return None


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first and one-past-last byte of a tensor's elements."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield a state's tensors at any depth, meta tensors too; a quantised tensor yields the tensors that it wraps."""
    for each in tree_leaves(value):
        if isinstance(each, Tensor) and is_traceable_wrapper_subclass(each):
            yield from (getattr(each, name) for name in each.__tensor_flatten__()[0])
        elif isinstance(each, Tensor):
            yield each
