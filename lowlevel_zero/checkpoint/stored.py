"""A tensor that lies in files: what it is, and its elements piece by piece, so that it is never in memory whole."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StoredTensor:
    """One whole tensor, dense in memory order, which is read when it is asked for.

    Attributes:
        pieces: reads it from the start: 1-D tensors of ``dtype``, in the order of memory, ``prod(shape)``
            elements together. Each may be gone when the next one comes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, tensor: Tensor) -> StoredTensor:
        """A tensor that is in memory already."""
        dense = tensor.detach().cpu().contiguous()
        return cls(dense.dtype, tuple(dense.shape), dense.stride(), lambda: [dense.flatten()])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_major(self) -> bool:
        """Whether the order of memory is that of the indices."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta").is_contiguous()

    def read(self) -> Tensor:
        """All of it, of its shape and strides."""
        flat = torch.empty(math.prod(self.shape), dtype=self.dtype, device="cpu")
        at = 0
        for piece in self.pieces():
            flat[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
        return flat.as_strided(self.shape, self.stride)

    def row_major_pieces(self) -> Iterator[Tensor]:
        """Its elements in the order of its indices, as formats without strides have them, in 1-D tensors.

        Piece by piece where that is the order of memory; else the tensor is in memory twice for a moment.
        """
        if self.row_major:
            yield from self.pieces()
        else:
            yield self.read().contiguous().flatten()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, not copied: valid as long as ``tensor`` is."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
