"""The stall report: a thread logs which collective a shard group waits for, and which ranks are missing.

The thread looks at the group's ``Progress`` now and then, and uses the store only where nothing has moved since its
last look. Where the host, or its device, waits for the same collective for too long, it asks the other ranks through
the store. Every rank's thread answers with the rank's progress, also while the rank is busy elsewhere; a process that
has ended doesn't answer. The first rank to ask about a collective finds the missing ranks and tells the others that
wait for it, so a stall costs the store a few messages a rank. (The idea is Horovod's.)

The thread asks no device, so it doesn't know whether one has finished a collective. It needn't: no rank waits for a
collective that all have begun, and one that a rank hasn't begun isn't over. A rank that leaves says so.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

from torch.distributed import get_process_group_ranks

from ..communication.process_groups import SHARE_OF_TIMEOUT, store_of, timeout_of
from ..communication.progress import AGREEMENT, Collective
from ..communication.runtime import runtime
from ..communication.shard_group import ShardGroup
from ..options import Diagnostics

_LEFT = 2**62  # a question's number that is never reached: an answer to it answers all questions
# Looks in the time after which a wait counts as a stall, and in which the others have to answer.
_LOOKS, _PATIENCE = 10, 3
_SLOWEST_LOOK, _FASTEST_LOOK = 5.0, 0.02
_SLOW = "All ranks have come: it is slow, or doesn't get through"
_REMEDY = (
    "A rank that is busy elsewhere may still come; if it leaves this call out, as under «if rank == 0» or because it "
    "has no batch left, make the call on every rank"
)

# The answers to a question by global rank; None: there is none yet.
_Answers: TypeAlias = Mapping[int, "dict[str, Any] | None"]

_log = logging.getLogger("lowlevel_zero")


class _Question(NamedTuple):
    """A question to the other ranks' threads about a wait that takes too long."""

    place: Collective  # that the host waits for; or the last in a device's queue, which may wait for any in it
    number: int
    leads: bool  # this rank finds the missing ranks
    until: float  # the time by which answers are to be there; for other ranks, the leader's result


