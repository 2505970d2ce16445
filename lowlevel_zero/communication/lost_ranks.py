"""Lost ranks: whose process has ended, for the error of those who are left waiting for it.

Each rank enters its process in the store. When a collective breaks off, the others look which of the processes on their
host are gone, and leave a note of what they have found, which tells ranks of other hosts. A rank that breaks off soon
ends itself, and breaks off further ones: its note says that it wasn't the first.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .process_group import prefixed

_REMEDY = (
    "What it has printed, or the kernel's log, may say why. Start all ranks again from the newest checkpoint, as "
    "torchrun --max-restarts does by itself"
)

# A broken connection, as gloo, NCCL, torch's stores and ``mail`` tell of it: nobody has a type for it.
_BROKEN = re.compile(
    r"[Cc]onnection (was )?(closed|reset|refused|aborted)|Broken pipe|(Read|Write) error \[|got 0 bytes"
    r"|remote process exited|socket .*closed|process has ended"
)
# Seconds: a process closes its connections a moment before it is seen to have ended.
_PATIENCE, _PAUSE = 1.0, 0.02
_FIRST_LOOK = 0.5  # seconds

_entered: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


class LostRank(RuntimeError):
    """The process of another rank has ended: what needs all ranks can't be done any more."""


class _Process(NamedTuple):
    """A process, by plain values: its number, where that is valid, and when it began: numbers come again."""

    space: str
    number: int
    began: str

    def has_ended(self) -> bool:
        """Whether it is seen from here, and gone."""
        if self.space != _space():
            return False
        state, began = _state(self.number)
        return state in "ZX" or began != self.began


def enter() -> None:
    """Tell the other ranks which process this is; before they may look for it, and once is enough."""
    group = dist.distributed_c10d._get_default_group()
    if group not in _entered and dist.get_backend(group) != "fake":
        _entered[group] = store = prefixed("lowlevel_zero/processes", group)
        own = _Process(_space(), os.getpid(), _state(os.getpid())[1])
        store.set(f"note of {dist.get_rank()}", "null")  # torchrun may have kept the store from an earlier start
        store.set(f"process {dist.get_rank()}", json.dumps(own))


def lost(ranks: Sequence[int], patience: float = 0.0) -> list[int]:
    """Those of the global ``ranks`` that are known to have ended, though no other rank's end has ended them.

    Args:
        ranks: whom to look for.
        patience: seconds to wait until one of them is seen to have ended.
    """
    store = _store()
    deadline = monotonic() + patience
    while store is not None:
        found = _lost(store, ranks)
        if found or monotonic() >= deadline:
            return found
        sleep(_PAUSE)
    return []


class Lookout:
    """For who waits by itself: looks for ranks that have ended, and seldom, since it asks the store about each."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._pause = _FIRST_LOOK
        self._next = monotonic() + self._pause

    def lost(self) -> list[int]:
        """Those of the global ranks that are seen to have ended, at the times when this looks."""
        if monotonic() < self._next:
            return []
        self._pause *= 2
        self._next += self._pause
        return lost(self._ranks)


@contextmanager
def naming_lost(group: dist.ProcessGroup, what: object) -> Iterator[None]:
    """If the body fails because the process of another rank of ``group`` has ended, raise what says so."""
    try:
        yield
    except RuntimeError as error:
        named = explained(error, group, what)
        if named is None:
            raise
        raise named from error


def explained(error: BaseException, group: dist.ProcessGroup, what: object) -> LostRank | None:
    """An error that says whom this rank of ``group`` has lost in ``what``; None: ``error`` is of another kind."""
    if not dist.is_initialized() or isinstance(error, LostRank) or not _BROKEN.search(str(error)):
        return None
    try:
        return farewell(lost(dist.get_process_group_ranks(group), _PATIENCE), what)
    except RuntimeError:
        return LostRank(
            f"{what}: expected all ranks, lost the connection to one of them, and to the store: the process that holds "
            f"it has ended, rank 0's if torchrun's doesn't. {_REMEDY}"
        )


def farewell(ranks: Sequence[int], what: object) -> LostRank:
    """The error with which this rank ends, having lost ``ranks`` in ``what``; leaves the note that it does."""
    store = _store()
    if store is not None:
        store.set(f"note of {dist.get_rank()}", json.dumps(ranks))
    if not ranks:
        lost = "the connection to one of them, whose end isn't seen from this host, or the network is broken"
    elif len(ranks) == 1:
        lost = f"rank {ranks[0]}, whose process has ended"
    else:
        lost = f"ranks {', '.join(map(str, ranks))}, whose processes have ended"
    return LostRank(f"{what}: expected all ranks, lost {lost}. {_REMEDY}")


def _store() -> Any:
    return _entered.get(dist.distributed_c10d._get_default_group()) if dist.is_initialized() else None


def _lost(store: Any, ranks: Iterable[int]) -> list[int]:
    found: set[int] = set()
    for rank in ranks:
        process = _told(store, f"process {rank}")
        ended = process is not None and _Process(*process).has_ended()
        note = _told(store, f"note of {rank}")  # only now: it is left before the end
        if note is not None:
            found.update(note)
        elif ended:
            found.add(rank)
    return sorted(found)


def _told(store: Any, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


def _space() -> str:
    """Names what process numbers are valid in: a host since it was booted, and a PID namespace of it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return f"not Linux, {os.getpid()}"


def _state(number: int) -> tuple[str, str]:
    """A process's state, "Z" for one that has ended, and its beginning, in ticks since the system's."""
    with suppress(OSError):
        state, *numbers = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        return state, numbers[18]
    return "X", ""
