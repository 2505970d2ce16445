"""The progress of one optimizer's collectives on this rank: those begun, and the one it waits for.

Every collective of a shard group is begun and waited for through its ``Progress``, which any thread may read. A
collective has a kind and a number, so the stall report never asks a device: one that a rank hasn't begun isn't over.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

from .failed_ranks import SAME_CALLS, LostRank, lost_rank_error
from .process_groups import GroupContext
from .work import PeerError, Work

REDUCTION, GATHER, NORM = "reduction", "gather", "sum of the norm"
AGREEMENT, MESSAGE, BROADCAST = "agreement", "presence map", "broadcast"
KINDS = (REDUCTION, GATHER, NORM, AGREEMENT, MESSAGE, BROADCAST)

_LISTED = 24  # names of parameters in a message, at most
# What the errors of gloo, NCCL and control pipes say of a timeout, which has no type of its own.
_TIMED_OUT = re.compile(r"[Tt]imed? ?out|within \S+ s$")

T = TypeVar("T")


class About(NamedTuple):
    """The parameters that a collective carries, for messages.

    Attributes:
        records: the parameters' records, each with its ``name``.
        bucket: the bucket's place in the plan; None: it isn't one bucket.
    """

    records: Sequence[Any]
    bucket: int | None = None


class Collective(NamedTuple):
    """A collective that this rank has begun, with its number among all of its kind.

    All ranks begin the same collectives of a kind in the same order. So a rank has come to one if it has begun more
    of its kind.
    """

    kind: str
    serial: int
    step: int
    micro_batch: int
    about: About | None

    def __str__(self) -> str:
        when = f"step {self.step + 1}"
        if self.kind == REDUCTION:
            when += f", micro-batch {self.micro_batch + 1}"
        if self.about is None:
            return f"{self.kind} {self.serial} ({when})"
        what = self.kind if self.about.bucket is None else f"{self.kind} of bucket {self.about.bucket}"
        return f"{what} ({when}): {listed([record.name for record in self.about.records])}"


class Progress:
    """Counts the collectives that this rank has begun, and knows the one that it waits for.

    Attributes:
        step: the number of steps that have ended.
        micro_batch: the number of gradient syncs that were closed in this step.
        begun: the number of collectives of each kind that were begun.
        waits: the number of times that the host has begun to wait.
        missing: names the missing ranks where a stall has been reported; else empty.
        process: the PID of the process that joined the group.
        left: this rank begins no more collectives, so no rank misses it.
        under_way: the waits of the hosts' collectives that haven't been waited for, by kind and number.
    """

    def __init__(self, context: GroupContext) -> None:
        self.step = 0
        self.micro_batch = 0
        self.waits = 0
        self.begun = dict.fromkeys(KINDS, 0)
        self.missing = ""
        self.left = False
        self.under_way: dict[tuple[str, int], Callable[[], Any]] = {}
        self._waiting: list[tuple[Collective, int]] = []  # with the thread that waits, the latest last
        self.process = os.getpid()
        self._context = context
        self._queued: deque[Collective] = deque(maxlen=256)

    @property
    def waits_for(self) -> Collective | None:
        """Return the collective that the host waits for; None: it waits for none."""
        return next((collective for collective, _ in self._waiting[-1:]), None)

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the one that joined the group."""
        return os.getpid() != self.process

    def check_process(self, doing: object) -> None:
        """Raise ``RuntimeError`` in a fork of the process that joined the group."""
        if self.is_forked:
            raise RuntimeError(
                f"{doing}: expected the process that constructed the optimizer ({self.process}), got a fork of it "
                f"({os.getpid()}), which would talk to the other ranks in its name: construct one there, over a "
                "process group of its own"
            )

    def start(self, kind: str, about: About | None, begin: Callable[..., Work[T]], *args: Any) -> Work[T]:
        """Begin a collective, count it, and return its work, which is waited for by ``wait``. Communicates.

        Raises:
            LostRank: a rank's process has ended, or an earlier wait was in vain.
            RuntimeError: the process group has been destroyed, or this process is a fork.
        """
        if self._context.lost or os.getpid() != self.process:
            self._refuse(kind)
        self._context.begun += kind == REDUCTION
        if not self._context.is_alive:
            _ = self._context.group  # raises
        serial = self.begun[kind]
        self.begun[kind] = serial + 1
        collective = Collective(kind, serial, self.step, self.micro_batch, about)
        try:
            work = begin(*args)
        except RuntimeError as error:
            self._raise_if_lost(error, collective)
            self.begun[kind] = serial
            self._context.begun -= kind == REDUCTION
            raise
        on_device = bool(work.tensors) and not work.tensors[0].is_cpu
        if not on_device:
            self.under_way[kind, serial] = work.wait
        work.wait = partial(self.wait, collective, on_device, work.wait)
        return work

    def run(self, kind: str, act: Callable[[], T]) -> T:
        """Run a collective for which the host waits at once, by ``act``, and return its result. Communicates."""
        work: Work[T] = self.start(kind, None, Work, act)
        return work.wait()

    def wait(self, collective: Collective, on_device: bool, act: Callable[[], T]) -> T:
        """Wait for a collective by ``act``, and return its result; raise ``LostRank`` if a rank has ended.

        After a wait in vain, a later collective of this rank would pair up with an earlier one of another rank. So no
        optimizer over the process group communicates any more.

        Raises:
            LostRank: the process of another rank has ended, or an earlier wait was in vain.
            RuntimeError: another rank hasn't come in time, or this process is a fork.
        """
        if self._context.lost or os.getpid() != self.process:
            self._refuse(collective)
        self._waiting.append(waiting := (collective, get_ident()))
        self.waits += 1
        self.under_way.pop((collective.kind, collective.serial), None)
        try:
            return act()
        except RuntimeError as error:
            self._raise_if_lost(error, collective)
            if _TIMED_OUT.search(str(error)):
                self._context.lost = message = self._in_vain(collective, error)
                raise RuntimeError(message) from error
            raise
        finally:
            self._waiting.remove(waiting)
            if on_device:
                self._queued.append(collective)

    def _refuse(self, doing: object) -> NoReturn:
        """Raise ``RuntimeError`` in a fork, else ``LostRank``: a rank was lost, or waited for in vain, before.

        Others may wait for the end of this rank.
        """
        self.check_process(doing)
        raise LostRank(self._context.lost)

    def _raise_if_lost(self, error: RuntimeError, collective: Collective) -> None:
        """Raise ``LostRank`` if ``error`` comes from another rank's end, and keep its message for later calls."""
        what = f"{called(sys._getframe())}, in the {collective}" + (f". {self.missing}" if self.missing else "")
        lost = lost_rank_error(error, self._context.group, what)
        if lost is not None:
            self._context.lost = str(lost)
            raise lost from error

    def _in_vain(self, collective: Collective, error: RuntimeError) -> str:
        """Return the message for a wait that ended without the other ranks' part."""
        why = str(error)
        if isinstance(error, PeerError):
            why = f"nothing has come from rank {error.rank} within the process group's timeout"
        missing = f". {self.missing}" if self.missing else ""
        return (
            f"{called(sys._getframe())}: every rank calls it, and this one has waited in vain for the {collective}: "
            f"{why}{missing}: {SAME_CALLS}"
        )

    def queued(self) -> list[Collective]:
        """Return the collectives that were last given to a device, some of which may be over."""
        return list(self._queued)

    def __str__(self) -> str:
        for collective, _ in self._waiting[-1:]:
            return f"waits for the {collective}, in {self.call}"
        return f"outside of the optimizer, after {self.step} steps"

    @property
    def call(self) -> str:
        """Return the name of the method in which the host waits for a collective; empty: it waits for none."""
        return next((called(sys._current_frames().get(thread)) for _, thread in self._waiting[-1:]), "")


def called(frame: FrameType | None) -> str:
    """Return the name of this package's method that the user's code has called, for messages."""
    name, package = "", __name__.partition(".")[0] + "."
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(package):
            name = frame.f_code.co_name
        frame = frame.f_back
    return "LowLevelZeroOptimizer" if name == "__init__" else name


def listed(names: Sequence[str]) -> str:
    """Return the first of ``names``, and the number of the others, as text for a message."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
