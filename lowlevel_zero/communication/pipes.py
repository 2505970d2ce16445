"""Non-blocking pipes between the processes of one host."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from weakref import finalize

from .processes import Process

_ROOM = 2**20  # bytes of a pipe


class OwnPipe:
    """The non-blocking pipe that this process reads, and its peers write to.

    Attributes:
        descriptor: the file descriptor by which its peers find it.
        read: reads at most a number of bytes; raises ``BlockingIOError`` where the pipe is empty.
    """

    def __init__(self) -> None:
        import fcntl  # imported here, since only Linux has it

        self.descriptor, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        close_with(self, self.descriptor, writing)  # the other end stays open, lest the pipe ends with its writers
        with suppress(OSError):  # the size is more than this user may set
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _ROOM)
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)
        self.read: Callable[[int], bytes] = partial(os.read, self.descriptor)

    def wait(self, milliseconds: float) -> bool:
        """Wait until there is something to read; return whether there is within ``milliseconds``."""
        return bool(self._poll.poll(milliseconds))


class OthersPipe:
    """The non-blocking pipe that another process reads under its ``descriptor``, and this process writes to.

    Attributes:
        write: writes a whole record; raises ``BlockingIOError``, without writing any of it, where there is no room.
    """

    def __init__(self, process: Process, descriptor: int) -> None:
        # For reading, too: so writing never fails for want of a reader, when the other process has left.
        path = f"/proc/{process.number}/fd/{descriptor}"
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        close_with(self, self.descriptor)
        self.write: Callable[[bytes], object] = partial(os.write, self.descriptor)

    def wait_for_room(self, milliseconds: float) -> None:
        """Wait up to ``milliseconds`` until the pipe may have room."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        poll.poll(milliseconds)


def close_with(owner: object, *descriptors: int) -> None:
    """Close file ``descriptors`` when ``owner`` is garbage collected."""
    for descriptor in descriptors:
        finalize(owner, os.close, descriptor).atexit = False
