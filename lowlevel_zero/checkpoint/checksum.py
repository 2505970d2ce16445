"""Checksums of files, at the speed of memory: a CRC over sums of blocks.

The 64-bit words of each block are summed, wrapping around, and the sums go through a CRC. A bit that has flipped shows,
and so does a page of zeros, a block in another's place or a missing end. Words that have changed places within a block
of 64 KiB don't show. A CRC of all bytes takes several times as long as copying them; these sums take about as long.
"""

from __future__ import annotations

import mmap
import os
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import IO, NamedTuple

import torch

from .tensor_bytes import memory_of

_BLOCK = 2**16  # bytes
_PIECE = 2**20  # bytes of a file that are summed at a time, of which the process holds as many


class FileSum(NamedTuple):
    """The length of a file in bytes, and its checksum of 32 bits."""

    bytes: int
    checksum: int

    @classmethod
    def of(cls, path: Path) -> FileSum:
        """Read a file through a memory map, and return its length and checksum."""
        crc = 0
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else nullcontext(b"") as mapped:
                for at in range(0, size, _PIECE):
                    with memoryview(mapped) as whole, whole[at : at + _PIECE] as piece:
                        crc = _added(piece, crc)
                    if hasattr(mapped, "madvise"):
                        mapped.madvise(mmap.MADV_DONTNEED, at, min(_PIECE, size - at))
        return cls(size, crc)


class SummedFile:
    """A file that is written from beginning to end, while its checksum is computed."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")
        self._piece, self._filled = bytearray(_PIECE), 0
        self._bytes = self._crc = 0

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data`` to a buffer, which is written to the file and summed whenever it is full, and at ``sync``."""
        rest = memoryview(data)
        while rest:
            taken = rest[: _PIECE - self._filled]
            self._piece[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            rest = rest[len(taken) :]
            if self._filled == _PIECE:
                self._write_piece()

    def sync(self) -> FileSum:
        """Write the rest of the buffer, flush the file to the disk, and return its length and checksum."""
        self._write_piece()
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileSum(self._bytes, self._crc)

    def _write_piece(self) -> None:
        piece = memoryview(self._piece)[: self._filled]
        self._crc = _added(piece, self._crc)
        self._file.write(piece)
        self._bytes += self._filled
        self._filled = 0


def _added(piece: memoryview, crc: int) -> int:
    """Return ``crc`` continued over the sums of a piece's blocks; an incomplete last block is filled with zeros."""
    if len(piece) % _BLOCK:
        piece = memoryview(bytearray(piece) + bytes(-len(piece) % _BLOCK))
    if not piece:
        return crc
    sums = torch.frombuffer(piece, dtype=torch.int64).view(-1, _BLOCK // 8).sum(1)
    return zlib.crc32(memory_of(sums), crc)
