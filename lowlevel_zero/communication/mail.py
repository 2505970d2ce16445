"""Mail between the processes of one host: small records through pipes, which the kernel keeps whole and in order.

A reader sleeps in the kernel until mail comes, and no thread has to carry it: where ranks are as many as cores, a
message through gloo's threads takes a hundred times as long. A reader also wakes when the process that it waits for
has ended.

Nobody waits for room in a pipe, where two could wait for each other, or for one that waits elsewhere. A pipe is small
where the user has many, and others may have much to tell at once. So what finds no room is left to go with later
letters, if nobody waits for it, or to a thread.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, RLock
from time import monotonic, sleep
from typing import NamedTuple
from weakref import finalize

_RECORD = struct.Struct("=iiqqi")
_MOST = 1024 * _RECORD.size  # bytes that are read at a time
_READ = 0  # the kind of letters that say "I have read that slot"
_ROOM = 2**20  # of a pipe: tens of thousands of letters
_DOZE, _NAP, _LATE = 0.05, 0.001, 1.0  # seconds


class Subject(NamedTuple):
    """What a header is about: the wires of one kind are counted, by everybody alike."""

    kind: int  # positive
    sender: int
    serial: int


class Header(NamedTuple):
    """Where a wire lies in the sender's memory."""

    offset: int
    slot: int


class Mailbox:
    """This process's own.

    Attributes:
        descriptor: the pipe that others write to.
    """

    def __init__(self) -> None:
        self.descriptor, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        close_with(self, self.descriptor, writing)  # the other end stays open, lest the pipe ends with its writers
        with suppress(OSError):  # more than this user may have
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _ROOM)
        self._read: list[int] = []
        self._headers: dict[Subject, Header] = {}
        self._lock = RLock()
        self._sleeping = Lock()  # a poll object serves one thread at a time
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)
        self._rank_of: dict[int, int] = {}
        self._ended: set[int] = set()

    def watch(self, rank: int, others: OthersMailbox) -> None:
        """Tell who waits for ``rank`` when its process has ended."""
        self._rank_of[others.process] = rank
        self._poll.register(others.process, select.POLLIN)

    def collect(self) -> None:
        """Take in what has come."""
        with self._lock, suppress(BlockingIOError):
            more = True
            while more:
                records = os.read(self.descriptor, _MOST)
                more = len(records) == _MOST
                for kind, sender, serial, offset, slot in _RECORD.iter_unpack(records):
                    if kind == _READ:
                        self._read.append(slot)
                    else:
                        self._headers[Subject(kind, sender, serial)] = Header(offset, slot)

    def finished(self) -> list[int]:
        """Numbers of this process's slots that others have finished with, once for each reader, in their order."""
        with self._lock:
            self.collect()
            finished, self._read = self._read, []
            return finished

    def has(self, subjects: Sequence[Subject]) -> bool:
        """Whether all of these headers have come; looks into the pipe only if it has to."""
        if not all(subject in self._headers for subject in subjects):
            self.collect()
        return all(subject in self._headers for subject in subjects)

    def wait(self, subjects: Sequence[Subject], timeout: float) -> list[Header]:
        """These headers, each once, when all have come.

        Raises:
            RuntimeError: a sender has ended, or ``timeout`` seconds are over.
        """
        deadline = monotonic() + timeout
        while True:
            with self._lock:
                if self.has(subjects):
                    return [self._headers.pop(subject) for subject in subjects]
                missing = sorted({subject.sender for subject in subjects if subject not in self._headers})
                ended = self._ended.intersection(missing)
            if ended:
                raise RuntimeError(f"expected gradients or parameters of rank {min(ended)}, whose process has ended")
            if monotonic() > deadline:
                raise RuntimeError(f"expected gradients or parameters of ranks {missing} within {timeout:g} s")
            self._sleep(deadline)

    def _sleep(self, deadline: float) -> None:
        """Until something happens, or not for long: another thread may take in the mail that this one waits for."""
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


class OthersMailbox:
    """Another process's.

    Args:
        path: of its pipe.
        process: its number.

    Attributes:
        process: a descriptor that can be read from when it has ended.
    """

    def __init__(self, path: str, process: int) -> None:
        # For reading, too: so writing never fails for want of a reader, when the other process has left.
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        close_with(self, self._pipe)
        self.process = os.pidfd_open(process)
        close_with(self, self.process)
        self._left: deque[bytes] = deque()

    def tell(self, about: Subject, header: Header) -> bool:
        """Send a header that is waited for; whether there was room for it: if not, ``tell_late`` is to."""
        return self._has_taken(_RECORD.pack(*about, *header))

    def tell_late(self, about: Subject, header: Header, timeout: float) -> None:
        """Send it as soon as there is room, for as long as the process lives, but not for more than so many seconds."""
        deadline, poll = monotonic() + timeout, select.poll()
        poll.register(self._pipe, select.POLLOUT)
        poll.register(self.process, select.POLLIN)
        while not self.tell(about, header) and monotonic() < deadline:
            if any(descriptor == self.process for descriptor, _ in poll.poll(_LATE * 1000)):
                return

    def tell_read(self, slot: int) -> None:
        """Say that this process has finished with a slot of the other's, if not now then later."""
        self._tell_some_time(_RECORD.pack(_READ, 0, 0, 0, slot))

    def tell_what_is_left(self) -> None:
        """Send what there is room for by now; in any order, from any thread."""
        with suppress(IndexError):  # another thread has just sent the last
            while self._left and self._tell_some_time(self._left.popleft()):
                pass

    def _tell_some_time(self, record: bytes) -> bool:
        """Send it, if not now then later; whether it was now."""
        taken = self._has_taken(record)
        if not taken:
            self._left.append(record)
        return taken

    def _has_taken(self, record: bytes) -> bool:
        """Whether there was room for it."""
        with suppress(BlockingIOError):
            os.write(self._pipe, record)
            return True
        return False


def close_with(owner: object, *descriptors: int) -> None:
    """Close them when ``owner`` is gone; at the process's end that is done anyway, after all who may use them."""
    finalize(owner, _close, descriptors).atexit = False


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
