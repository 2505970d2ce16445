"""Processes of other ranks, and whether they have ended, as far as it is seen from this host."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, by plain values: its number, where that is valid, and when it began: numbers come again."""

    space: str
    number: int
    began: str

    def has_ended(self) -> bool:
        """Whether it is seen from here, and gone."""
        if self.space != _space(os.getpid()):
            return False
        state, began = _state(self.number)
        return state in "ZX" or began != self.began


def own_process() -> Process:
    """This one, for other ranks to know."""
    return Process(_space(os.getpid()), os.getpid(), _state(os.getpid())[1])


@cache
def _space(own: int) -> str:
    """Names what this process's number is valid in: a host since it was booted, and a PID namespace of it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return f"not Linux, {own}"


def _state(number: int) -> tuple[str, str]:
    """A process's state, "Z" for one that has ended, and its beginning, in ticks since the system's.

    Its name stands before them, in whatever bytes: the kernel cuts it after 15, be it within a character.
    """
    with suppress(OSError):
        state, *numbers = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
        return state, numbers[18]
    return "X", ""
