"""Identities of processes, and whether a process of this host has ended."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process: its PID, the PID namespace, and its start time, since PIDs are used again."""

    space: str
    number: int
    began: str

    def has_ended(self) -> bool:
        """Return whether the process has ended; False if it is in another PID namespace, or can't be seen now."""
        if self.space != _space(os.getpid()):
            return False
        try:
            state, began = _state(self.number)
        except OSError:  # such as EMFILE: this process's own trouble tells nothing of the other
            return False
        return state in "ZX" or began != self.began


def own_process() -> Process:
    """Return the identity of this process, to be sent to other ranks."""
    return Process(_space(os.getpid()), os.getpid(), _state(os.getpid())[1])


@cache
def _space(own: int) -> str:
    """Return a name for this host's boot and this process's PID namespace."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return f"not Linux, {own}"


def _state(number: int) -> tuple[str, str]:
    """Return a process's state, "Z" or "X" if it has ended, and its start time in ticks since boot.

    The name before them may be any bytes: the kernel cuts it after 15, even within a character.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        state, *numbers = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
        return state, numbers[18]
    return "X", ""
