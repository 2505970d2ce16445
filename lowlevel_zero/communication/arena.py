"""Arena: memory of one process that others of the same host map, cut into slots that wires are packed into.

It is one anonymous file (a memfd: no name that a killed process could leave behind, no limit as /dev/shm has in
containers), as large as the machine's memory and mapped once by everybody. It takes memory only where a slot
is; a slot's memory is given back by punching a hole, whoever still has it mapped. Those who have read a slot say
so by mail.
"""

from __future__ import annotations

import mmap
import os
import resource
import secrets
from collections import deque
from dataclasses import dataclass
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor

from .mail import Mailbox, OthersMailbox, close_with

_MOST = 64 * 2**30  # of address space
_PAGE = mmap.PAGESIZE
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Address(NamedTuple):
    """Where a process finds another's arena, and how it knows that it is that one: plain values, to be sent."""

    host: str
    process: int
    memory: int  # file descriptors of that process
    mail: int
    file: tuple[int, int]  # device and inode
    size: int
    token: bytes  # what the arena starts with


@dataclass
class Slot:
    """A range of an arena.

    Attributes:
        number: its place in the arena's list.
        offset, nbytes: where it is.
        unread: readers who have not finished with it; 0: free.
        resident: it takes memory.
    """

    number: int
    offset: int
    nbytes: int
    unread: int = 0
    resident: bool = False


class Arena:
    """This process's own.

    Args:
        mapped: how many arenas this process will map, of which this is one.

    Attributes:
        address: where others find it.
        mail: what they tell this process.

    Raises:
        OSError: the system has no such thing, or no room for it.
    """

    def __init__(self, mapped: int = 1) -> None:
        size = min(_MOST, os.sysconf("SC_PHYS_PAGES") * _PAGE)
        _check_room(mapped, size)
        self._memory = os.memfd_create("lowlevel_zero")
        close_with(self, self._memory)
        self.mail = Mailbox()
        os.ftruncate(self._memory, size)
        self._map = _mapped(self._memory, size)
        token = secrets.token_bytes(16)
        self._map[: len(token)] = token
        told = os.stat(self._memory)
        file = (told.st_dev, told.st_ino)
        self.address = Address(_host(), os.getpid(), self._memory, self.mail.descriptor, file, size, token)
        self._slots: list[Slot] = []
        self._unseen: deque[Slot] = deque()  # once for each tensor that is gone, in whichever thread
        self._lock = RLock()
        self._top = _PAGE

    def take(self, nbytes: int, readers: int) -> Slot:
        """A slot that nobody reads, of at least ``nbytes``, for so many readers; never waits for one.

        Raises:
            MemoryError: there is no more.
        """
        with self._lock:
            most = _PAGE if nbytes <= _PAGE else self.address.size  # a few numbers shall not keep a large one
            return self._take(rounded(nbytes), readers, most)

    def _take(self, nbytes: int, readers: int, most: int) -> Slot:
        slot = self._at_hand(nbytes) or self._found(nbytes, most)
        slot.unread = readers
        return slot

    def _at_hand(self, nbytes: int) -> Slot | None:
        """One of just that size, if it is known to be free: then nobody's mail need be looked at."""
        return next((slot for slot in self._slots if slot.nbytes == nbytes and slot.resident and not slot.unread), None)

    def _found(self, nbytes: int, most: int) -> Slot:
        """The best of all that are free, of at most ``most`` bytes, or a new one."""
        self._collect()
        free = [slot for slot in self._slots if slot.unread == 0 and nbytes <= slot.nbytes <= most]
        slot = min(free, key=lambda slot: (not slot.resident, slot.nbytes)) if free else self._new(nbytes)
        if not slot.resident:
            self._populate(slot)
        return slot

    def view(self, slot: Slot, numel: int, dtype: torch.dtype) -> Tensor:
        """The first ``numel`` elements of a slot, 1-D."""
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=slot.offset)

    def finish(self, slot: Slot) -> None:
        """One of the readers, this process itself, has finished with it."""
        with self._lock:
            slot.unread -= 1

    def give_back(self, keep: int = 0) -> None:
        """Give back the memory of free slots, but for about ``keep`` bytes."""
        with self._lock:
            self._give_back(keep)

    def _give_back(self, keep: int) -> None:
        self._collect()
        for slot in self._slots:
            if slot.resident and slot.unread == 0:
                keep -= slot.nbytes
                if keep < 0:
                    self._map.madvise(mmap.MADV_REMOVE, slot.offset, slot.nbytes)
                    slot.resident = False
        while self._slots and not self._slots[-1].resident:
            self._top = self._slots.pop().offset

    def held(self) -> list[Tensor]:
        """The slots that take memory, as bytes."""
        return [self.view(slot, slot.nbytes, torch.uint8) for slot in self._slots if slot.resident]

    def _new(self, nbytes: int) -> Slot:
        slot = Slot(len(self._slots), self._top, nbytes)
        if slot.offset + slot.nbytes > self.address.size:
            raise MemoryError(_exhausted(nbytes, "all of its address space is taken"))
        self._slots.append(slot)
        self._top += slot.nbytes
        return slot

    def _populate(self, slot: Slot) -> None:
        """Get the memory now: where there is none, touching it later would kill the process."""
        try:
            os.posix_fallocate(self._memory, slot.offset, slot.nbytes)
        except OSError as error:
            raise MemoryError(_exhausted(slot.nbytes, str(error))) from error
        slot.resident = True

    def _collect(self) -> None:
        """See who has finished with what."""
        for number in self.mail.finished():
            self._slots[number].unread -= 1
        while self._unseen:
            self._unseen.popleft().unread -= 1


