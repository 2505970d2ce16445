"""Progress: how far this rank has come with one optimizer, in plain values that a watching thread may read.

The watching thread asks no device: what it did there could break a capture of a graph, or make a context on a device
that isn't this rank's. A collective that a device waits for can't be over while a rank hasn't begun it, and that the
ranks' counts tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

REDUCTION, GATHER, NORM, EXCHANGE = "reduction", "gather", "sum of the norm", "exchange of updates"
AGREEMENT, MESSAGE, BROADCAST = "agreement", "presence map", "broadcast"
KINDS = (REDUCTION, GATHER, NORM, EXCHANGE, AGREEMENT, MESSAGE, BROADCAST)

# Names of parameters that a message lists.
_LISTED = 24

T = TypeVar("T")


class Named(Protocol):
    """Anything with a name."""

    name: str


class About(NamedTuple):
    """Which parameters a collective carries.

    Attributes:
        records: the parameters, or those that ``members`` are indices into.
        members: None: all of ``records``.
        bucket: its place in the plan; None: it isn't one bucket.
    """

    records: Sequence[Named]
    members: Sequence[int] | None = None
    bucket: int | None = None

    def names(self) -> list[str]:
        """Of the parameters."""
        chosen = self.records if self.members is None else [self.records[index] for index in self.members]
        return [record.name for record in chosen]


class Place(NamedTuple):
    """A collective that this rank has begun: what it is, the how manyth of its kind, and in which step.

    All ranks begin the same collectives of a kind in the same order. So a rank has come to a place if it has begun
    more of that kind.
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

    Attributes:
        step: steps that have ended.
        micro_batch: rounds of reductions that have been closed in this step.
        begun: how many collectives of each kind have been begun.
        waits: how often the host has begun to wait.
    """

    def __init__(self) -> None:
        self.step = 0
        self.micro_batch = 0
        self.waits = 0
        self.begun = dict.fromkeys(KINDS, 0)
        self._waits_for: Place | None = None
        self._queued: deque[Place] = deque(maxlen=256)

    def begin(self, kind: str, about: About | None = None) -> Place:
        """This rank begins one more collective of ``kind``."""
        serial = self.begun[kind]
        self.begun[kind] = serial + 1
        return Place(kind, serial, self.step, self.micro_batch, about)

    def wait(self, place: Place, act: Callable[[], T], by_device: bool = False) -> T:
        """``act()``, which returns when the host has waited for ``place``, or, ``by_device``, a stream will have."""
        before, self._waits_for = self._waits_for, place
        self.waits += 1
        try:
            return act()
        finally:
            self._waits_for = before
            if by_device:
                self._queued.append(place)

    def waits_for(self) -> Place | None:
        """What the host waits for now; None: nothing. Any thread may ask."""
        return self._waits_for

    def queued(self) -> list[Place]:
        """What a device has been given to wait for, the latest last; it may be over. Any thread may ask."""
        return list(self._queued)

    def __str__(self) -> str:
        place = self.waits_for()
        return f"outside of the optimizer, after {self.step} steps" if place is None else f"waits for the {place}"


def listed(names: Sequence[str]) -> str:
    """As much of ``names`` as a message holds."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
