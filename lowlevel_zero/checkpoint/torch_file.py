"""``torch.save``'s file format, written one tensor at a time: an uncompressed zip of a pickle and a file a tensor.

``torch.save`` itself wants all tensors in memory. The format is the one that torch documents ("Serialization
semantics"), and ``torch.load(path, weights_only=True)`` reads it, ``mmap=True`` too.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch
from torch import Tensor

from .stored import StoredTensor, memory_of

FOLDER = "archive"
ALIGNMENT = 64  # of a tensor's bytes in the file, so that they can be mapped
LOCAL_HEADER, ZIP64_EXTRA = 30, 20  # bytes in the file before a record's name, and after it if it is large
ZIP64_FROM = 2**31 - 2**20
# How the format calls dtypes: torch's storage classes of old.
STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}


def save(value: Any, path: Path, wrote: Callable[[int], object]) -> None:
    """Write ``value`` as ``torch.save`` would, a tensor for each ``StoredTensor`` in it, through to the disk.

    Args:
        wrote: called with the number of bytes whenever some of a tensor's have been written.

    Raises:
        ValueError: a tensor of a dtype that the format has no word for.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    with path.open("xb") as file:
        with ZipFile(file, "w", ZIP_STORED) as archive:
            archive.writestr(ZipInfo(f"{FOLDER}/data.pkl"), buffer.getvalue())
            archive.writestr(ZipInfo(f"{FOLDER}/byteorder"), sys.byteorder)
            for key, tensor in enumerate(pickler.tensors):
                _write_tensor(archive, f"{FOLDER}/data/{key}", tensor, wrote)
            archive.writestr(ZipInfo(f"{FOLDER}/version"), "3\n")
        file.flush()
        os.fsync(file.fileno())


class _Storage(NamedTuple):
    """What the pickle says of a tensor's bytes."""

    type: str
    key: int
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles tensors by reference, and keeps a list of them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[StoredTensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        return ("storage", getattr(torch, value.type), str(value.key), "cpu", value.numel)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = StoredTensor.of(value)
        if not isinstance(value, StoredTensor):
            return NotImplemented
        storage = _Storage(_storage_type(value.dtype), len(self.tensors), value.nbytes // value.dtype.itemsize)
        self.tensors.append(value)
        # The one name that all files of torch.save's have for "a tensor over this storage".
        return torch._utils._rebuild_tensor_v2, (storage, 0, value.shape, value.stride, False, OrderedDict())


def _storage_type(dtype: torch.dtype) -> str:
    if dtype not in STORAGES:
        raise ValueError(f"expected tensors of {', '.join(map(str, STORAGES))}, got one of {dtype}")
    return STORAGES[dtype]


def _write_tensor(archive: ZipFile, name: str, tensor: StoredTensor, wrote: Callable[[int], object]) -> None:
    info = ZipInfo(name)
    large = tensor.nbytes >= ZIP64_FROM
    assert archive.fp is not None
    start = archive.fp.tell() + LOCAL_HEADER + len(name) + (ZIP64_EXTRA if large else 0)
    info.extra = _padding(start)
    with archive.open(info, "w", force_zip64=large) as record:
        for piece in tensor.pieces():
            record.write(memory_of(piece))
            wrote(piece.nbytes)


def _padding(start: int) -> bytes:
    """An extra field, which readers skip, that moves what would start at ``start`` to the next aligned place."""
    zeros = -(start + 4) % ALIGNMENT
    return struct.pack("<2sH", b"FB", zeros) + bytes(zeros)
