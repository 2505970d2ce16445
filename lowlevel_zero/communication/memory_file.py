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
    size: int
    token: bytes  # the first bytes of the memory


class OwnMemory:
    """This process's shared memory file, a map of all of it, and the address where others find it.

    Raises:
        OSError: the system has no such thing, or limits the address space.
    """

    def __init__(self) -> None:
        import resource  # imported here, since only Linux has it

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            raise OSError(f"its address space is limited to {limit / 2**30:.3g} GiB: lift it by «ulimit -v unlimited»")
        size = min(_MOST, os.sysconf("SC_PHYS_PAGES") * _PAGE)
        self._file = os.memfd_create("lowlevel_zero")
        close_with(self, self._file)
        os.ftruncate(self._file, size)
        self.map = _mapped(self._file, size)
        token = secrets.token_bytes(16)
        self.map[: len(token)] = token
        self.address = MemoryAddress(own_process(), self._file, size, token)

    def populate(self, offset: int, nbytes: int) -> None:
        """Allocate memory for a range of the file; raise ``OSError`` if there is none."""
        os.posix_fallocate(self._file, offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free the memory of a range of the file, which stays mapped."""
        self.map.madvise(mmap.MADV_REMOVE, offset, nbytes)


def map_of(address: MemoryAddress) -> mmap.mmap:
    """Return a map of another process's memory, to read and write; raise an error if it can't be reached.

    Raises:
        OSError, ValueError: this process can't reach it.
    """
    if address.process.space != own_process().space:
        raise ValueError("it is on another host, or in another PID namespace")
    file = os.open(f"/proc/{address.process.number}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = _mapped(file, address.size)
    finally:
        os.close(file)
    if mapped[: len(address.token)] != address.token:
        raise ValueError("its memory isn't what is seen here")
    return mapped


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    mapped = mmap.mmap(descriptor, size)
    mapped.madvise(mmap.MADV_DONTDUMP)  # a core dump would write out all of it, though most has no memory
    return mapped
