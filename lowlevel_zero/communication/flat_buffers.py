"""Flat buffers: copy pieces into one and out again, sum rows, and view tensors as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_TINY = 4096  # elements of a tensor that are copied faster than the copy is set up
_BLOCK = 2**16  # elements that fit a core's cache several times


def in_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return the elements as ``[rows, -1]``, padded with zeros; a view where no padding is needed."""
    short = -tensor.numel() % rows
    return (F.pad(tensor.flatten(), (0, short)) if short else tensor).view(rows, -1)


def unpack(buffer: Tensor, rows: Sequence[Tensor]) -> None:
    """Copy the columns of ``buffer``, ``[size, row]``, into ``rows``, each ``[size, s]``, by one call."""
    sizes = [each.shape[1] for each in rows]
    torch.split_with_sizes_copy(buffer[:, : sum(sizes)], sizes, dim=1, out=list(rows))


def lay_end_to_end(into: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy 1-D ``pieces`` of one dtype end to end into ``into``, cast to its dtype."""
    if pieces[0].dtype == into.dtype:
        torch.cat(list(pieces), out=into)
    elif into.numel() < _TINY * len(pieces):
        end_to_end = pieces[0].new_empty(into.numel())
        torch.cat(list(pieces), out=end_to_end)  # without ``out`` a surrounding autocast would change the dtype
        into.copy_(end_to_end)  # one more pass costs less than some microseconds for each piece
    else:
        torch._foreach_copy_(into.split_with_sizes([piece.numel() for piece in pieces]), list(pieces))


def take_apart(buffer: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy consecutive parts of 1-D ``buffer`` into 1-D ``pieces``, by one call."""
    torch.split_with_sizes_copy(buffer, [piece.numel() for piece in pieces], out=list(pieces))


def keep_own(own: Sequence[Tensor], rows: Sequence[Tensor], rank: int) -> None:
    """Copy each of ``own`` into row ``rank`` of its ``rows``, unless all are these rows' memory already."""
    pairs = zip(own, rows, strict=True)
    # Each parameter of a step comes by: an address takes a quarter of the time of a view.
    if any(piece.data_ptr() != all_of.data_ptr() + rank * piece.nbytes for piece, all_of in pairs):
        torch._foreach_copy_([each[rank] for each in rows], list(own))


def are_apart(pieces: Sequence[Tensor], places: Sequence[Tensor]) -> bool:
    """Return whether any of ``pieces`` isn't the memory of its place: an optimizer may give each slice other memory."""
    return any(piece.data_ptr() != place.data_ptr() for piece, place in zip(pieces, places, strict=True))


# ---- sums ----


def sum_rows(rows: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """Return the sum of 1-D rows, added in order and in fp32 at least, in ``into`` or a new tensor; one row as it is.

    Two 16-bit numbers are added right as they are: their sum is rounded once either way. More rows are added a block at
    a time, so that the sum stays in the cache.
    """
    if len(rows) == 1:
        return rows[0]
    if len(rows) == 2:
        return torch.add(rows[0], rows[1], out=into)
    total = torch.empty_like(rows[0]) if into is None else into
    wide = torch.promote_types(total.dtype, torch.float32)
    for block, first, second, *others in zip(*(torch.split(row, _BLOCK) for row in (total, *rows)), strict=True):
        start = first.to(wide)  # ``first`` itself if it is fp32 already
        exact = torch.add(start, second, out=block if start is first else start)
        for other in others:
            exact += other
        if exact is not block:
            block.copy_(exact)
    return total


def sum_rows_in_fp32(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``[size, row]`` over the first dimension, added in fp32 at least, then rounded to ``dtype``."""
    return rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)).to(dtype)


# ---- bytes ----


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, 1-D; a view if the tensor is contiguous, else a copy."""
    if tensor.stride() == (1,):
        return tensor.detach().view(torch.uint8)
    dense = tensor.detach().contiguous()
    # A contiguous tensor of one element may have any strides, with which it can't be seen as bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
