"""Progress: how far this rank has come with one optimizer, and what it waits for.

This is where diagnostics hang on: every collective of a shard group is begun and waited for through its ``Progress``.
Any thread may read it, and a subclass may look at a collective before it begins. A collective is known by its kind
and number, so that nobody has to ask a device about it: what a rank hasn't begun can't be over.
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
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from .backends.backend import PeerError
from .failed_ranks import LostRank, explained
from .process_groups import GroupContext
from .work import Work

REDUCTION, GATHER, NORM, EXCHANGE = "reduction", "gather", "sum of the norm", "exchange of updates"
AGREEMENT, MESSAGE, BROADCAST = "agreement", "presence map", "broadcast"
KINDS = (REDUCTION, GATHER, NORM, EXCHANGE, AGREEMENT, MESSAGE, BROADCAST)

_LISTED = 24  # names of parameters in a message, at most
# As gloo, NCCL and control pipes tell of it: nobody has a type for it.
_TIMED_OUT = re.compile(r"[Tt]imed? ?out|within \S+ s$")

T = TypeVar("T")


class Named(Protocol):
    """Anything with a name."""

    name: str


class About(NamedTuple):
    """Which parameters a collective carries.

    Attributes:
        records: the parameters.
        bucket: its place in the plan; None: it isn't one bucket.
    """

    records: Sequence[Named]
    bucket: int | None = None

    def names(self) -> list[str]:
        """Of the parameters."""
        return [record.name for record in self.records]


class Collective(NamedTuple):
    """A collective that this rank has begun: what it is, the how manyth of its kind, and in which step.

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
        return f"{what} ({when}): {listed(self.about.names())}"


class Progress:
    """How far this rank has come.

    Args:
        context: of the process group over whose ranks it communicates.

    Attributes:
        step: steps that have ended.
        micro_batch: gradient syncs that have been closed in this step.
        begun: how many collectives of each kind have been begun.
        waits: how often the host has begun to wait.
        missing: who isn't there yet, in words, where a stall has been reported; else empty.
        process: the number of the process that joined the group.
        left: this rank begins no more: nobody is to miss it.
        under_way: of each of the hosts' collectives that nobody has waited for yet, by kind and number, what does.
    """

    def __init__(self, context: GroupContext) -> None:
        self.step = 0
        self.micro_batch = 0
        self.waits = 0
        self.begun = dict.fromkeys(KINDS, 0)
        self.missing = ""
        self.left = False
        self.under_way: dict[tuple[str, int], Callable[[], Any]] = {}
        self._waiting: list[tuple[Collective, int]] = []  # and the thread that waits, the latest last
        self.process = os.getpid()
        self._context = context
        self._queued: deque[Collective] = deque(maxlen=256)
        self._lost: LostRank | None = None

    @property
    def waits_for(self) -> Collective | None:
        """The collective that the host waits for now, the latest of several threads; None: it waits for none."""
        return next((collective for collective, _ in self._waiting[-1:]), None)

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process that joined the group."""
        return os.getpid() != self.process

    def check_process(self, doing: object) -> None:
        """Raise ``RuntimeError`` in a fork of the process that joined the group, which is the rank."""
        if os.getpid() != self.process:
            raise RuntimeError(
                f"{doing}: expected the process that constructed the optimizer ({self.process}), got a fork of it "
                f"({os.getpid()}), which would talk to the other ranks in its name: construct one there, over a "
                "process group of its own"
            )

    def start(
        self, kind: str, about: About | None, tensors: Sequence[Tensor], begin: Callable[..., Work[T]], *args: Any
    ) -> Work[T]:
        """Begin one more collective of ``kind``, that of ``tensors``; its work's ``wait`` is the one below.

        Raises:
            LostRank: the process of another rank has ended.
            RuntimeError: the process group has been destroyed, or this process is a fork.
        """
        if os.getpid() != self.process:
            self.check_process(kind)
        if not self._context.is_alive:
            _ = self._context.group  # raises
        serial = self.begun[kind]
        self.begun[kind] = serial + 1
        collective = Collective(kind, serial, self.step, self.micro_batch, about)
        if self._lost is not None:  # others may wait for this one's end
            raise LostRank(str(self._lost))
        try:
            work = begin(*args)
        except RuntimeError as error:
            self._raise_if_lost(error, collective)
            self.begun[kind] = serial
            raise
        on_device = bool(work.tensors) and not work.tensors[0].is_cpu
        if not on_device:
            self.under_way[kind, serial] = work.wait
        work.wait = partial(self.wait, collective, on_device, work.wait)
        return work

    def wait(self, collective: Collective, on_device: bool, act: Callable[[], T]) -> T:
        """``act()``, which returns when the host has waited for it, or, ``on_device``, a stream will have.

        Raises:
            LostRank: the process of another rank has ended.
            RuntimeError: another rank hasn't come in time, and this one's call; or this process is a fork.
        """
        if os.getpid() != self.process:
            self.check_process(collective)
        if self._lost is not None:
            raise LostRank(str(self._lost))
        self._waiting.append(waiting := (collective, get_ident()))
        self.waits += 1
        self.under_way.pop((collective.kind, collective.serial), None)
        try:
            return act()
        except RuntimeError as error:
            self._raise_if_lost(error, collective)
            if _TIMED_OUT.search(str(error)):
                raise RuntimeError(self._in_vain(collective, error)) from error
            raise
        finally:
            self._waiting.remove(waiting)
            if on_device:
                self._queued.append(collective)

    def _raise_if_lost(self, error: RuntimeError, collective: Collective) -> None:
        """Name whom this rank has lost, if ``error`` comes of that."""
        lost = explained(error, self._context.group, f"{collective}. {self.missing}" if self.missing else collective)
        if lost is not None:
            self._lost = lost
            raise lost from error

    def _in_vain(self, collective: Collective, error: RuntimeError) -> str:
        why = str(error)
        if isinstance(error, PeerError):
            why = f"nothing has come from rank {error.rank} within the process group's timeout"
        missing = f". {self.missing}" if self.missing else ""
        return (
            f"{called(sys._getframe())}: every rank calls it, and this one has waited in vain for the {collective}: "
            f"{why}{missing}: let every rank make the same calls in the same order"
        )

    def queued(self) -> list[Collective]:
        """What a device has been given to wait for, the latest last; it may be over. Any thread may ask."""
        return list(self._queued)

    def __str__(self) -> str:
        for collective, thread in self._waiting[-1:]:
            return f"waits for the {collective}, in {called(sys._current_frames().get(thread))}"
        return f"outside of the optimizer, after {self.step} steps"


def called(frame: FrameType | None) -> str:
    """The name of the method that the caller's code has called: the outermost one of this package."""
    name, package = "", __name__.partition(".")[0] + "."
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(package):
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


def listed(names: Sequence[str]) -> str:
    """As much of ``names`` as a message holds."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