class Watch(Thread):
    """A thread that reports waits of more than ``timeout`` seconds in one shard group, until the group is gone.

    Attributes:
        rank: this process's global rank.
        pause: seconds between looks.
        over: gets an item when the watch is over; a finaliser may put it at any time.
    """

    def __init__(self, group: ShardGroup, timeout: float) -> None:
        super().__init__(name="lowlevel_zero watchdog", daemon=True)
        self.over = over = SimpleQueue[None]()
        self._group = ref(group, lambda _: over.put(None))
        self._ranks = get_process_group_ranks(group.group)
        self.rank = self._ranks[group.group_rank]
        self._number, self._store = group.number, store_of(group.group, f"stall/{group.place}")
        self._progress = group.progress
        self.timeout = timeout
        self.pause = min(max(timeout / _LOOKS, _FASTEST_LOOK), _SLOWEST_LOOK)
        self._seen: Any = None
        self._since = 0.0
        self._question: _Question | None = None
        self._reported = False
        self._answered = 0

    def run(self) -> None:
        """Look every ``pause`` seconds until the group is gone; then tell the store that this rank has left."""
        while self._look(monotonic()):
            with suppress(Empty):
                self.over.get(timeout=self.pause)
                break
        with suppress(RuntimeError):  # the process that holds the store has ended
            if self._number:  # else the next try to construct an optimizer has the same place in the store
                self._say(_LEFT, f"has let go of its optimizer, after {self._progress.step} steps")
        del self._store  # lest a thread that isn't joined any more be its last owner

    def _look(self, now: float) -> bool:
        """Answer other ranks' questions, and report a wait that takes too long; return whether to look again."""
        group = self._group()
        progress = self._progress = self._progress if group is None else group.progress  # it may have changed
        if progress.left or group is None:
            return False
        if group.number != self._number:
            self._number, self._store = group.number, store_of(group.group, f"stall/{group.place}")
        del group
        seen = (progress.waits_for is None, progress.waits, progress.step, *progress.begun.values())
        if seen != self._seen:
            self._seen, self._since = seen, now
            self._question, self._reported, progress.missing = None, False, ""
            return True
        place = None
        if not self._reported and now - self._since >= self.timeout:
            place = progress.waits_for or next(reversed(progress.queued()), None)  # else the last in a device's queue
        try:
            found = None if place is None else self._found(place, now)
            self._answer()
        except Exception as error:  # stores raise what they like when the process that holds them has ended
            if place is None or progress.waits_for is None:
                return True
            found = str(place), f"Who is missing isn't known, since the store doesn't answer: {error}"
        if found is not None:
            self._reported, (what, progress.missing) = True, found
            if progress.missing:
                waited = now - self._since
                call = f" in {progress.call}, which all ranks call," if progress.call else ""
                remedy = "" if progress.missing == _SLOW else f". {_REMEDY}"
                told = self.rank, waited, call, what, progress.missing, remedy
                _log.warning("rank %d has waited %.3g s%s for the %s. %s%s", *told)
        return True

    # ---- answering ----

    def _answer(self) -> None:
        """Answer a new question of another rank, if one is in the store, with this rank's progress."""
        if self._store.check(["questions"]):
            question = int(self._store.get("questions"))
            if question != self._answered:
                self._answered = question
                self._say(question, str(self._progress))

    def _say(self, question: int, where: str) -> None:
        answer = {"question": question, "begun": self._progress.begun, "is": where}
        self._store.set(f"rank {self.rank}", json.dumps(answer))

    # ---- asking ----

    def _found(self, place: Collective, now: float) -> tuple[str, str] | None:
        """Ask the other ranks about a stall; return it and the missing ranks as text, None until they answer."""
        if self._question is None:
            leader = self._store.compare_set(_key(place, "leader"), "", str(self.rank))
            leads = str(leader, "ascii") == str(self.rank)
            patience = (_PATIENCE if leads else 2 * _PATIENCE) * self.pause
            self._question = _Question(place, self._store.add("questions", 1), leads, now + patience)
            return None
        question, key = self._question, _key(self._question.place, "found")
        if not question.leads and self._store.check([key]):
            what, missing = json.loads(self._store.get(key))
            return what, missing
        if not question.leads and now < question.until:
            return None
        answers = {rank: self._answer_of(rank, question.number) for rank in self._ranks}
        if None in answers.values() and now < question.until:
            return None
        found = self._in_words(question.place, answers)
        self._store.set(key, json.dumps(found))
        return found

    def _answer_of(self, rank: int, question: int) -> dict[str, Any] | None:
        key = f"rank {rank}"
        answer: dict[str, Any] = json.loads(self._store.get(key)) if self._store.check([key]) else {"question": 0}
        return answer if answer["question"] >= question else None

    def _in_words(self, place: Collective, answers: _Answers) -> tuple[str, str]:
        """Return as text the collective that is waited for, or the first queued that lacks ranks, and missing ranks."""
        if self._progress.waits_for is not None:
            return str(place), self._missing(place, answers) or _SLOW
        queued = ((each, self._missing(each, answers)) for each in self._progress.queued())
        first, missing = next((pair for pair in queued if pair[1]), (place, ""))
        return str(first), missing

    def _missing(self, place: Collective, answers: _Answers) -> str:
        """Return the ranks that haven't begun a collective as text; empty if all have."""
        silent = "its process has"
        if place.kind == AGREEMENT and place.serial == 0:  # the first one of its shard group
            call = self._progress.call
            constructs = call in ("", "LowLevelZeroOptimizer")
            silent = f"it hasn't {'constructed its optimizer' if constructs else f'called {call}'}, or {silent}"
        missing = []
        for rank, answer in answers.items():
            if answer is None:
                missing.append(f"rank {rank} (doesn't answer: {silent} ended or stands still)")
            elif answer["begun"][place.kind] <= place.serial:
                missing.append(f"rank {rank} ({answer['is']})")
        return f"Not there yet: {'; '.join(missing)}" if missing else ""


def _key(place: Collective, name: str) -> str:
    return f"{place.kind}/{place.serial}/{name}"


def seconds_of(diagnostics: object) -> float:
    """Return the ``stall_timeout`` of unchecked options, or the default if that is no valid number."""
    stall_timeout = getattr(diagnostics, "stall_timeout", None)
    if isinstance(stall_timeout, (int, float)) and 0 <= stall_timeout < inf:
        return stall_timeout
    return Diagnostics.stall_timeout


def watch(group: ShardGroup, timeout: float | None = None) -> Watch | None:
    """Start and return a thread that reports waits in ``group`` beyond ``timeout`` seconds; None if it watches nothing.

    It watches nothing if that is 0, without other ranks, or, with a warning, if the system has no more threads.
    ``timeout``: None: that of the last one over the same process group, or else the default.
    """
    last = group.context.stall_timeout
    timeout = timeout if timeout is not None else last if last is not None else Diagnostics.stall_timeout
    group.context.stall_timeout = timeout
    if timeout <= 0 or not group.has_others:
        return None
    made = Watch(group, min(timeout, SHARE_OF_TIMEOUT * timeout_of(group.group)))
    try:
        runtime().watch(made, made.over, group.context.threads)
    except RuntimeError as error:
        _log.warning("stalls aren't reported on rank %d, where no thread can be started: %s", made.rank, error)
        return None
    return made
