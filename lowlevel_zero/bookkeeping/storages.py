"""Storages: the memory behind parameters: each one's own, padded, and read in the order in which it lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..partition import EvenSplit


def flat_in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor``'s elements in the order in which the dense ``like``, of the same shape, holds its own."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if like.is_contiguous():
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def rehome(p: nn.Parameter, split: EvenSplit) -> Tensor:
    """Put ``p`` over a storage of its own, no larger than the padding needs, and return it whole, 1-D.

    A storage that is just right already is kept. Padding is zeros, which no norm sees. Dense strides (a transposed or
    channels_last parameter) stay as they are; others become contiguous. Frees ``torch.save(model.state_dict())`` of
    what isn't ``p``'s.
    """
    dense = torch.empty_like(p.detach())  # keeps dense strides, and makes others dense
    own = p.untyped_storage().nbytes() == split.padded_numel * p.element_size()
    if own and p.stride() == dense.stride() and p.storage_offset() == 0:
        flat = torch.as_strided(p.detach(), (split.padded_numel,), (1,))
        if split.padding:
            flat[split.numel :].zero_()
        return flat
    padded = torch.zeros(split.padded_numel, dtype=p.dtype, device=p.device)
    home = torch.as_strided(padded, p.shape, dense.stride())
    home.copy_(p.detach())
    p.data = home
    return padded


def overlapping(parameters: Sequence[Tensor]) -> tuple[int, int] | None:
    """Places of two different parameters that share memory, or None."""
    spans = sorted(_memory_spans(parameters))
    for (_, stop, one), (start, _, other) in pairwise(spans):
        if start < stop:
            return (one, other) if one < other else (other, one)
    return None


def _memory_spans(parameters: Iterable[Tensor]) -> Iterator[tuple[int, int, int]]:
    """First and one-past-last byte of each dense parameter; a strided one may interleave with others."""
    for place, p in enumerate(parameters):
        extent = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)) + 1
        if extent == p.numel():
            yield p.data_ptr(), p.data_ptr() + extent * p.element_size(), place
