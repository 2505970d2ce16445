"""The pool: memory of each process that all others of the same host map, cut into blocks that buffers are packed into.

A process's memory is one anonymous file (a memfd: no name that a killed process could leave behind, no limit as
/dev/shm has in containers), as large as the machine's memory and mapped once by everybody. It takes memory only where
a block is; a block's memory is given back by punching a hole, whoever still has it mapped::

    | token | a byte for each block and rank: 1 until that rank has read the block | blocks ...

So those who have read a block say so without a message. They do so after their reads: the interpreter's lock, which a
copy or a sum lets go of and takes again, orders the two.
"""

from __future__ import annotations

import mmap
import os
import resource
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from .control_pipe import ControlPipe, PeerPipe, close_with

_MOST = 64 * 2**30  # of address space
_PAGE = mmap.PAGESIZE
_TABLE = 2**20  # bytes
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Address(NamedTuple):
    """Where a process finds another's memory, and how it knows that it is that one: plain values, to be sent."""

    host: str
    process: int
    memory: int  # file descriptors of that process
    pipe: int
    file: tuple[int, int]  # device and inode
    size: int
    token: bytes  # what the memory starts with


@dataclass
class Block:
    """A range of a process's memory.

    Attributes:
        offset, nbytes: where it is.
        readers: where the memory has a byte for each rank: 1 until it has finished with the block.
        resident: it takes memory.
    """

    offset: int
    nbytes: int
    readers: int
    resident: bool = False


class Memory:
    """This process's own.

    Args:
        ranks: how many map it, this process too.

    Attributes:
        map: all of it.
        address: where others find it.
        pipe: how they tell this process where their parts lie.

    Raises:
        OSError: the system has no such thing, or no room for it.
    """

    def __init__(self, ranks: int = 1) -> None:
        size = min(_MOST, os.sysconf("SC_PHYS_PAGES") * _PAGE)
        _check_room(ranks, size)
        self._ranks = ranks
        self._file = os.memfd_create("lowlevel_zero")
        close_with(self, self._file)
        self.pipe = ControlPipe()
        os.ftruncate(self._file, size)
        self.map = _mapped(self._file, size)
        token = secrets.token_bytes(16)
        self.map[: len(token)] = token
        seen = os.stat(self._file)
        file = (seen.st_dev, seen.st_ino)
        self.address = Address(_host(), os.getpid(), self._file, self.pipe.descriptor, file, size, token)
        self._blocks: list[Block] = []
        self._lock = Lock()
        self._top = _PAGE + _TABLE

    def take(self, nbytes: int) -> Block:
        """A block of at least ``nbytes`` that nobody reads, until all ranks have finished with it; never waits for one.

        Raises:
            MemoryError: there is no more.
        """
        nbytes = max(_PAGE, 1 << (nbytes - 1).bit_length()) if nbytes <= 2**20 else -(-nbytes // 2**20) * 2**20
        with self._lock:
            block = self._free(nbytes) or self._new(nbytes)
            if not block.resident:
                self._populate(block)
            self.map[block.readers : block.readers + self._ranks] = b"\1" * self._ranks
            return block

    def _free(self, nbytes: int) -> Block | None:
        """One of just that size, else the best that is large enough."""
        best: Block | None = None
        for block in self._blocks:
            fits = block.nbytes == nbytes or block.nbytes > nbytes > _PAGE  # a few numbers shall not keep a large one
            if fits and self.map.find(b"\1", block.readers, block.readers + self._ranks) < 0:
                if block.nbytes == nbytes and block.resident:
                    return block
                if best is None or (best.resident, -best.nbytes) < (block.resident, -block.nbytes):
                    best = block
        return best

    def trim(self, keep: int = 0) -> None:
        """Give back the memory of free blocks, but for about ``keep`` bytes."""
        with self._lock:
            for block in self._blocks:
                if block.resident and self.map.find(b"\1", block.readers, block.readers + self._ranks) < 0:
                    keep -= block.nbytes
                    if keep < 0:
                        self.map.madvise(mmap.MADV_REMOVE, block.offset, block.nbytes)
                        block.resident = False
            while self._blocks and not self._blocks[-1].resident:
                self._top = self._blocks.pop().offset

    def held(self) -> list[Tensor]:
        """The blocks that take memory, as bytes."""
        resident = [block for block in self._blocks if block.resident]
        return [torch.frombuffer(self.map, dtype=torch.uint8, count=b.nbytes, offset=b.offset) for b in resident]

    def _new(self, nbytes: int) -> Block:
        block = Block(self._top, nbytes, _PAGE + len(self._blocks) * self._ranks)
        if block.offset + nbytes > self.address.size or block.readers + self._ranks > _PAGE + _TABLE:
            raise MemoryError(_exhausted(nbytes, "all of its address space is taken"))
        self._blocks.append(block)
        self._top += nbytes
        return block

    def _populate(self, block: Block) -> None:
        """Get the memory now: where there is none, touching it later would kill the process."""
        try:
            os.posix_fallocate(self._file, block.offset, block.nbytes)
        except OSError as error:
            raise MemoryError(_exhausted(block.nbytes, str(error))) from error
        block.resident = True


class Peer:
    """Another process's memory.

    Args:
        address: where it is.
        timeout: seconds for which its pipe may have no room.

    Attributes:
        map: all of it.
        pipe: how this process tells it where its own parts lie.

    Raises:
        OSError, ValueError: it can't be reached from here.
    """

    def __init__(self, address: Address, timeout: float = 60.0) -> None:
        if address.host != _host():
            raise ValueError("it is on another host")
        folder = f"/proc/{address.process}/fd"
        # In another PID namespace this may be any process, and opening some files does something: look first.
        seen = os.stat(f"{folder}/{address.memory}")
        if (seen.st_dev, seen.st_ino) != address.file:
            raise ValueError("its process has another number here")
        file = os.open(f"{folder}/{address.memory}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.map = _mapped(file, address.size)
        finally:
            os.close(file)
        if self.map[: len(address.token)] != address.token:
            raise ValueError("its memory isn't what is seen here")
        self.pipe = PeerPipe(f"{folder}/{address.pipe}", address.process, timeout)


class Pool:
    """The memory of all ranks of a process group, as one of them sees it; all of its optimizers use it.

    Args:
        own: this rank's.
        rank: its number.
        addresses: of every rank's memory, in rank order.
        timeout: seconds to wait for a peer.

    Attributes:
        own: this rank's.
        peers: the others', by rank.
        timeout: seconds to wait for a peer.

    Raises:
        OSError, ValueError: a peer's can't be reached from here.
    """

    def __init__(self, own: Memory, rank: int, addresses: Sequence[Address], timeout: float) -> None:
        self.own = own
        self.timeout = timeout
        others = {of: address for of, address in enumerate(addresses) if of != rank}
        self.peers = {of: Peer(address, timeout) for of, address in others.items()}
        for of, peer in self.peers.items():
            own.pipe.watch(of, peer.pipe.process)


def _check_room(count: int, size: int) -> None:
    """Raise ``OSError`` where so many mappings would take more than half of the address space that is left."""
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


def _exhausted(nbytes: int, reason: str) -> str:
    return (
        f"expected {nbytes:,} bytes of shared memory for a buffer, got none ({reason}): use smaller buckets or fewer "
        "ranks a host, or set LOWLEVEL_ZERO_SHARED_MEMORY=0, which needs less"
    )
