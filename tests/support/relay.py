"""What carries packets between two ends of a link that takes long or loses some; many kernels have no ``netem``.

Each end is a TAP device. TCP's packets are handed on in bundles of up to 64 KiB, as veth does, so that a link of
1 Gbit/s can be carried; where some are to be lost, one by one.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from contextlib import suppress
from fcntl import ioctl
from random import Random
from select import select
from threading import Thread
from time import monotonic

_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD
_TAP, _NO_FACTS, _HEADER = 0x2, 0x1000, 0x4000  # frames; without flags of their own; with what says how to cut them
_SEGMENTS = 0x1 | 0x2  # TUN_F_CSUM, TUN_F_TSO4: whole ones are taken
_LARGEST = 70_000  # bytes of a frame


def relay(host: str, port: str, delay: float, loss: float) -> None:
    """Make two devices in this network namespace; what ``host`` sends comes out of ``port``, and the other way round.

    Args:
        host: whose packets take longer and get lost.
        port: whose packets are handed on at once.
        delay: seconds.
        loss: share of packets.
    """
    ends = [_device(name, whole=not loss) for name in (host, port)]
    Thread(target=_carry, args=(*ends, delay, loss), daemon=True).start()


def _device(name: str, whole: bool) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    ioctl(device, _SET_INTERFACE, struct.pack("16sH", name.encode(), _TAP | _NO_FACTS | _HEADER))
    if whole:
        ioctl(device, _SET_OFFLOAD, _SEGMENTS)
    return device


def _carry(host: int, port: int, delay: float, loss: float) -> None:
    draw, waiting = Random(0), deque[tuple[float, bytes]]()
    try:
        while True:
            pause = max(0.0, waiting[0][0] - monotonic()) if waiting else None
            for end in select([host, port], [], [], pause)[0]:
                frame = os.read(end, _LARGEST)
                if end == port:
                    _hand_on(host, frame)
                elif draw.random() >= loss:
                    waiting.append((monotonic() + delay, frame))
            while waiting and waiting[0][0] <= monotonic():
                _hand_on(port, waiting.popleft()[1])
    except OSError:  # the host is gone, and its device with it
        os.close(host)
        os.close(port)


def _hand_on(device: int, frame: bytes) -> None:
    with suppress(OSError):  # an end that is down takes nothing
        os.write(device, frame)
