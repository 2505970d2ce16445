"""What the kernel counts for the whole machine: bytes between the ranks, and how busy its cores are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_SENT = Path("/sys/class/net/lo/statistics/tx_bytes")
_STAT = Path("/proc/stat")


class Counters(NamedTuple):
    """Totals since the machine started, everybody's; NaN where the kernel doesn't tell.

    Attributes:
        sent: bytes over the loopback interface.
        busy: seconds in which a core worked, also for a hypervisor's other guests.
        stolen: those in which it worked for other guests.
    """

    sent: float
    busy: float
    stolen: float

    def since(self, before: Counters) -> Counters:
        """What has come since ``before``."""
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))


def read() -> Counters:
    """As they are now."""
    return Counters(float(_SENT.read_text()) if _SENT.exists() else float("nan"), *_busy())


def _busy() -> tuple[float, float]:
    """All ticks that a core didn't spend idle or waiting for a disk; those of guests count in the first two."""
    if not _STAT.exists():
        return float("nan"), float("nan")
    user, nice, system, _idle, _wait, irq, soft_irq, steal = map(int, _STAT.read_text().split()[1:9])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + soft_irq + steal) / ticks, steal / ticks
