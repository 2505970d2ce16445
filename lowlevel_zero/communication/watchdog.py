"""The watchdog: one thread a process that says why its optimizers wait, and for which ranks; after Horovod's.

It looks at each optimizer's ``Progress`` now and then, and touches the group's store only where nothing has moved since
it last looked. Where the host, or its device, waits for one and the same collective for too long, it asks the others
through the store: every rank's watchdog answers how far that rank has come, also for a rank that is busy elsewhere; who
has ended doesn't. The first to ask about a place finds out who is missing there and tells the others that wait
there, so that a stall costs the store no more than a few messages a rank.

The thread asks no device, so it doesn't know whether one has finished a collective. It needn't: what all ranks have
begun nobody waits for, and what a rank hasn't begun isn't over. A rank that leaves says so: nobody is to miss it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch.distributed as dist

from .process_group import is_alive, prefixed
from .progress import Place, Progress

# The number of a question that nobody gets to: an answer to it holds for all.
_ANY = 2**62

# Of a process group's own timeout, after which the report must have come.
SHARE_OF_TIMEOUT = 0.4
# Looks in the time after which a wait counts as a stall, and in which the others have to answer.
LOOKS, PATIENCE = 10, 3
_SLOWEST_LOOK, _FASTEST_LOOK = 5.0, 0.02
_SLOW = "All ranks have come: it is slow, or doesn't get through"

_log = logging.getLogger("lowlevel_zero")


class _Stall(NamedTuple):
    """A wait that takes too long, of which the others have been asked.

    Attributes:
        place: what the host waits for; or where a device's queue ends, of which any part may be waited for.
        question: its number.
        leads: this rank is to find out who is missing.
        until: when to have answers.
    """

    place: Place
    question: int
    leads: bool
    until: float


class _Found(NamedTuple):
    """What has come of asking, in words.

    Attributes:
        place: what is waited for.
        missing: whom for; empty: for nobody.
    """

    place: str
    missing: str


class Watch:
    """What the watchdog knows of one optimizer, on this rank.

    Args:
        group: the ranks.
        number: the how manyth optimizer of this group it is, which names it alike on all ranks.
        progress: how far this rank has come.
        timeout: seconds after which a wait counts as a stall.

    Attributes:
        pause: seconds between looks.
    """

    def __init__(self, group: dist.ProcessGroup, number: int, progress: Progress, timeout: float) -> None:
        self._group = group
        self._store = prefixed(f"lowlevel_zero/stall/{number}", group)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._progress = progress
        self._timeout = timeout
        self.pause = min(max(timeout / LOOKS, _FASTEST_LOOK), _SLOWEST_LOOK)
        self._seen: Any = None
        self._since = 0.0
        self._stall: _Stall | None = None
        self._told = False
        self._answered = 0
        self._left = False

    def look(self, now: float) -> None:
        """See whether anything has moved; if not, answer who has asked, and ask if it is for too long."""
        if self._left:
            return
        progress = self._progress
        seen = (progress.waits_for() is None, progress.waits, progress.step, *progress.begun.values())
        if seen != self._seen:
            self._seen, self._since = seen, now
            self._stall, self._told = None, False
            return
        if not is_alive(self._group):
            self.leave()
            return
        late_at = self._place() if not self._told and now - self._since >= self._timeout else None
        found: _Found | None = None
        try:
            found = self._attend_to(late_at, now) if late_at is not None else None
            self._answer()
        except Exception as error:  # stores raise what they like when the process that holds them has ended
            if late_at is not None and progress.waits_for() is not None:
                unknown = f"Who is missing isn't known, since the store doesn't answer: {error}"
                found = _Found(str(late_at), unknown)
        if found is not None:
            self._told = True
            if found.missing:
                waited = now - self._since
                _log.warning("rank %d has waited %.3g s for the %s. %s", self._rank, waited, found.place, found.missing)

    def leave(self) -> None:
        """Answer what anybody may ask from now on: this rank begins no more collectives."""
        if not self._left:
            self._left = True
            gone = self._answer_to(_ANY, f"has let go of its optimizer, after {self._progress.step} steps")
            with suppress(RuntimeError):  # the process that holds the store has ended
                self._store.set(f"rank {self._rank}", gone)

    def _place(self) -> Place | None:
        """What the host waits for, or the last that a device was given to wait for; None: nothing."""
        place = self._progress.waits_for()
        return place if place is not None else next(reversed(self._progress.queued()), None)

    # ---- asking, and answering ----

    def _attend_to(self, place: Place, now: float) -> _Found | None:
        """Who is missing at a place where this rank has waited too long, in words; None: not known yet."""
        if self._stall is None:
            self._stall = self._ask(place, now + PATIENCE * self.pause)
            return None
        return self._found(self._stall, now)

    def _ask(self, place: Place, until: float) -> _Stall:
        leader = self._store.compare_set(_key(place, "leader"), "", str(self._rank))
        question = self._store.add("questions", 1)
        return _Stall(place, question, str(leader, "ascii") == str(self._rank), until)

    def _answer(self) -> None:
        if not self._store.check(["questions"]):
            return
        question = int(self._store.get("questions"))
        if question != self._answered:
            self._answered = question
            self._store.set(f"rank {self._rank}", self._answer_to(question, str(self._progress)))

    def _answer_to(self, question: int, where: str) -> str:
        return json.dumps({"question": question, "begun": self._progress.begun, "is": where})

    def _found(self, stall: _Stall, now: float) -> _Found | None:
        """Who is missing, in words; None: not known yet."""
        key = _key(stall.place, "found")
        if not stall.leads:
            if self._store.check([key]):
                return _Found(*json.loads(self._store.get(key)))
            if now < stall.until + PATIENCE * self.pause:
                return None
        answers = [self._answer_of(rank, stall.question) for rank in range(self._size)]
        if None in answers and now < stall.until:
            return None
        found = self._in_words(stall.place, answers)
        self._store.set(key, json.dumps(found))
        return found

    def _in_words(self, place: Place, answers: Sequence[dict[str, Any] | None]) -> _Found:
        if self._progress.waits_for() is not None:
            return _Found(str(place), _missing(place, answers) or _SLOW)
        queued = ((each, _missing(each, answers)) for each in self._progress.queued())
        first, missing = next((pair for pair in queued if pair[1]), (place, ""))
        return _Found(str(first), missing)

    def _answer_of(self, rank: int, question: int) -> dict[str, Any] | None:
        key = f"rank {rank}"
        answer: dict[str, Any] = json.loads(self._store.get(key)) if self._store.check([key]) else {"question": 0}
        return answer if answer["question"] >= question else None


def _key(place: Place, name: str) -> str:
    return f"{place.kind}/{place.serial}/{name}"


def _missing(place: Place, answers: Iterable[dict[str, Any] | None]) -> str:
    """Who hasn't come to a place, in words; empty: all have."""
    missing = []
    for rank, answer in enumerate(answers):
        if answer is None:
            missing.append(f"rank {rank} (doesn't answer: its process has ended or stands still)")
        elif answer["begun"][place.kind] <= place.serial:
            missing.append(f"rank {rank} ({answer['is']})")
    return f"Not there yet: {'; '.join(missing)}" if missing else ""


