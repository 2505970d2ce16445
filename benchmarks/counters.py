"""What the kernel counts: bytes between the ranks, and how busy the machine's cores are."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

import torch.distributed as dist

LOOPBACK = "lo"
_INTERFACES = Path("/proc/self/net/dev")
_STAT = Path("/proc/stat")


class Counters(NamedTuple):
    """Totals since the machine started, everybody's; NaN where the kernel doesn't tell.

    Attributes:
        sent: bytes that have left by one interface.
        busy: seconds in which a core worked, also for a hypervisor's other guests.
        stolen: those in which it worked for other guests.
    """

    sent: float
    busy: float
    stolen: float

    def since(self, before: Counters) -> Counters:
        """What has come since ``before``."""
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))


def read(interface: str = LOOPBACK) -> Counters:
    """As they are now."""
    return Counters(_sent(interface), *_busy())


def _sent(interface: str) -> float:
    """The ninth number of an interface's line, of those that this process's network namespace has."""
    lines = _INTERFACES.read_text().splitlines() if _INTERFACES.exists() else []
    numbers = {name.strip(): told.split() for name, _, told in (line.partition(":") for line in lines)}
    return float(numbers[interface][8]) if interface in numbers else float("nan")


def _busy() -> tuple[float, float]:
    """All ticks that a core didn't spend idle or waiting for a disk; those of guests count in the first two."""
    if not _STAT.exists():
        return float("nan"), float("nan")
    user, nice, system, _idle, _wait, irq, soft_irq, steal = map(int, _STAT.read_text().split()[1:9])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + soft_irq + steal) / ticks, steal / ticks


@contextmanager
def measured(into: dict[str, float]) -> Iterator[None]:
    """Measure the body on this rank: seconds, seconds of computing, bytes read, and memory beside what was held."""
    gc.collect()
    dist.barrier()
    forget_peak()
    held, read, began, computed = resident("VmRSS"), bytes_read(), perf_counter(), process_time()
    yield
    into["cpu"] = process_time() - computed
    into["wall"] = perf_counter() - began
    into["read"] = bytes_read() - read
    into["memory"] = resident("VmHWM") - held


def forget_peak() -> None:
    """Let the peak of this process's memory be what it holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(line: str) -> float:
    """Return bytes of this process's memory: held ("VmRSS"), shared of it ("RssShmem"), held at most ("VmHWM")."""
    return float(Path("/proc/self/status").read_text().split(f"{line}:")[1].split()[0]) * 1024


def bytes_read() -> float:
    return float(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])
