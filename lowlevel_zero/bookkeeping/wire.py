"""Packing tensors into a wire: one multi-tensor call, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_chunk_cat = getattr(torch, "_chunk_cat", None)


def pack(wire: Tensor, flats: Sequence[Tensor]) -> None:
    """Lay 1-D tensors side by side in ``wire`` (``[world_size, row]``), each padded and cut into its rows.

    The tensors share one dtype, which may differ from the wire's, and none is empty.
    """
    if _chunk_cat is not None:
        _chunk_cat(list(flats), 0, wire.shape[0], out=wire)
    else:
        pack_plainly(wire, flats)


def pack_plainly(wire: Tensor, flats: Sequence[Tensor]) -> None:
    """What ``pack`` does, in public operations: for a torch without ``_chunk_cat``, and for its test."""
    torch.cat([_rows(flat, wire.shape[0]) for flat in flats], dim=1, out=wire)


def _rows(flat: Tensor, world_size: int) -> Tensor:
    padding = -flat.numel() % world_size
    return (F.pad(flat, (0, padding)) if padding else flat).view(world_size, -1)
