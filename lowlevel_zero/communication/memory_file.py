"""Memory that processes of one host share: each has an anonymous file (memfd), which all others map.

It is a memfd: no name that a killed process could leave behind, no limit as /dev/shm has in containers. It is as large
as the machine's memory, and takes memory only where it is populated; a range is given back by punching a hole, whoever
still has it mapped.
"""

from __future__ import annotations

import mmap
import os
import secrets
from typing import NamedTuple

from .pipes import close_with
from .processes import Process, own_process

_MOST = 64 * 2**30  # bytes of address space
_PAGE = mmap.PAGESIZE


class MemoryAddress(NamedTuple):
    """The facts by which another process finds and maps a process's memory; sent between ranks."""

    process: Process
    descriptor: int  # of that process
    file: tuple[int, int]  # device and inode
    size: int
    token: bytes  # the first bytes of the memory


class OwnMemory:
    """This process's shared memory file, and a map of it.

    Args:
        ranks: how many map it, this process too.

    Attributes:
        map: all of it.
        address: where others find it.

    Raises:
        OSError: the system has no such thing, or no room for it.
    """

    def __init__(self, ranks: int) -> None:
        size = min(_MOST, os.sysconf("SC_PHYS_PAGES") * _PAGE)
        _check_room(ranks, size)
        self._file = os.memfd_create("lowlevel_zero")
        close_with(self, self._file)
        os.ftruncate(self._file, size)
        self.map = _mapped(self._file, size)
        token = secrets.token_bytes(16)
        self.map[: len(token)] = token
        seen = os.stat(self._file)
        self.address = MemoryAddress(own_process(), self._file, (seen.st_dev, seen.st_ino), size, token)

    def populate(self, offset: int, nbytes: int) -> None:
        """Allocate memory for a range of the file; raise ``OSError`` if there is none."""
        os.posix_fallocate(self._file, offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free the memory of a range of the file, which stays mapped."""
        self.map.madvise(mmap.MADV_REMOVE, offset, nbytes)


def map_of(address: MemoryAddress) -> mmap.mmap:
    """Map another process's memory, and return the map.

    Raises:
        OSError, ValueError: this process can't reach it.
    """
    if address.process.space != own_process().space:
        raise ValueError("it is on another host, or in another PID namespace")
    path = f"/proc/{address.process.number}/fd/{address.descriptor}"
    # The number may be another process's by now, whose files may act on being opened: look before that.
    seen = os.stat(path)
    if (seen.st_dev, seen.st_ino) != address.file:
        raise ValueError("its process has another number here")
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = _mapped(file, address.size)
    finally:
        os.close(file)
    if mapped[: len(address.token)] != address.token:
        raise ValueError("its memory isn't what is seen here")
    return mapped


def _check_room(count: int, size: int) -> None:
    """Raise ``OSError`` if ``count`` mappings would take more than half of the address space that is left."""
    import resource  # imported here, since only Linux has it

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * _PAGE
    if 2 * count * size > limit - taken:
        raise OSError(
            f"{count} mappings of {size / 2**30:.3g} GiB are too much for an address space limited to "
            f"{limit / 2**30:.3g} GiB: lift it by «ulimit -v unlimited»"
        )


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    mapped = mmap.mmap(descriptor, size)
    mapped.madvise(mmap.MADV_DONTDUMP)  # a core dump would write out all of it, though most has no memory
    return mapped
