"""Control pipes between the processes of one host: small records, which the kernel keeps whole and in order.

A reader sleeps in the kernel until a record comes, and no thread has to carry it: where ranks are as many as cores, a
message through gloo's threads takes a hundred times as long. A reader also wakes when the process that it waits for
has ended.

A record tells of a part of a collective, and which blocks of the reader's memory the sender has finished with. All that
a process learns of another's memory it learns here, never by looking: whoever has read a record sees what was written
before it was sent, also on machines whose cores reorder reads and writes (ARM, POWER), since both went through the
pipe's lock in the kernel.

Nobody waits for room in a pipe, where two could wait for each other. A pipe is small where the user has many, and
others may have much to tell at once. So what finds no room is left to a thread.
"""

from __future__ import annotations

import os
import select
import struct
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock, RLock, Thread
from time import monotonic, sleep
from typing import NamedTuple, TypeAlias
from weakref import finalize

# A collective's kind and serial, the sender, offset and start; how many offsets and how many bytes follow.
_RECORD = struct.Struct("=iqiqqHH")
# Bytes, and offsets, that a record may bring along. The kernel keeps 4,096 bytes together.
INLINE, _FINISHED = 1024, 256
_MOST = 2**16  # bytes that are read at a time
_ROOM = 2**20  # of a pipe: tens of thousands of records
_DOZE, _NAP, _LATE = 0.05, 0.001, 1.0  # seconds

# The kind of a collective, and the how manyth of its kind it is: everybody counts alike.
Key: TypeAlias = tuple[int, int]


class Message(NamedTuple):
    """What a rank tells of its part of a collective.

    Attributes:
        offset: of the block that holds it, in the rank's memory.
        start: what is for the receiver starts so many bytes further.
        part: or that itself, if it is small.
    """

    offset: int
    start: int
    part: bytes


class ControlPipe:
    """This process's own, which its peers write to, and theirs.

    Args:
        rank: this process's.
        readers: by offset of each block of its memory, the ranks that haven't finished with it.

    Attributes:
        descriptor: of its own pipe.
        peers: the others', by rank.
    """

    def __init__(self, rank: int, readers: Mapping[int, set[int]]) -> None:
        import fcntl  # which Linux has, as it has what is asked of it

        self.descriptor, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        close_with(self, self.descriptor, writing)  # the other end stays open, lest the pipe ends with its writers
        with suppress(OSError):  # more than this user may have
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _ROOM)
        self.peers: dict[int, PeerPipe] = {}
        self._rank = rank
        self._readers = readers
        self._rest = b""
        self._serials: defaultdict[int, int] = defaultdict(int)
        self._received: dict[Key, dict[int, Message]] = {}
        self._lock = Lock()
        self._sleeping = Lock()  # a poll object serves one thread at a time
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)
        self._ended: set[int] = set()

    def connect(self, rank: int, peer: PeerPipe) -> None:
        """Messages of ``rank`` belong to each collective; tell who waits when its process has ended."""
        self.peers[rank] = peer
        self._poll.register(peer.process, select.POLLIN)

    def tell(self, kind: int, offset: int = 0, starts: Sequence[int] = (), part: bytes = b"") -> Key:
        """Tell all peers of the next collective of a kind, and which of their blocks are finished with.

        What a pipe has no room for goes later; messages may overtake each other.

        Args:
            kind: 0: there is no collective.
            offset, part: see ``Message``.
            starts: by rank; empty: all 0.
        """
        serial = self._serials[kind]
        self._serials[kind] = serial + 1
        for rank, peer in self.peers.items():
            finished: list[int] = []
            with suppress(IndexError):  # one by one: another thread may be telling, too
                while len(finished) < _FINISHED:
                    finished.append(peer.finished.popleft())
            start = starts[rank] if starts else 0
            record = _RECORD.pack(kind, serial, self._rank, offset, start, len(finished), len(part))
            record += struct.pack(f"={len(finished)}q", *finished) + part
            try:
                os.write(peer.descriptor, record)
            except BlockingIOError:
                peer.write_later(record)
        return kind, serial

    def collect(self, wait: bool = True) -> None:
        """Take in what has come; if another thread is at it, ``wait`` for that to end."""
        if not self._lock.acquire(blocking=wait):
            return
        try:
            while True:
                data = os.read(self.descriptor, _MOST)
                self._rest = self._taken_in(self._rest + data)
                if len(data) < _MOST:
                    return
        except BlockingIOError:
            return
        finally:
            self._lock.release()

    def _taken_in(self, data: bytes) -> bytes:
        """Take in all records in ``data``; what is left of it is the start of one more."""
        at = 0
        while at + _RECORD.size <= len(data):
            kind, serial, sender, offset, start, finished, length = _RECORD.unpack_from(data, at)
            part = at + _RECORD.size + 8 * finished
            if part + length > len(data):
                break
            for block in struct.unpack_from(f"={finished}q", data, at + _RECORD.size):
                self._readers[block].discard(sender)
            if kind:
                message = Message(offset, start, data[part : part + length])
                self._received.setdefault((kind, serial), {})[sender] = message
            at = part + length
        return data[at:]

    def has(self, key: Key) -> bool:
        """Whether all ranks' messages have come; looks into the pipe only if it has to."""
        if len(self._received.get(key, ())) < len(self.peers):
            self.collect()
        return len(self._received.get(key, ())) == len(self.peers)

    def receive(self, key: Key, timeout: float) -> dict[int, Message]:
        """The messages of a collective by rank, once, when all have come.

        Raises:
            RuntimeError: a sender has ended, or ``timeout`` seconds are over.
        """
        if len(self._received.get(key, ())) < len(self.peers):
            self._wait(key, monotonic() + timeout, timeout)
        return self._received.pop(key)

    def _wait(self, key: Key, deadline: float, timeout: float) -> None:
        while True:
            self._sleep(deadline)
            ended = set(self._ended)  # what they have sent has come by now
            self.collect()
            missing = self.peers.keys() - self._received.get(key, {}).keys()
            if not missing:
                return
            if ended & missing:
                raise RuntimeError(
                    f"expected gradients or parameters of rank {min(ended & missing)}, whose process has ended"
                )
            if monotonic() > deadline:
                raise RuntimeError(f"expected gradients or parameters of ranks {sorted(missing)} within {timeout:g} s")

    def _sleep(self, deadline: float) -> None:
        """Until something has come, or not for long: another thread may take in what this one waits for."""
        if not self._sleeping.acquire(blocking=False):
            sleep(_NAP)
            return
        try:
            ready = dict(self._poll.poll(max(0.0, min(_DOZE, deadline - monotonic())) * 1000))
            for rank, peer in self.peers.items():
                if peer.process in ready:
                    self._ended.add(rank)
                    self._poll.unregister(peer.process)  # it would go on being ready
        finally:
            self._sleeping.release()


