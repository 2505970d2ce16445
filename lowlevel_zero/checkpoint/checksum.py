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
from typing import NamedTuple

import torch

from .tensor_bytes import memory_of

_BLOCK = 2**16  # bytes
_PIECE = 2**20  # bytes of a file that are checked at a time, of which the process holds as many


class FileSum(NamedTuple):
    """The length and the checksum of a file.

    Attributes:
        bytes: the length of the file.
        checksum: of all of it, 32 bits.
    """

    bytes: int
    checksum: int

    @classmethod
    def of(cls, path: Path) -> FileSum:
        """Read a file through a memory map, and return its length and checksum."""
        found = Checksum()
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else nullcontext(b"") as mapped:
                for at in range(0, size, _PIECE):
                    with memoryview(mapped) as whole, whole[at : at + _PIECE] as piece:
                        found.add(piece)
                    if hasattr(mapped, "madvise"):
                        mapped.madvise(mmap.MADV_DONTNEED, at, min(_PIECE, size - at))
        return found.sum()


class Checksum:
    """The checksum of bytes that come in pieces of any length."""

    def __init__(self) -> None:
        self._bytes = self._crc = self._filled = 0
        self._begun = bytearray(_BLOCK)  # a block of which a part has come

    def add(self, data: memoryview) -> None:
        """Add the next bytes to the checksum; they lie in writable memory."""
        self._bytes += len(data)
        if self._filled or len(data) < _BLOCK:
            taken = min(len(data), _BLOCK - self._filled)
            self._begun[self._filled : self._filled + taken] = data[:taken]
            self._filled += taken
            if self._filled == _BLOCK:
                self._crc, self._filled = self._with(memoryview(self._begun)), 0
            data = data[taken:]
        whole = len(data) // _BLOCK * _BLOCK
        if whole:
            self._crc = self._with(data[:whole])
        if len(data) > whole:
            self._filled = len(data) - whole
            self._begun[: self._filled] = data[whole:]

    def sum(self) -> FileSum:
        """Return the length and the checksum of all bytes so far."""
        self._begun[self._filled :] = bytes(_BLOCK - self._filled)
        return FileSum(self._bytes, self._with(memoryview(self._begun)))

    def _with(self, blocks: memoryview) -> int:
        sums = torch.frombuffer(blocks, dtype=torch.int64).view(-1, _BLOCK // 8).sum(1)
        return zlib.crc32(memory_of(sums), self._crc)