class OthersArena:
    """Another process's arena.

    Attributes:
        mail: the way to tell it something.

    Raises:
        OSError, ValueError: it can't be reached from here.
    """

    def __init__(self, address: Address) -> None:
        if address.host != _host():
            raise ValueError("it is on another host")
        folder = f"/proc/{address.process}/fd"
        # In another PID namespace this may be any process, and opening some files does something: look first.
        told = os.stat(f"{folder}/{address.memory}")
        if (told.st_dev, told.st_ino) != address.file:
            raise ValueError("its process has another number here")
        memory = os.open(f"{folder}/{address.memory}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = _mapped(memory, address.size)
        finally:
            os.close(memory)
        if self._map[: len(address.token)] != address.token:
            raise ValueError("its memory isn't what is seen here")
        self.mail = OthersMailbox(f"{folder}/{address.mail}", address.process)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements from byte ``offset`` on, 1-D; only to be read, and until its owner is told."""
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)


def _check_room(count: int, size: int) -> None:
    """Raise ``OSError`` where so many arenas would take more than half of the address space that is left."""
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
    mapped.madvise(mmap.MADV_DONTDUMP)  # most of it isn't there
    return mapped


def _host() -> str:
    with open(_BOOT_ID) as file:
        return file.read().strip()


def rounded(nbytes: int) -> int:
    """Sizes that fit each other: powers of 2 up to a MiB, then whole MiB."""
    return max(_PAGE, 1 << (nbytes - 1).bit_length()) if nbytes <= 2**20 else -(-nbytes // 2**20) * 2**20


def snug(nbytes: int) -> int:
    """Sizes that waste a 16th at most, and are few: where memory is held for long."""
    step = max(_PAGE, 1 << max(0, nbytes.bit_length() - 5))
    return -(-nbytes // step) * step


def _exhausted(nbytes: int, reason: str) -> str:
    return (
        f"expected {nbytes:,} bytes of shared memory for a wire, got none ({reason}): use smaller buckets or fewer "
        "ranks a host, or set LOWLEVEL_ZERO_SHARED_MEMORY=0, which needs less"
    )