# ---- the thread, which lives as long as there is something to watch ----


class _Watchdog:
    """The process's own."""

    def __init__(self) -> None:
        self._watches: list[ReferenceType[Watch]] = []
        # Who leaves, or just a reason to wake up. A finaliser may put into it, whatever it interrupts.
        self._calls: SimpleQueue[Watch | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None

    def add(self, watch: Watch) -> None:
        """Watch it as long as it lives."""
        calls = self._calls
        with self._lock:
            self._watches.append(ref(watch, lambda _: calls.put(None)))
            if self._thread is None:
                self._thread = Thread(target=self._run, name="lowlevel_zero watchdog", daemon=True)
                self._thread.start()
        calls.put(None)

    def dismiss(self, watch: Watch) -> None:
        """Let it say that its rank leaves; the thread says it, since a store may not answer."""
        self._calls.put(watch)

    def stop(self) -> None:
        """The process ends: it must not do so while the thread is within the store."""
        thread = self._thread
        with self._lock:
            leaving = [watch for each in self._watches if (watch := each()) is not None]
            self._watches.clear()
        for call in (*leaving, None):
            self._calls.put(call)
        if thread is not None:
            thread.join(timeout=1.0)

    def _run(self) -> None:
        pause = 0.0
        while True:
            self._take_calls(pause)
            with self._lock:
                self._watches = [each for each in self._watches if each() is not None]
                if not self._watches:
                    self._thread = None
                    return
                watches = list(self._watches)
            pause = min(map(_look_at, watches))

    def _take_calls(self, seconds: float) -> None:
        with suppress(Empty):
            call = self._calls.get(timeout=seconds)
            while True:
                if call is not None:
                    call.leave()
                call = self._calls.get_nowait()


def _look_at(watched: ReferenceType[Watch]) -> float:
    """Look at one, if it is still there; seconds until the next look."""
    watch = watched()
    if watch is None:
        return _SLOWEST_LOOK
    watch.look(monotonic())
    return watch.pause


_watchdog = _Watchdog()
_numbers: WeakKeyDictionary[dist.ProcessGroup, count[int]] = WeakKeyDictionary()


def _begin_anew() -> None:
    """In a forked process: its parent's thread isn't here, and neither are its parent's ranks."""
    global _watchdog
    _watchdog = _Watchdog()


if hasattr(os, "register_at_fork"):  # else there is no fork
    os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _watchdog.stop())


def next_number(group: dist.ProcessGroup) -> int:
    """What names one more optimizer of ``group`` alike on all ranks, which all ask at the same point."""
    return next(_numbers.setdefault(group, count()))


def watch(group: dist.ProcessGroup, number: int, progress: Progress, timeout: float) -> Watch:
    """Report it when ``progress`` waits for longer than ``timeout`` seconds, as long as the result lives."""
    watched = Watch(group, number, progress, timeout)
    _watchdog.add(watched)
    return watched


def dismiss(watched: Watch) -> None:
    """This rank begins no more of what is watched, and the others needn't wonder where it is."""
    _watchdog.dismiss(watched)
