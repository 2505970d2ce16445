"""The roll call: all ranks tell each other that they have come, through the group's store, before they communicate.

A collective that one rank alone calls hangs until the process group's timeout, or ends all. A roll call says who didn't
come, and a later one finds everything as if nothing had been. It goes in *attempts*. Each attempt has one cell that is
written once, by compare-and-set: by the last rank to arrive, or with the reason why it is in vain by one that has
waited too long. So all that take part in an attempt see the same outcome, however close the last arrival and the
deadline are. An attempt that is over stays so: who comes later finds it so, and starts the next one.

A rank asks the store for as much however many ranks there are. One alone looks at what each has left there: the last to
arrive, if they tell each other anything, or the first to give up.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Any, NoReturn, TypeAlias

import torch.distributed as dist

from .lost_ranks import Lookout, farewell, naming_lost
from .process_group import default_group, of_group, store_of, timeout_of

_FIRST_LOOK, _SLOWEST_LOOK = 0.002, 0.5  # seconds between looks at the store
_SHARE = 0.25  # of what this rank has waited, between two looks
_GRACE = 5.0  # seconds for who was the first to give up to say who came

# What an attempt's cell says: the "words" of all; or who is "missing" after "seconds", or who is "lost"; or an "alarm".
_Outcome: TypeAlias = "dict[str, Any]"


class _Over:
    """By room, attempts that this rank knows to be over. All ranks count alike."""

    def __init__(self) -> None:
        self.attempts: defaultdict[str, int] = defaultdict(int)


class Alarm:
    """A word to all ranks that a roll call is in vain, even to those in another group; the first word stays.

    Args:
        name: what it is about; the same on all ranks, and not used again.
    """

    def __init__(self, name: str) -> None:
        self._store = store_of(default_group())
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
    timeout: float | None = None,
    doing: str | None = None,
    word: str | None = None,
    alarm: Alarm | None = None,
) -> list[str]:
    """Return when every rank of ``group`` has called this with the same ``room``: the words of all, in rank order.

    Args:
        group: the ranks that are to come.
        room: what they come for, as in ``"save_checkpoint"``.
        timeout: seconds to wait for the last; None: as long as a collective of ``group`` may take.
        doing: what this rank does there, for the message; None: ``room``.
        word: what this rank tells the others; None, on all ranks: nothing.
        alarm: who hears it doesn't wait any longer.

    Raises:
        TimeoutError: somebody didn't come. Raised by all that did, once the first of them has waited for
            ``timeout`` seconds; the message names them. A later call finds everything as if nothing had been.
        RuntimeError: the alarm's word.
        LostRank: a rank's process has ended.
    """
    size = dist.get_world_size(group)
    if size == 1 or dist.get_backend(group) == "fake":
        return [] if word is None else [word] * size
    with naming_lost(group, doing or room):
        attempts = of_group(group, _Over).attempts
        attempt = _enter(group, room, attempts)
        outcome = attempt.wait(word, timeout_of(group) if timeout is None else timeout, alarm)
        attempts[room] += 1
        if "words" not in outcome:
            _raise_why(outcome, size, doing or room)
        attempt.forget_earlier()
        words: list[str] = outcome["words"]
        return words


def _enter(group: dist.ProcessGroup, room: str, attempts: defaultdict[str, int]) -> _Attempt:
    """The first attempt that this rank doesn't know, and finds not, to be over."""
    while True:
        attempt = _Attempt(group, room, attempts[room])
        if attempt.outcome() is None:
            return attempt
        attempts[room] += 1


class _Attempt:
    """One attempt at a roll call, as the store has it."""

    def __init__(self, group: dist.ProcessGroup, room: str, number: int) -> None:
        self._store = store_of(group)
        self.rank = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self.size = len(self._ranks)
        self._room = room
        self._number = number

    def wait(self, word: str | None, timeout: float, alarm: Alarm | None) -> _Outcome:
        """Arrive, and wait until it is settled, or settle it: all have come, or it is in vain."""
        if self._arrive(word) == self.size:
            return self._settle({"words": [] if word is None else self._words()})
        began, lookout = time.monotonic(), Lookout(self._ranks)
        patience = timeout
        while (outcome := self.outcome()) is None:
            waited = time.monotonic() - began
            reason = self._reason(lookout, alarm)
            if reason is None and waited >= patience:
                if patience > timeout or self._is_first_to_give_up():
                    reason = {"missing": self._missing(), "seconds": timeout}
                patience = timeout + _GRACE
            if reason is not None:
                return self._settle(reason)
            time.sleep(min(max(_SHARE * waited, _FIRST_LOOK), _SLOWEST_LOOK, max(patience - waited, _FIRST_LOOK)))
        return outcome

    def _arrive(self, word: str | None) -> int:
        """Enter this rank; how many have come so far."""
        self._store.set(self._key(f"rank {self.rank}"), word or "")
        return int(self._store.add(self._key("count"), 1))

    def _reason(self, lookout: Lookout, alarm: Alarm | None) -> _Outcome | None:
        """Why it is in vain, before its time."""
        word = None if alarm is None else alarm.heard()
        if word is not None:
            return {"alarm": word}
        lost = lookout.lost()
        return {"lost": lost} if lost else None

    def _is_first_to_give_up(self) -> bool:
        return int(self._store.add(self._key("late"), 1)) == 1

    def _settle(self, outcome: _Outcome) -> _Outcome:
        """Settle the attempt unless it has been; what was settled."""
        settled: _Outcome = json.loads(self._store.compare_set(self._key("outcome"), "", json.dumps(outcome)))
        return settled

    def outcome(self) -> _Outcome | None:
        """What was settled; None: nothing yet."""
        key = self._key("outcome")
        settled: _Outcome | None = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return settled

    def _missing(self) -> list[int]:
        """The ranks that haven't arrived."""
        return [rank for rank in range(self.size) if not self._store.check([self._key(f"rank {rank}")])]

    def _words(self) -> list[str]:
        """What all have said."""
        return [str(self._store.get(self._key(f"rank {rank}")), "utf-8") for rank in range(self.size)]

    def forget_earlier(self) -> None:
        """Remove this rank's part of the attempt before this one, to which all have come: nobody looks at it."""
        if self._number > 0:
            cells = ("count", "outcome", "late") if self.rank == 0 else ()
            for name in (f"rank {self.rank}", *cells):
                self._store.delete_key(self._key(name, self._number - 1))

    def _key(self, name: str, number: int | None = None) -> str:
        return f"lowlevel_zero/roll call/{self._room}/{self._number if number is None else number}/{name}"


def _raise_why(outcome: _Outcome, size: int, doing: str) -> NoReturn:
    if "alarm" in outcome:
        raise RuntimeError(outcome["alarm"])
    if "lost" in outcome:
        raise farewell(outcome["lost"], doing)
    came = [rank for rank in range(size) if rank not in outcome["missing"]]
    raise TimeoutError(
        f"{doing}: expected all {size} ranks, got {_listed(came)} and, within {outcome['seconds']:g} seconds, not "
        f"{_listed(outcome['missing'])}: call it on every rank"
    )


def _listed(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
