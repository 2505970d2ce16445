"""Packing gradients into a bucket buffer: one multi-tensor call, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_chunk_cat = getattr(torch, "_chunk_cat", None)


def pack(wire: Tensor, flats: Sequence[Tensor], divisor: float = 1.0) -> None:
    """Lay 1-D tensors side by side in ``wire`` (``[world_size, row]``), each padded and cut into its rows.

    The tensors share one dtype, which may differ from the buffer's, and none is empty. They are divided by
    ``divisor``, and left as they are: before they are cast to a dtype that couldn't hold them, else in the buffer.
    """
    if divisor == 1.0:
        _pack(wire, flats)
    elif torch.promote_types(flats[0].dtype, wire.dtype) == wire.dtype:
        _pack(wire, flats)
        wire.div_(divisor)
    else:
        _pack(wire, torch._foreach_div(list(flats), divisor))


def _pack(wire: Tensor, flats: Sequence[Tensor]) -> None:
    if _chunk_cat is not None:
        _chunk_cat(list(flats), 0, wire.shape[0], out=wire)
    else:
        pack_plainly(wire, flats)


def pack_plainly(wire: Tensor, flats: Sequence[Tensor]) -> None:
    """What ``pack`` does, without dividing, in public operations: for a torch without ``_chunk_cat``, and its test."""
    torch.cat([_rows(flat, wire.shape[0]) for flat in flats], dim=1, out=wire)


def _rows(flat: Tensor, world_size: int) -> Tensor:
    padding = -flat.numel() % world_size
    return (F.pad(flat, (0, padding)) if padding else flat).view(world_size, -1)
