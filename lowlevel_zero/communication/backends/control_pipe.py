"""Control pipes between the processes of one host: records of one size, which the kernel keeps whole and in order.

A reader sleeps in the kernel until a record comes, and no thread has to carry it: where ranks are as many as cores, a
message through gloo's threads takes a hundred times as long.

A record says where a rank's part of a collective lies, and which blocks of the reader's memory the sender has finished
with. A reader of a record sees all that was written before the record was sent, also on cores that reorder reads and
writes (ARM, POWER), since both went through the pipe's lock in the kernel.

No rank waits for room in a pipe, where two could wait for each other. A pipe is small where the user has many, and its
reader may be late. A record that finds no room is left to a thread.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NamedTuple, TypeAlias

from ..processes import Process
from ..runtime import Threads, runtime
from ..work import TransportError

# A collective's kind, the sender, the serial, offset, start and bytes; and offsets of finished blocks, 0 where there
# are fewer.
_FINISHED = 12
_RECORD = struct.Struct(f"=iiqqqq{_FINISHED}q")
_MOST = 512 * _RECORD.size  # bytes that are read at a time
_DOZE, _LATE = 10, 1000  # milliseconds

# The kind of a collective, and its number among those of the kind: all ranks count alike.
Key: TypeAlias = tuple[int, int]


class BlockPart(NamedTuple):
    """The place of a rank's part of a collective in that rank's memory.

    Attributes:
        nbytes: the bytes of all parts that the rank sends.
    """

    offset: int
    start: int
    nbytes: int


class ControlPipe:
    """This process's pipe, and the peers' pipes: they carry records of where parts of collectives lie.

    Args:
        rank: this process's rank among ``names``.
        names: the global ranks, for messages.
        readers: the ranks that haven't finished with a block of this process's memory, by the block's offset.

    Attributes:
        descriptor: the file descriptor of this process's pipe.
        peers: the other ranks' pipes, by rank.
    """

    def __init__(self, rank: int, names: Sequence[int], readers: Mapping[int, set[int]], threads: Threads) -> None:
        self._threads = threads
        self._own = runtime().own_pipe()
        self.descriptor = self._own.descriptor
        self.peers: dict[int, PeerPipe] = {}
        self._rank, self._names = rank, names
        self._readers = readers
        self._serials: defaultdict[int, count[int]] = defaultdict(count)
        self._received: dict[Key, dict[int, BlockPart]] = {}
        self._read: deque[tuple[int, ...]] = deque()
        # Garbage collection may find an optimizer in here, whose finaliser receives what is under way of it.
        self._lock, self._sleeping = runtime().nested_lock(), runtime().nested_lock()

    def tell(self, kind: int, offset: int = 0, starts: Sequence[int] = (), nbytes: int = 0) -> Key:
        """Send each peer a record of where this rank's part lies and which blocks it has read; return the record's key.

        If a pipe is full, a thread sends the record later: records may overtake each other.

        Args:
            kind: the kind of the collective; 0: there is none.
            offset: the offset of the block that holds this rank's part.
            starts: the byte at which each rank's part starts; empty: all ranks get the whole block.
            nbytes: the bytes of all parts.
        """
        serial = next(self._serials[kind])
        for rank, peer in self.peers.items():
            finished = [0] * _FINISHED
            with suppress(IndexError):  # one by one: another thread may be telling, too
                for at in range(_FINISHED):
                    finished[at] = peer.finished.popleft()
            start = starts[rank] if starts else 0
            record = _RECORD.pack(kind, self._rank, serial, offset, start, nbytes, *finished)
            try:
                peer.pipe.write(record)
            except BlockingIOError:
                peer.worker.submit(partial(peer.write_late, record))
        return kind, serial

    def collect(self) -> None:
        """Read all records that have come, without waiting."""
        is_empty = False
        with self._lock, suppress(BlockingIOError):
            while True:
                with suppress(IndexError):  # a finaliser within this loop takes in the rest
                    while True:
                        self._take_in(*self._read.popleft())
                if is_empty:
                    return
                records = self._own.read(_MOST)
                is_empty = len(records) < _MOST
                self._read.extend(_RECORD.iter_unpack(records))

    def _take_in(
        self, kind: int, sender: int, serial: int, offset: int, start: int, nbytes: int, *finished: int
    ) -> None:
        """Note what one record tells: where a part lies, and which blocks its sender has finished with."""
        for block in filter(None, finished):
            self._readers[block].discard(sender)
        if kind:
            self._received.setdefault((kind, serial), {})[sender] = BlockPart(offset, start, nbytes)

    def has(self, key: Key) -> bool:
        """Return whether the records of all ranks for a collective have come."""
        if len(self._received.get(key, ())) < len(self.peers):
            self.collect()
        return len(self._received.get(key, ())) == len(self.peers)

    def receive(self, key: Key, timeout: float) -> dict[int, BlockPart]:
        """Wait for all ranks' records of a collective; return where their parts lie, once, by rank.

        Raises:
            TransportError: a sender has ended, ``timeout`` seconds are over, or the process group ends.
        """
        deadline: float | None = None  # from the first look that was in vain
        while len(self._received.get(key, ())) < len(self.peers):
            with self._sleeping:  # one thread at a time: it takes in what others wait for, too
                missing = self.peers.keys() - self._received.get(key, {}).keys()
                is_quiet = bool(missing) and not self._own.wait(_DOZE)
                ended = [rank for rank in missing if self.peers[rank].process.has_ended()] if is_quiet else []
                self.collect()  # also what who has ended has left
            missing -= self._received.get(key, {}).keys()
            if missing.intersection(ended):
                raise TransportError(
                    f"expected the part of rank {self._names[min(missing.intersection(ended))]}, whose "
                    "process has ended"
                )
            if missing:
                now = runtime().now()
                deadline = now + timeout if deadline is None else deadline
                if self._threads.broken_off or now > deadline:
                    ranks = f"ranks {[self._names[place] for place in sorted(missing)]}"
                    raise TransportError(f"expected the part of {ranks} within {timeout:g} s")
        return self._received.pop(key)


class PeerPipe:
    """The pipe that another process reads under ``descriptor``, which this process writes to.

    Attributes:
        worker: waits for room, up to ``timeout`` seconds.
        finished: offsets of its blocks that this process has finished with, to be sent in the next record.
    """

    def __init__(self, process: Process, descriptor: int, timeout: float, threads: Threads) -> None:
        self.pipe = runtime().others_pipe(process, descriptor)
        self.process = process
        self.finished: deque[int] = deque()
        self._timeout = timeout
        self._threads = threads
        self.worker = runtime().worker("lowlevel_zero control pipe", threads)

    def write_late(self, record: bytes) -> None:
        """Wait for room and write a record; give up if the reader's process ends or time is over. A thread calls it."""
        deadline = runtime().now() + self._timeout
        while True:
            with suppress(BlockingIOError):
                self.pipe.write(record)
                return
            if self._threads.broken_off or runtime().now() > deadline or self.process.has_ended():
                return
            self.pipe.wait_for_room(_LATE)
