"""The network: messages by tag between simulated ranks, and collectives in the order in which they are issued.

Messages are gloo's: those of one tag between two ranks come in the order of sending, those of different tags in any. A
send ends when the peer has posted its receive. The data moves at a moment that the seed draws, between both sides'
posts and the moment in which one of them sees its end: who writes to a tensor too early, or reads it, gets wrong
numbers.

Collectives are NCCL's: each communicator runs what it is given in issue order. Where two ranks give it different ones
the simulation ends, naming both.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowlevel_zero.communication.progress import Progress

from .outcome import SimulationEnded
from .scheduler import Scheduler

_PROMPT = 0.5  # how likely a look finds what is there
_FRAMES = 24  # of a stack that may have to be told

# Group, sender, receiver (ranks in the group), tag.
Channel: TypeAlias = tuple[str, int, int, int]


class Pending:
    """What ends when other ranks have done their part."""

    broken = ""  # why it never will

    def is_ready(self, asked: dict[int, bool]) -> bool:
        """Whether it can end, or be seen to be broken; without side effects.

        ``asked``: by id, what has been found out of others in the same breath.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Let it end, once."""
        raise NotImplementedError


@dataclass(eq=False)
class Transfer(Pending):
    """One message, from its first side's post on.

    Attributes:
        source, sink: the tensors; None: that side hasn't come yet.
        held: it doesn't come before nobody can go on without it.
        over: the data has moved.
        broken: a side's process has ended before the other side came.
    """

    source: Tensor | None = None
    sink: Tensor | None = None
    held: bool = False
    over: bool = False
    broken: str = ""

    def is_ready(self, asked: dict[int, bool]) -> bool:
        """Both sides have come and nothing holds it."""
        return self.over or self.matched() or bool(self.broken)

    def matched(self) -> bool:
        """Whether both sides have come and nothing holds it."""
        return self.source is not None and self.sink is not None and not self.held

    def finish(self) -> None:
        """Move the data."""
        if not self.over:
            assert self.source is not None
            assert self.sink is not None
            with apart():
                self.sink.view(-1).view(torch.uint8).copy_(self.source.contiguous().view(-1).view(torch.uint8))
            self.over = True
            self.source = self.sink = None


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
        return _closed(lost[0]) if lost else ""

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


class Network:
    """What all ranks of a simulation share below their process groups.

    Attributes:
        scheduler: hands the baton over.
        mismatch: how two ranks' collectives differ; None: they don't.
        dead: global ranks whose process has ended.
        sent: by global rank, how many messages it has sent.
        hold: a global rank, and which one of the messages that it sends is held back; None: none is.
        log: all that was sent, for the trace.
        groups: all process groups of all ranks that live.
        memories, pipes: of all ranks, where they share memory; places in them stand for descriptors.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.mismatch: str | None = None
        self.dead: set[int] = set()
        self.sent: dict[int, int] = {}
        self.hold: tuple[int, int] | None = None
        self.log: list[object] = []
        self.memories: list[Any] = []
        self.pipes: list[Any] = []
        self.groups: WeakSet[Any] = WeakSet()
        self._held: list[Transfer] = []
        self._sends: dict[Channel, deque[Transfer]] = {}
        self._receives: dict[Channel, deque[Transfer]] = {}
        self._ends: dict[Channel, tuple[int, int]] = {}
        self._communicators: dict[str, Communicator] = {}

    # ---- messages ----

    def send(self, channel: Channel, ends: tuple[int, int], tensor: Tensor) -> Work:
        """Post a message; ``ends``: global ranks of its sender and receiver."""
        number = self.sent.get(ends[0], 0)
        self.sent[ends[0]] = number + 1
        transfer = self._post(self._sends, self._receives, channel, ends)
        transfer.source = tensor
        if (ends[0], number) == self.hold:
            transfer.held = True
            self._held.append(transfer)
        self.log.append((channel, tensor.numel()))
        return self._posted(transfer)

    def receive(self, channel: Channel, ends: tuple[int, int], tensor: Tensor) -> Work:
        """Post where a message goes."""
        transfer = self._post(self._receives, self._sends, channel, ends)
        transfer.sink = tensor
        return self._posted(transfer)

    def _post(
        self,
        own: dict[Channel, deque[Transfer]],
        others: dict[Channel, deque[Transfer]],
        channel: Channel,
        ends: tuple[int, int],
    ) -> Transfer:
        waiting = others.get(channel)
        if waiting:
            return waiting.popleft()
        transfer = Transfer()
        for rank in ends:
            if rank in self.dead:
                transfer.broken = _closed(rank)
        self._ends[channel] = ends
        own.setdefault(channel, deque()).append(transfer)
        return transfer

    def _posted(self, transfer: Transfer) -> Work:
        if transfer.matched():
            source, sink = transfer.source, transfer.sink
            assert source is not None
            assert sink is not None
            if source.numel() * source.element_size() != sink.numel() * sink.element_size():
                self.fail(f"a message of {_described(source)} meets a receive of {_described(sink)}")
            if self.scheduler.random() < _PROMPT:
                transfer.finish()
        self.scheduler.may_pause()
        return Work(self.scheduler, transfer)

    def relieve(self) -> bool:
        """Nobody can go on: let held messages come; whether there were any."""
        held, self._held = self._held, []
        for transfer in held:
            transfer.held = False
        return bool(held)

    def bury(self, rank: int) -> None:
        """The process of a global ``rank`` has ended: break what it hasn't taken part in yet."""
        self.dead.add(rank)
        for posted in (self._sends, self._receives):
            for channel, transfers in posted.items():
                if rank in self._ends[channel]:
                    for transfer in transfers:
                        transfer.broken = _closed(rank)

    def unmatched(self) -> list[str]:
        """Messages whose other side never came."""
        return [
            f"{kind} on {name}: rank {sender} to rank {receiver}, tag {tag}"
            for kind, posted in (("send", self._sends), ("receive", self._receives))
            for (name, sender, receiver, tag), transfers in posted.items()
            for _ in transfers
        ]

    # ---- collectives ----

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
            slot = Slot(what, rank, communicator.last, communicator, self.dead)
            communicator.slots[serial] = communicator.last = slot
        label = _label() if on_device else ""
        if slot.what != what or (slot.label and label and slot.label != label):
            first, own = f"rank {members[slot.first]}", f"rank {members[rank]}"
            self.fail(
                f"collective {serial} on {name}: {first} is at {_told(slot.what)} {slot.label}, {own} at {_told(what)} "
                f"{label}\n--- {first}:\n{told_frames(slot.where)}--- {own}:\n{told_frames(frames())}"
            )
        actor = self.scheduler.running
        stream = None if actor is None else actor.stream
        slot.label = slot.label or label
        slot.parts[rank] = Part(part, stream, 0 if stream is None else stream.end)
        slot.run = run
        self.log.append((name, serial, rank, str(what)))
        if slot.is_whole():
            del communicator.slots[serial]
            if self.scheduler.random() < _PROMPT and slot.is_ready({}):
                slot.finish()
        self.scheduler.may_pause()
        return Work(self.scheduler, slot, on_device)

    def fail(self, why: str) -> None:
        """End the simulation: ranks have given each other what doesn't belong together."""
        self.mismatch = self.mismatch or why
        self.scheduler.ending = True
        raise SimulationEnded


class Work(dist.Work):
    """What is under way, as torch's callers know it.

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
        if not self._seen and self._what.is_ready({}) and self._scheduler.random() < _PROMPT:
            self._seen = True
            if not self._what.broken:
                self._what.finish()
        return self._seen


def _closed(rank: int) -> str:
    return f"[simulated network] Connection closed by peer [rank {rank}]"


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _told(what: tuple[Any, ...]) -> str:
    return " ".join(map(str, what))


@contextmanager
def apart() -> Iterator[None]:
    """Compute for no rank: without its autograd, its counters and its streams."""
    with torch.no_grad(), _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        yield


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
