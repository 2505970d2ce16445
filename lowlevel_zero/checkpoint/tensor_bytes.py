"""Tensors in bytes that ``torch.load`` reads, whose number follows from dtype, dimensions and elements alone.

``torch.distributed.checkpoint`` reads each tensor of its files with ``torch.load``. This is the older of the two forms
of ``torch.save``, without a zip archive: a few pickles, and then the values. The pickles are written by hand here, with
integers of fixed width, so that any rank can compute where every other rank's tensors lie in its file.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

_pickled = partial(pickle.dumps, protocol=2)
# ``torch.save`` writes these two, what the machine's integers are like, which ``torch.load`` ignores, and the tensor.
_BEFORE = _pickled(MAGIC_NUMBER) + _pickled(PROTOCOL_VERSION) + _pickled({})
_STORAGES = _pickled(["0"])  # the keys of those whose values follow


class TensorBytes(NamedTuple):
    """The layout of a dense tensor's bytes; ``strides`` are in elements, without gaps."""

    dtype: torch.dtype
    sizes: Sequence[int]
    strides: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the values."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize

    @property
    def length(self) -> int:
        """Return the number of bytes of the head and the values."""
        return head_length(self.dtype, len(self.sizes)) + self.nbytes

    def head(self) -> bytes:
        """Return the bytes before the values."""
        return _BEFORE + self._pickle() + _STORAGES + struct.pack("<q", self.nbytes)

    def _pickle(self) -> bytes:
        """Return the pickle of ``_rebuild_tensor_v3(storage, 0, sizes, strides, False, OrderedDict(), dtype)``."""
        storage = b"(" + _text("storage") + b"ctorch\nByteStorage\n" + _text("0") + _text("cpu")
        sizes, strides = (b"(" + _numbers(*each) + b"t" for each in (self.sizes, self.strides))
        return b"".join(
            [
                b"\x80\2ctorch._utils\n_rebuild_tensor_v3\n(",
                storage + _numbers(self.nbytes) + b"NtQ",
                _numbers(0) + sizes + strides,
                b"\x89ccollections\nOrderedDict\n)R",
                f"ctorch\n{str(self.dtype).removeprefix('torch.')}\ntR.".encode(),
            ]
        )


def memory_of(flat: Tensor) -> memoryview:
    """Return the memory of a contiguous 1-D tensor of the host, not copied. The tensor must outlive the view."""
    assert flat.is_contiguous(), "elements with gaps between them"
    if not flat.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())).cast("B")


@cache
def head_length(dtype: torch.dtype, dims: int) -> int:
    """Return the length of what ``torch.load`` reads before the values of a tensor of this dtype and dimensions."""
    return len(TensorBytes(dtype, (0,) * dims, (0,) * dims).head())


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<L", len(value)) + value.encode()


def _numbers(*values: int) -> bytes:
    """Return the opcodes that push each of ``values``, as an integer of 64 bits."""
    return b"".join(b"\x8a\x08" + struct.pack("<q", value) for value in values)