class PeerPipe:
    """Another process's.

    Args:
        path: of its pipe.
        process: its number.
        timeout: seconds for which there may be no room.

    Attributes:
        descriptor: of the pipe.
        process: a descriptor that can be read from when it has ended.
        finished: offsets of its blocks that this process has finished with, and not told it.
    """

    def __init__(self, path: str, process: int, timeout: float) -> None:
        # For reading, too: so writing never fails for want of a reader, when the other process has left.
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        close_with(self, self.descriptor)
        self.process = os.pidfd_open(process)
        close_with(self, self.process)
        self.finished: deque[int] = deque()
        self._timeout = timeout
        self._unsent: deque[bytes] = deque()
        self._lock = RLock()  # a finaliser may tell of blocks, whatever it interrupts

    def write_later(self, record: bytes) -> None:
        """Have a thread write what there is no room for now."""
        with self._lock:
            self._unsent.append(record)
            if len(self._unsent) == 1:  # else there is a thread
                Thread(target=self._write_unsent, name="lowlevel_zero control pipe", daemon=True).start()

    def _write_unsent(self) -> None:
        """Write what is left, for as long as the process lives and reads."""
        deadline, poll = monotonic() + self._timeout, select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        poll.register(self.process, select.POLLIN)
        while monotonic() < deadline:
            if any(descriptor == self.process for descriptor, _ in poll.poll(_LATE * 1000)):
                return
            with self._lock, suppress(BlockingIOError):
                while self._unsent:
                    os.write(self.descriptor, self._unsent[0])
                    self._unsent.popleft()
                    deadline = monotonic() + self._timeout
                return


def close_with(owner: object, *descriptors: int) -> None:
    """Close them when ``owner`` is gone; at the process's end that is done anyway, after all who may use them."""
    finalize(owner, _close, descriptors).atexit = False


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
