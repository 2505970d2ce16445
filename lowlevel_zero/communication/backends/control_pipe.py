"""Control pipes between the processes of one host: small records, which the kernel keeps whole and in order.

A reader sleeps in the kernel until a record comes, and no thread has to carry it: where ranks are as many as cores, a
message through gloo's threads takes a hundred times as long. A reader also wakes when the process that it waits for
has ended.

Nobody waits for room in a pipe, where two could wait for each other. A pipe is small where the user has many, and
others may have much to tell at once. So what finds no room is left to a thread.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
from collections import deque
from contextlib import suppress
from threading import Lock, RLock, Thread
from time import monotonic, sleep
from typing import NamedTuple, TypeAlias
from weakref import finalize

_RECORD = struct.Struct("=iqiqqH")  # a collective's kind and serial, the sender, offset and readers, bytes that follow
# Bytes that a record may bring along. The kernel keeps 4,096 together.
INLINE = 1024
_MOST = 2**16  # bytes that are read at a time
_ROOM = 2**20  # of a pipe: tens of thousands of records
_DOZE, _NAP, _LATE = 0.05, 0.001, 1.0  # seconds

# The kind of a collective, and the how manyth of its kind it is: everybody counts alike.
Key: TypeAlias = tuple[int, int]


class Message(NamedTuple):
    """What a rank tells of its part of a collective.

    Attributes:
        offset: where it lies in the rank's memory.
        readers: where that says who has yet to read it.
        part: or the part itself, if it is small.
    """

    offset: int
    readers: int
    part: bytes


class ControlPipe:
    """This process's own, which others write to.

    Attributes:
        descriptor: of the pipe.
    """

    def __init__(self) -> None:
        self.descriptor, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        close_with(self, self.descriptor, writing)  # the other end stays open, lest the pipe ends with its writers
        with suppress(OSError):  # more than this user may have
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _ROOM)
        self._rest = b""
        self._received: dict[Key, dict[int, Message]] = {}
        self._lock = RLock()
        self._sleeping = Lock()  # a poll object serves one thread at a time
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)
        self._process_of: dict[int, int] = {}
        self._rank_of: dict[int, int] = {}
        self._ended: set[int] = set()

    def watch(self, rank: int, process: int) -> None:
        """Messages of ``rank`` belong to each collective; tell who waits when its process has ended."""
        self._process_of[rank] = process
        self._rank_of[process] = rank
        self._poll.register(process, select.POLLIN)

    def collect(self) -> None:
        """Take in what has come."""
        with self._lock, suppress(BlockingIOError):
            more = True
            while more:
                data = os.read(self.descriptor, _MOST)
                more, data, at = len(data) == _MOST, self._rest + data, 0
                while at + _RECORD.size <= len(data):
                    kind, serial, sender, offset, readers, length = _RECORD.unpack_from(data, at)
                    end = at + _RECORD.size + length
                    if end > len(data):  # the rest of it is still in the pipe
                        break
                    message = Message(offset, readers, data[at + _RECORD.size : end])
                    self._received.setdefault((kind, serial), {})[sender] = message
                    at = end
                self._rest = data[at:]

    def has(self, key: Key) -> bool:
        """Whether all ranks' messages have come; looks into the pipe only if it has to."""
        if len(self._received.get(key, ())) < len(self._process_of):
            self.collect()
        return len(self._received.get(key, ())) == len(self._process_of)

    def receive(self, key: Key, timeout: float) -> dict[int, Message]:
        """The messages of a collective by rank, once, when all have come.

        Raises:
            RuntimeError: a sender has ended, or ``timeout`` seconds are over.
        """
        if len(self._received.get(key, ())) < len(self._process_of):
            self._wait(key, monotonic() + timeout, timeout)
        return self._received.pop(key)

    def _wait(self, key: Key, deadline: float, timeout: float) -> None:
        while True:
            ended = set(self._ended)  # what they have sent has come by now
            self.collect()
            missing = self._process_of.keys() - self._received.get(key, {}).keys()
            if not missing:
                return
            if ended & missing:
                raise RuntimeError(
                    f"expected gradients or parameters of rank {min(ended & missing)}, whose process has ended"
                )
            if monotonic() > deadline:
                raise RuntimeError(f"expected gradients or parameters of ranks {sorted(missing)} within {timeout:g} s")
            self._sleep(deadline)

    def _sleep(self, deadline: float) -> None:
        """Until something happens, or not for long: another thread may take in what this one waits for."""
        if not self._sleeping.acquire(blocking=False):
            sleep(_NAP)
            return
        try:
            events = self._poll.poll(max(0.0, min(_DOZE, deadline - monotonic())) * 1000)
            for descriptor, _ in events:
                if descriptor in self._rank_of:
                    self._ended.add(self._rank_of[descriptor])
                    self._poll.unregister(descriptor)  # it would go on being ready
        finally:
            self._sleeping.release()


class PeerPipe:
    """Another process's.

    Args:
        path: of its pipe.
        process: its number.
        timeout: seconds for which there may be no room.

    Attributes:
        process: a descriptor that can be read from when it has ended.
    """

    def __init__(self, path: str, process: int, timeout: float) -> None:
        # For reading, too: so writing never fails for want of a reader, when the other process has left.
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        close_with(self, self._pipe)
        self.process = os.pidfd_open(process)
        close_with(self, self.process)
        self._timeout = timeout
        self._unsent: deque[bytes] = deque()
        self._lock = Lock()

    def send(self, key: Key, sender: int, offset: int = 0, readers: int = 0, part: bytes = b"") -> None:
        """Send a message, if there is no room for it now then later; messages may overtake each other."""
        record = _RECORD.pack(*key, sender, offset, readers, len(part)) + part
        try:
            os.write(self._pipe, record)
        except BlockingIOError:
            self._send_later(record)

    def _send_later(self, record: bytes) -> None:
        with self._lock:
            self._unsent.append(record)
            if len(self._unsent) == 1:  # else there is a thread
                Thread(target=self._send_unsent, name="lowlevel_zero control pipe", daemon=True).start()

    def _send_unsent(self) -> None:
        """Send what is left, for as long as the process lives and reads."""
        deadline, poll = monotonic() + self._timeout, select.poll()
        poll.register(self._pipe, select.POLLOUT)
        poll.register(self.process, select.POLLIN)
        while monotonic() < deadline:
            if any(descriptor == self.process for descriptor, _ in poll.poll(_LATE * 1000)):
                return
            with self._lock, suppress(BlockingIOError):
                while self._unsent:
                    os.write(self._pipe, self._unsent[0])
                    self._unsent.popleft()
                    deadline = monotonic() + self._timeout
                return


def close_with(owner: object, *descriptors: int) -> None:
    """Close them when ``owner`` is gone; at the process's end that is done anyway, after all who may use them."""
    finalize(owner, _close, descriptors).atexit = False


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
