"""Collectives of simulated ranks, as NCCL has them.

Each communicator runs what it is given in issue order. Where two ranks give it different ones the simulation ends,
naming both.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch.distributed as dist

from lowlevel_zero.communication.progress import Progress

from .pending import PROMPT, Pending, apart, closed
from .scheduler import Scheduler

_FRAMES = 24  # of a stack that may have to be told


@dataclass(eq=False)
class Part:
    """What a rank has given a collective.

    Attributes:
        tensors: what it reads and writes.
        stream, position: of a simulated device, which comes first; None: nothing does.
    """

    tensors: Any
    stream: Any = None
    position: int = 0

    def is_ready(self, asked: dict[int, bool]) -> bool:
        """Whether the stream can come to that position."""
        return self.stream is None or self.stream.is_ready(self.position, asked)


class Slot(Pending):
    """One collective of a communicator.

    Args:
        what: kind, sizes and so on, as the first rank that came has them.
        first: that rank.
        before: the communicator's collective before this one.
        communicator: whose it is.
        dead: global ranks whose process has ended.

    Attributes:
        where: the first rank's stack.
        label: which collective of which of the package's shard groups it is; empty: nobody has said.
        parts: what each rank has given, by rank.
        over: the data has moved.
    """

    def __init__(
        self, what: tuple[Any, ...], first: int, before: Slot | None, communicator: Communicator, dead: set[int]
    ) -> None:
        self.what, self.first = what, first
        self.where = frames()
        self.label = ""
        self.parts: dict[int, Part] = {}
        self.run: Callable[[Sequence[Any]], None] = lambda _: None
        self.over = False
        self._before, self._communicator, self._dead = before, communicator, dead

    def is_whole(self) -> bool:
        """Whether all ranks have come."""
        return len(self.parts) == len(self._communicator.members)

    @property
    def broken(self) -> str:  # type: ignore[override]
        """Why it will never end: a rank has ended without giving its part."""
        if self.over or self.is_whole():
            return ""
        lost = sorted(self._dead.intersection(self._communicator.members))
        return closed(lost[0]) if lost else ""

    def is_ready(self, asked: dict[int, bool]) -> bool:
        """All have come, what comes before it on this communicator is ready, and so are the streams that feed it."""
        if self.over or self.broken:
            return True
        if id(self) not in asked:
            asked[id(self)] = False  # while it is being found out: what waits for itself is never ready
            asked[id(self)] = (
                self.is_whole()
                and (self._before is None or self._before.is_ready(asked))
                and all(part.is_ready(asked) for part in self.parts.values())
            )
        return asked[id(self)]

    def finish(self) -> None:
        """Move the data, after that of all before it."""
        if self.over:
            return
        if self.broken:
            raise RuntimeError(self.broken)
        self.over = True
        if self._before is not None:
            self._before.finish()
            self._before = None
        for part in self.parts.values():
            if part.stream is not None:
                part.stream.advance(part.position)
        with apart():
            self.run([self.parts[rank].tensors for rank in range(len(self.parts))])
        self.parts = {}


class Communicator:
    """The collectives of one group.

    Args:
        name: of the group.
        members: global ranks.
    """

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self.name = name
        self.members = members
        self.slots: dict[int, Slot] = {}
        self.last: Slot | None = None
        self.issued = dict.fromkeys(range(len(members)), 0)


class Collectives:
    """All communicators.

    Args:
        scheduler: hands the baton over.
        dead: global ranks whose process has ended.
        log: of all that is issued.
        fail: ends the simulation.
    """

    def __init__(self, scheduler: Scheduler, dead: set[int], log: list[object], fail: Callable[[str], None]) -> None:
        self.scheduler, self._dead, self._log, self._fail = scheduler, dead, log, fail
        self._communicators: dict[str, Communicator] = {}

    def issue(
        self,
        name: str,
        members: Sequence[int],
        rank: int,
        what: tuple[Any, ...],
        part: Any,
        run: Callable[[Sequence[Any]], None],
        on_device: bool,
    ) -> Work:
        """Give a communicator the next collective of ``rank``.

        Args:
            name: of the communicator's group.
            members: global ranks of that group.
            rank: in the group.
            what: has to be the same on all ranks.
            part: this rank's tensors.
            run: moves the data, given everybody's part.
            on_device: streams wait for it.
        """
        made = self._communicators.get(name)
        communicator = made or self._communicators.setdefault(name, Communicator(name, members))
        serial = communicator.issued[rank]
        communicator.issued[rank] = serial + 1
        slot = communicator.slots.get(serial)
        if slot is None:
            slot = Slot(what, rank, communicator.last, communicator, self._dead)
            communicator.slots[serial] = communicator.last = slot
        label = _label() if on_device else ""
        if slot.what != what or (slot.label and label and slot.label != label):
            first, own = f"rank {members[slot.first]}", f"rank {members[rank]}"
            self._fail(
                f"collective {serial} on {name}: {first} is at {_told(slot.what)} {slot.label}, {own} at {_told(what)} "
                f"{label}\n--- {first}:\n{told_frames(slot.where)}--- {own}:\n{told_frames(frames())}"
            )
        actor = self.scheduler.running
        stream = None if actor is None else actor.stream
        slot.label = slot.label or label
        slot.parts[rank] = Part(part, stream, 0 if stream is None else stream.end)
        slot.run = run
        self._log.append((name, serial, rank, str(what)))
        if slot.is_whole():
            del communicator.slots[serial]
            if self.scheduler.random() < PROMPT and slot.is_ready({}):
                slot.finish()
        self.scheduler.may_pause()
        return Work(self.scheduler, slot, on_device)


class Work(dist.Work):
    """A collective under way, as torch's callers know it.

    Args:
        scheduler: hands the baton over.
        what: it.
        on_device: a stream waits for it, where one is current, and nobody asks how far it is.
    """

    def __init__(self, scheduler: Scheduler, what: Pending, on_device: bool = False) -> None:
        super().__init__()
        self._scheduler, self._what, self._on_device = scheduler, what, on_device
        self._seen = False

    def wait(self, timeout: Any = None) -> bool:
        """Return when it has ended, or have the current stream wait."""
        actor = self._scheduler.running
        if self._on_device and actor is not None and actor.stream is not None:
            actor.stream.add(self._what)
            return True
        self._scheduler.wait(lambda: self._what.is_ready({}))
        if self._what.broken:
            raise RuntimeError(self._what.broken)
        self._what.finish()
        return True

    def is_completed(self) -> bool:
        """Whether it is seen to have ended, be it by an error, which ``wait`` raises: the seed says when that is."""
        if self._on_device:
            return True
        self._scheduler.pause()
        if not self._seen and self._what.is_ready({}) and self._scheduler.random() < PROMPT:
            self._seen = True
            if not self._what.broken:
                self._what.finish()
        return self._seen


def _told(what: tuple[Any, ...]) -> str:
    return " ".join(map(str, what))


def _label() -> str:
    """The collective that the package has begun on this thread, as its shard group's ``Progress`` is told of it."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not Progress.start.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or frame.f_back is None:
        return ""
    group = frame.f_back.f_locals.get("self")
    return f"({frame.f_locals.get('collective')}, of optimizer {getattr(group, 'number', '?')})"


def frames() -> list[tuple[CodeType, int]]:
    """Where the current thread is, the outermost frame first; cheap."""
    found, frame = [], sys._getframe(1)
    while frame is not None and len(found) < _FRAMES:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


def told_frames(found: list[tuple[CodeType, int]]) -> str:
    """The same in words."""
    lines = [(code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line)) for code, line in found]
    return "".join(traceback.format_list([traceback.FrameSummary(*each[:3], line=each[3]) for each in lines]))
