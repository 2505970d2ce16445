"""Memory and pipes that simulated ranks share, under the package's own pool and control pipes."""

from __future__ import annotations

import mmap
from collections import deque

from lowlevel_zero.communication.memory_file import MemoryAddress, OwnMemory
from lowlevel_zero.communication.pipes import OthersPipe, OwnPipe
from lowlevel_zero.communication.processes import Process

from .network import Network

_BYTES = 2**26  # of a rank's memory, of which it takes what it touches
_GARBAGE = b"\xff"  # NaN, as a float of any size
_PATIENCE = 60.0  # seconds between looks at who has ended, where somebody has


class SimulatedMemory(OwnMemory):
    """One rank's, mapped by all.

    Args:
        network: all ranks'.
        process: the rank.

    Attributes:
        resident: what takes memory, as offset and bytes.
    """

    def __init__(self, network: Network, process: Process) -> None:
        self.map = mmap.mmap(-1, _BYTES)
        self.rank = process.began
        self.resident: dict[int, int] = {}
        descriptor = len(network.memories)
        network.memories.append(self)
        self.address = MemoryAddress(process, descriptor, _BYTES, b"")

    def populate(self, offset: int, nbytes: int) -> None:
        """Garbage until it is written."""
        self.map[offset : offset + nbytes] = _GARBAGE * nbytes
        self.resident[offset] = nbytes

    def give_back(self, offset: int, nbytes: int) -> None:
        """Who still reads it finds garbage."""
        self.map[offset : offset + nbytes] = _GARBAGE * nbytes
        self.resident.pop(offset, None)


class SimulatedPipe(OwnPipe):
    """One rank's, in which what each peer writes keeps its order; the seed says when it comes."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.descriptor = len(network.pipes)
        network.pipes.append(self)
        self.coming: dict[int, deque[bytes]] = {}
        self._due = False
        self._taken = 0  # records

    def read(self, most: int) -> bytes:  # type: ignore[override]
        """Some of what is on its way, of each peer's what is older first; something, after a wait for it.

        All of it where no rank runs: who looks around in the end draws nothing.
        """
        scheduler = self._network.scheduler
        if not self._due:
            scheduler.pause()
        come: list[bytes] = []
        for records in self.coming.values():
            some = len(records) if scheduler.running is None else int(scheduler.random() * (len(records) + 1))
            come += [records.popleft() for _ in range(some)]
        if self._due and not come:
            come.append(next(records for records in self.coming.values() if records).popleft())
        self._due = False
        self._taken += len(come)
        return b"".join(come)

    def wait(self, milliseconds: float) -> bool:
        """Until there is something on its way, or another actor has taken it in.

        The real one ends after some milliseconds. This one does so alone where a rank has ended.
        """
        dead, taken = self._network.dead, self._taken
        lost = len(dead)

        def come() -> bool:
            return any(self.coming.values()) or len(dead) > lost or self._taken > taken

        self._network.scheduler.wait(come, _PATIENCE if dead else None)
        self._due = any(self.coming.values())
        return self._due


class SimulatedOthersPipe(OthersPipe):
    """The pipe of another rank; it has room for all.

    Args:
        network: all ranks'.
        descriptor: of the pipe.
        rank: who writes.
    """

    def __init__(self, network: Network, descriptor: int, rank: int) -> None:
        self._network, self._rank = network, rank
        self._coming = network.pipes[descriptor].coming

    def write(self, record: bytes) -> None:  # type: ignore[override]
        """Put a record on its way."""
        if self._rank not in self._network.dead:
            self._coming.setdefault(self._rank, deque()).append(record)
            self._network.log.append(record)
            self._network.scheduler.may_pause()
