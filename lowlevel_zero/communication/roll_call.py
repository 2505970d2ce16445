"""The roll call: all ranks tell each other that they have come, through the group's store, before they communicate.

A collective that one rank alone calls hangs until the process group's timeout, half an hour later. A roll call
fails within seconds and says who didn't come. It goes in *attempts*. Each attempt has one cell that is written
once, by compare-and-set: with "go" by the last rank to arrive, or with "off" by the first that has waited too
long. So all that take part in an attempt see the same outcome, however close the last arrival and the deadline
are. An attempt that is off stays off: who comes later finds it so, and starts the next one.
"""

from __future__ import annotations

import time
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .lost_ranks import Lookout, farewell, lost, naming_lost
from .process_group import store_of

_GO, _OFF = "go", "off"
_FIRST_LOOK, _SLOWEST_LOOK = 0.002, 0.05  # seconds between looks at the store

# By group and room: attempts that this rank knows to be over. All ranks count alike.
_over: WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = WeakKeyDictionary()


class Alarm:
    """A word to all ranks that a roll call is in vain, even to those in another group; the first word stays.

    Args:
        name: what it is about; the same on all ranks, and not used again.
    """

    def __init__(self, name: str) -> None:
        self._store = store_of(dist.distributed_c10d._get_default_group())
        self._key = f"lowlevel_zero/alarm/{name}"

    def give(self, word: str) -> None:
        """Give it."""
        self._store.compare_set(self._key, "", word)

    def heard(self) -> str | None:
        """The word; None: nobody has given one."""
        return str(self._store.get(self._key), "utf-8") if self._store.check([self._key]) else None


def call_roll(
    group: dist.ProcessGroup,
    room: str,
    timeout: float = 20.0,
    doing: str | None = None,
    word: str = "here",
    alarm: Alarm | None = None,
) -> list[str]:
    """Return when every rank of ``group`` has called this with the same ``room``: the words of all, in rank order.

    Args:
        group: the ranks that are to come.
        room: what they come for, as in ``"save_checkpoint"``.
        timeout: seconds to wait for the last.
        doing: what this rank does there, for the message; None: ``room``.
        word: what this rank tells the others.
        alarm: who hears it doesn't wait any longer.

    Raises:
        TimeoutError: somebody didn't come. Raised by all that did, once the first of them has waited for
            ``timeout`` seconds; the message names them. A later call finds everything as if nothing had been.
        RuntimeError: the alarm's word.
        LostRank: a rank's process has ended.
    """
    size = dist.get_world_size(group)
    if size == 1 or dist.get_backend(group) == "fake":
        return [word] * size
    with naming_lost(group, doing or room):
        attempt = _enter(group, room)
        outcome = _outcome(attempt, word, timeout, alarm)
        _over[group][room] += 1
        if outcome == _OFF:
            _raise_why(attempt, doing or room, timeout, alarm)
        attempt.forget_earlier()
        return attempt.words()


def _outcome(attempt: _Attempt, word: str, timeout: float, alarm: Alarm | None) -> str:
    """Wait until it is settled, or settle it: all have come, or it is in vain."""
    if attempt.arrive(word) == attempt.size:
        attempt.decide(_GO)
    deadline, pause, lookout = time.monotonic() + timeout, _FIRST_LOOK, Lookout(attempt.ranks)
    while (outcome := attempt.outcome()) is None:
        alarmed = alarm is not None and alarm.heard() is not None
        if time.monotonic() > deadline or alarmed or lookout.lost():
            return attempt.decide(_OFF)
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_LOOK)
    return outcome


def _raise_why(attempt: _Attempt, doing: str, timeout: float, alarm: Alarm | None) -> NoReturn:
    reason = None if alarm is None else alarm.heard()
    if reason is not None:
        raise RuntimeError(reason)
    gone = lost(attempt.ranks)
    if gone:
        raise farewell(gone, doing)
    raise TimeoutError(_who_came(attempt, doing, timeout))


class _Attempt:
    """One attempt at a roll call, as the store has it."""

    def __init__(self, group: dist.ProcessGroup, room: str, number: int) -> None:
        self._store = store_of(group)
        self._rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.size = len(self.ranks)
        self._room = room
        self._number = number

    def arrive(self, word: str) -> int:
        """Enter this rank; how many have come so far."""
        self._store.set(self._key(f"rank {self._rank}"), word)
        return int(self._store.add(self._key("count"), 1))

    def decide(self, outcome: str) -> str:
        """Settle the attempt unless it has been; what was settled."""
        return str(self._store.compare_set(self._key("outcome"), "", outcome), "ascii")

    def outcome(self) -> str | None:
        """What was settled; None: nothing yet."""
        key = self._key("outcome")
        return str(self._store.get(key), "ascii") if self._store.check([key]) else None

    def came(self) -> list[int]:
        """The ranks that have arrived."""
        return [rank for rank in range(self.size) if self._store.check([self._key(f"rank {rank}")])]

    def words(self) -> list[str]:
        """What all that have arrived have said."""
        return [str(self._store.get(self._key(f"rank {rank}")), "utf-8") for rank in range(self.size)]

    def forget_earlier(self) -> None:
        """Remove the attempt before this one, which nobody will look at any more: all have come to this one."""
        if self._rank == 0 and self._number > 0:
            before = self._key("", self._number - 1)
            for name in ("count", "outcome", *(f"rank {rank}" for rank in range(self.size))):
                self._store.delete_key(before + name)

    def _key(self, name: str, number: int | None = None) -> str:
        return f"lowlevel_zero/roll call/{self._room}/{self._number if number is None else number}/{name}"


def _enter(group: dist.ProcessGroup, room: str) -> _Attempt:
    """The first attempt that this rank doesn't know, and finds not, to be over."""
    rooms = _over.setdefault(group, {})
    rooms.setdefault(room, 0)
    while True:
        attempt = _Attempt(group, room, rooms[room])
        if attempt.outcome() is None:
            return attempt
        rooms[room] += 1


def _who_came(attempt: _Attempt, doing: str, timeout: float) -> str:
    came = attempt.came()
    missing = sorted(set(range(attempt.size)) - set(came))
    return (
        f"{doing}: expected all {attempt.size} ranks, got {_listed(came)} and, within {timeout:g} seconds, not "
        f"{_listed(missing)}: call it on every rank"
    )


def _listed(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
