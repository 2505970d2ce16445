"""Packing tensors into a wire: one multi-tensor call, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_chunk_cat = getattr(torch, "_chunk_cat", None)

# Elements of a tensor that ``_chunk_cat`` takes ten times as long to look at, on the host, as two copies take.
_TINY = 64


def pack(wire: Tensor, flats: Sequence[Tensor], behind: Sequence[Tensor] = (), divisor: float = 1.0) -> None:
    """Lay 1-D tensors side by side in ``wire`` (``[world_size, row]``), each padded and cut into its rows.

    The tensors share one dtype, which may differ from the wire's, and none is empty. ``flats`` are divided by
    ``divisor``, and left as they are; those ``behind`` them are not. What the wire's dtype couldn't hold is divided
    before it is cast, what it can, where it lies in the wire, and one tensor that is all of the wire on its way there.
    """
    if divisor == 1.0 or not flats:
        _pack(wire, flats, behind)
    elif flats[0].dtype == wire.dtype and flats[0].numel() == wire.numel():
        torch.div(flats[0].reshape(wire.shape), divisor, out=wire)
    elif torch.promote_types(flats[0].dtype, wire.dtype) == wire.dtype:
        _pack(wire, flats, behind)
        wire.narrow(1, 0, wire.shape[1] - sum(map(Tensor.numel, behind)) // len(wire)).div_(divisor)
    else:
        _pack(wire, torch._foreach_div(list(flats), divisor), behind)


def _pack(wire: Tensor, flats: Sequence[Tensor], behind: Sequence[Tensor]) -> None:
    if wire.device.type == "cpu" and len(flats) > 1 and _are_tiny_and_alike(flats):
        columns = _pack_alike(wire, flats)
        if behind:
            pack_plainly(wire[:, columns:], behind)
    elif _chunk_cat is not None:
        _chunk_cat([*flats, *behind], 0, wire.shape[0], out=wire)
    else:
        pack_plainly(wire, [*flats, *behind])


def _are_tiny_and_alike(flats: Sequence[Tensor]) -> bool:
    return flats[0].numel() <= _TINY and len(set(map(Tensor.numel, flats))) == 1


def _pack_alike(wire: Tensor, flats: Sequence[Tensor]) -> int:
    """Lay tensors of one size end to end, and turn that into columns, whose number it returns."""
    rows, count, numel = len(wire), len(flats), flats[0].numel()
    size = -(-numel // rows)
    ends = torch.cat(list(flats)).view(count, numel)
    if numel < rows * size:
        ends = F.pad(ends, (0, rows * size - numel))
    wire[:, : count * size].view(rows, count, size).copy_(ends.view(count, rows, size).transpose(0, 1))
    return count * size


def travels_as(dtype: torch.dtype, compact: bool, row_only: bool) -> torch.dtype:
    """The dtype of a wire for gradients of ``dtype``: compact ones are summed in fp32 where reduce-scatters would."""
    return torch.promote_types(dtype, torch.float32) if compact and row_only else dtype


def pack_plainly(wire: Tensor, flats: Sequence[Tensor]) -> None:
    """What ``pack`` does, without dividing, in public operations: for a torch without ``_chunk_cat``, and its test."""
    torch.cat([_rows(flat, wire.shape[0]) for flat in flats], dim=1, out=wire)


def _rows(flat: Tensor, world_size: int) -> Tensor:
    padding = -flat.numel() % world_size
    return (F.pad(flat, (0, padding)) if padding else flat).view(world_size, -1)
