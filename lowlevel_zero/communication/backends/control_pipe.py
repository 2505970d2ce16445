"""Control pipes between the processes of one host: records of one size, which the kernel keeps whole and in order.

A reader sleeps in the kernel until a record comes, and no thread has to carry it: where ranks are as many as cores, a
message through gloo's threads takes a hundred times as long.

A record tells where a rank's part of a collective lies, and which blocks of the reader's memory the sender has finished
with. All that a process learns of another's memory it learns here, never by looking: whoever has read a record sees
what was written before it was sent, also on machines whose cores reorder reads and writes (ARM, POWER), since both went
through the pipe's lock in the kernel.

Nobody waits for room in a pipe, where two could wait for each other. A pipe is small where the user has many, and
others may have much to tell at once. So what finds no room is left to a thread.
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

# A collective's kind, the sender, the serial, offset, start and bytes; and offsets of finished blocks, 0 where there
# are fewer.
_FINISHED = 12
_RECORD = struct.Struct(f"=iiqqqq{_FINISHED}q")
_MOST = 512 * _RECORD.size  # bytes that are read at a time
_DOZE, _LATE = 10, 1000  # milliseconds

# The kind of a collective, and the how manyth of its kind it is: everybody counts alike.
Key: TypeAlias = tuple[int, int]


class BlockPart(NamedTuple):
    """Where a rank's part of a collective lies in its memory: in a block, from ``start`` bytes on.

    Attributes:
        nbytes: of all that the rank has for the others.
    """

    offset: int
    start: int
    nbytes: int


class ControlPipe:
    """This process's own, which its peers write to, and theirs.

    Args:
        rank: this process's.
        readers: by offset of each block of its memory, the ranks that haven't finished with it.
        threads: those that write what finds no room.

    Attributes:
        descriptor: of its own pipe.
        peers: the others', by rank.
    """

    def __init__(self, rank: int, readers: Mapping[int, set[int]], threads: Threads) -> None:
        self._threads = threads
        self._own = runtime().own_pipe()
        self.descriptor = self._own.descriptor
        self.peers: dict[int, PeerPipe] = {}
        self._rank = rank
        self._readers = readers
        self._serials: defaultdict[int, count[int]] = defaultdict(count)
        self._received: dict[Key, dict[int, BlockPart]] = {}
        self._lock, self._sleeping = runtime().lock(), runtime().lock()

    def tell(self, kind: int, offset: int = 0, starts: Sequence[int] = (), nbytes: int = 0) -> Key:
        """Tell all peers of the next collective of a kind, and which of their blocks are finished with.

        What a pipe has no room for goes later; records may overtake each other.

        Args:
            kind: 0: there is no collective.
            offset: of the block that holds this rank's part.
            starts: by rank, from which byte on it is for that one; empty: all is for all.
            nbytes: of what this rank has for all.
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
                peer.write_late(record)
        return kind, serial

    def collect(self) -> None:
        """Take in what has come."""
        with self._lock, suppress(BlockingIOError):
            while records := self._own.read(_MOST):
                for kind, sender, serial, offset, start, nbytes, *finished in _RECORD.iter_unpack(records):
                    for block in filter(None, finished):
                        self._readers[block].discard(sender)
                    if kind:
                        self._received.setdefault((kind, serial), {})[sender] = BlockPart(offset, start, nbytes)
                if len(records) < _MOST:
                    return

    def has(self, key: Key) -> bool:
        """Whether all ranks have told of a collective; looks into the pipe only if it has to."""
        if len(self._received.get(key, ())) < len(self.peers):
            self.collect()
        return len(self._received.get(key, ())) == len(self.peers)

    def receive(self, key: Key, timeout: float) -> dict[int, BlockPart]:
        """Where the parts of a collective lie, by rank, once, when all have told.

        Raises:
            RuntimeError: a sender has ended, ``timeout`` seconds are over, or the process group ends.
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
                raise RuntimeError(
                    f"expected gradients or parameters of rank {min(missing.intersection(ended))}, whose process has "
                    "ended"
                )
            if missing:
                now = runtime().now()
                deadline = now + timeout if deadline is None else deadline
                if self._threads.broken_off or now > deadline:
                    ranks = f"ranks {sorted(missing)}"
                    raise RuntimeError(f"expected gradients or parameters of {ranks} within {timeout:g} s")
        return self._received.pop(key)


class PeerPipe:
    """Another process's.

    Args:
        process: the other one.
        descriptor: of the pipe, in that process.
        timeout: seconds for which there may be no room.
        threads: the one that waits for room is one of them.

    Attributes:
        process: as given.
        pipe: the one that this process writes to.
        finished: offsets of its blocks that this process has finished with, and not told it.
    """

    def __init__(self, process: Process, descriptor: int, timeout: float, threads: Threads) -> None:
        self.pipe = runtime().others_pipe(process, descriptor)
        self.process = process
        self.finished: deque[int] = deque()
        self._timeout = timeout
        self._threads = threads
        self._worker = runtime().worker("lowlevel_zero control pipe", threads)

    def write_late(self, record: bytes) -> None:
        """Have a thread write a record when there is room."""
        self._worker.submit(partial(self._write_late, record))

    def _write_late(self, record: bytes) -> None:
        """Write a record, for as long as the process lives and reads."""
        deadline = runtime().now() + self._timeout
        while True:
            with suppress(BlockingIOError):
                self.pipe.write(record)
                return
            if self._threads.broken_off or runtime().now() > deadline or self.process.has_ended():
                return
            self.pipe.wait_for_room(_LATE)
