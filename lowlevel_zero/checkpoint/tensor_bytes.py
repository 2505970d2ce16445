"""Tensors in the bytes that ``torch.save`` gives them, whose number follows from dtype, dimensions and elements alone.

``torch.distributed.checkpoint`` reads each tensor of its files with ``torch.load``. A tensor is a zip archive of four
records: a pickle of its shape and strides, two markers, and its values. The archive is written by hand here, with
integers of fixed width, so that any rank can compute where every other rank's tensors lie in its file.

As with ``torch.serialization.set_crc32_options(False)``, the archive has no checksum of the values. The manifest has
one of the whole file, which is computed while the file is written.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64  # of values in the file, in bytes

_VALUES = b"archive/data/0"
_MARKERS = ((b"archive/byteorder", b"little"), (b"archive/version", b"3\n"))
_ZIP64, _PADDING = 0x0001, 0x4246  # kinds of extra fields
_VERSION = 45  # of the zip format, which has 64-bit sizes
_WIDEST = 2**32 - 1


class TensorBytes(NamedTuple):
    """The layout of a dense tensor's bytes.

    Attributes:
        dtype: the dtype of the tensor.
        sizes: the shape of the tensor.
        strides: the strides of the tensor, in elements, without gaps.
    """

    dtype: torch.dtype
    sizes: Sequence[int]
    strides: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the values."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize

    @property
    def length(self) -> int:
        """Return the number of bytes of the whole archive."""
        return head_length(self.dtype, len(self.sizes)) + self.nbytes + _tail_length(self.dtype, len(self.sizes))

    def head(self) -> bytes:
        """Return the archive's bytes before the values: the small records and the header of the values."""
        small = list(_small_records(self.dtype, self.sizes, self.strides, self.nbytes))
        start = sum(len(_local(*record)) + len(record[1]) for record in small)
        extra = struct.pack("<2H2Q", _ZIP64, 16, self.nbytes, self.nbytes)
        padding = -(start + 30 + len(_VALUES) + len(extra) + 4) % ALIGNMENT
        extra += struct.pack("<2H", _PADDING, padding) + bytes(padding)
        of_values = _header(b"PK\3\4", 0, _WIDEST, len(_VALUES), len(extra)) + _VALUES + extra
        return b"".join(_local(*record) + record[1] for record in small) + of_values

    def tail(self) -> bytes:
        """Return the bytes behind the values: the archive's directory."""
        at, entries = 0, []
        for name, content in _small_records(self.dtype, self.sizes, self.strides, self.nbytes):
            entries.append(_entry(name, zlib.crc32(content), len(content), at, b""))
            at += len(_local(name, content)) + len(content)
        entries.append(_entry(_VALUES, 0, _WIDEST, at, struct.pack("<2H2Q", _ZIP64, 16, self.nbytes, self.nbytes)))
        directory, count = b"".join(entries), len(entries)
        begins = head_length(self.dtype, len(self.sizes)) + self.nbytes
        ends = begins + len(directory)
        return b"".join(
            [
                directory,
                struct.pack(
                    "<4sQ2H2L4Q", b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, len(directory), begins
                ),
                struct.pack("<4sLQL", b"PK\6\7", 0, ends, 1),
                struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), min(begins, _WIDEST), 0),
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
    """Return the number of bytes before the values of any tensor of this dtype and number of dimensions."""
    return len(TensorBytes(dtype, (0,) * dims, (0,) * dims).head())


@cache
def _tail_length(dtype: torch.dtype, dims: int) -> int:
    return len(TensorBytes(dtype, (0,) * dims, (0,) * dims).tail())


def _small_records(
    dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], nbytes: int
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the name and content of each record but the values."""
    yield b"archive/data.pkl", _pickle(dtype, sizes, strides, nbytes)
    yield from _MARKERS


def _pickle(dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], nbytes: int) -> bytes:
    """Return the pickle of ``_rebuild_tensor_v3(storage, 0, sizes, strides, False, OrderedDict(), dtype)``."""
    storage = b"(" + _text("storage") + b"ctorch.storage\nUntypedStorage\n" + _text("0") + _text("cpu")
    return b"".join(
        [
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n(",
            storage + _number(nbytes) + b"tQ",
            _number(0) + _numbers(sizes) + _numbers(strides),
            b"\x89ccollections\nOrderedDict\n)R",
            f"ctorch\n{str(dtype).removeprefix('torch.')}\n".encode(),
            b"tR.",
        ]
    )


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<L", len(value)) + value.encode()


def _number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def _numbers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def _local(name: bytes, content: bytes) -> bytes:
    return _header(b"PK\3\4", zlib.crc32(content), len(content), len(name), 0) + name


def _header(kind: bytes, crc: int, size: int, name: int, extra: int) -> bytes:
    return struct.pack("<4s5H3L2H", kind, _VERSION, 0, 0, 0, 0, crc, size, size, name, extra)


def _entry(name: bytes, crc: int, size: int, at: int, extra: bytes) -> bytes:
    fields = (b"PK\1\2", _VERSION, _VERSION, 0, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, at)
    return struct.pack("<4s6H3L5H2L", *fields) + name + extra
