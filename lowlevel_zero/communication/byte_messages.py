"""Byte messages: tensors of any dtypes and shapes as one tensor of bytes, in few messages that aren't too large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_BYTES = 64 * 2**20  # of a message


def batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors that hold anything, in their order: those of one device that fit one message, and at least one."""
    batch: list[Tensor] = []
    held = 0
    for tensor in (tensor for tensor in tensors if tensor.numel() > 0):
        held += tensor.numel() * tensor.element_size()
        if batch and (held > _BYTES or tensor.device != batch[0].device):
            yield batch
            batch, held = [], tensor.numel() * tensor.element_size()
        batch.append(tensor)
    if batch:
        yield batch


def as_message(batch: Sequence[Tensor]) -> Tensor:
    """Their bytes, one after the other."""
    return torch.cat([_as_bytes(tensor) for tensor in batch])


def read_message(message: Tensor, batch: Sequence[Tensor]) -> None:
    """Overwrite tensors with what a message made of such holds."""
    parts = message.split_with_sizes([tensor.numel() * tensor.element_size() for tensor in batch])
    for tensor, part in zip(batch, parts, strict=True):
        # A part may start at an odd byte, which a wider dtype can't view: hence the clone.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: Tensor) -> Tensor:
    dense = tensor.detach().contiguous()
    # A contiguous tensor of one element may have any strides, with which it can't be seen as bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
