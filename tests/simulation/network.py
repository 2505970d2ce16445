"""The network: messages by tag between simulated ranks, and collectives in the order in which they are issued.

Messages are gloo's: those of one tag between two ranks come in the order of sending, those of different tags in any. A
send ends when the peer has posted its receive. The data moves at a moment that the seed draws, between both sides'
posts and the moment in which one of them sees its end: who writes to a tensor too early, or reads it, gets wrong
numbers.

Collectives are NCCL's: each communicator runs what it is given in issue order. Where two ranks give it different ones
the simulation ends, naming both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from .outcome import SimulationEnded
from .scheduler import Scheduler, stack

_PROMPT = 0.5  # how likely a look finds what is there

# Group, sender, receiver (ranks in the group), tag.
Channel: TypeAlias = tuple[str, int, int, int]


@dataclass(eq=False)
class Transfer:
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

    def matched(self) -> bool:
        """Whether both sides have come and nothing holds it."""
        return self.source is not None and self.sink is not None and not self.held

    def move(self) -> None:
        """Move the data, once."""
        if not self.over:
            assert self.source is not None
            assert self.sink is not None
            with torch.no_grad():
                self.sink.view(-1).view(torch.uint8).copy_(self.source.contiguous().view(-1).view(torch.uint8))
            self.over = True
            self.source = self.sink = None


@dataclass(eq=False)
class Slot:
    """One collective of a communicator.

    Attributes:
        what: kind, sizes and so on, as the first rank that came has them.
        first: that rank.
        where: its stack.
        parts: what each rank has given, by rank.
        over: the data has moved.
    """

    what: tuple[Any, ...]
    first: int
    where: Any
    parts: dict[int, Any] = field(default_factory=dict)
    over: bool = False


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
                transfer.move()
        self.scheduler.may_pause()
        return Work(self.scheduler, lambda: transfer.over or transfer.matched() or bool(transfer.broken), transfer)

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
    ) -> Work:
        """Give a communicator the next collective of ``rank``.

        Args:
            name: of the communicator's group.
            members: global ranks of that group.
            rank: in the group.
            what: has to be the same on all ranks.
            part: this rank's tensors.
            run: moves the data, given everybody's part.
        """
        made = self._communicators.get(name)
        communicator = made or self._communicators.setdefault(name, Communicator(name, members))
        serial = communicator.issued[rank]
        communicator.issued[rank] = serial + 1
        slot = communicator.slots.get(serial)
        if slot is None:
            slot = communicator.slots[serial] = Slot(what, rank, stack(None))
        if slot.what != what:
            self.fail(
                f"collective {serial} on {name}: rank {members[slot.first]} is at {_told(slot.what)}, rank "
                f"{members[rank]} at {_told(what)}\n--- rank {members[slot.first]}:\n{_stack(slot.where)}--- rank "
                f"{members[rank]}:\n{_stack(stack(None))}"
            )
        slot.parts[rank] = part
        self.log.append((name, serial, rank, str(what)))
        if len(slot.parts) == len(members):
            del communicator.slots[serial]
            if self.scheduler.random() < _PROMPT:
                _run(slot, run)
        self.scheduler.may_pause()
        everybody, dead = len(members), self.dead

        def ready() -> bool:
            return slot.over or len(slot.parts) == everybody or not dead.isdisjoint(members)

        return Work(self.scheduler, ready, _Collective(slot, run, members, dead))

    def fail(self, why: str) -> None:
        """End the simulation: ranks have given each other what doesn't belong together."""
        self.mismatch = self.mismatch or why
        self.scheduler.ending = True
        raise SimulationEnded


@dataclass(eq=False)
class _Collective:
    slot: Slot
    run: Callable[[Sequence[Any]], None]
    members: Sequence[int]
    dead: set[int]

    @property
    def broken(self) -> str:
        lost = sorted(self.dead.intersection(self.members))
        if self.slot.over or len(self.slot.parts) == len(self.members) or not lost:
            return ""
        return _closed(lost[0])

    def move(self) -> None:
        _run(self.slot, self.run)


def _run(slot: Slot, run: Callable[[Sequence[Any]], None]) -> None:
    if not slot.over:
        slot.over = True
        with torch.no_grad():
            run([slot.parts[rank] for rank in range(len(slot.parts))])
        slot.parts = dict.fromkeys(slot.parts)


class Work(dist.Work):
    """What is under way, as torch's callers know it.

    Args:
        scheduler: hands the baton over.
        ready: whether it can end; without side effects.
        what: ends it.
    """

    def __init__(self, scheduler: Scheduler, ready: Callable[[], bool], what: Transfer | _Collective) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._ready = ready
        self._what = what
        self._seen = False

    def wait(self, timeout: Any = None) -> bool:
        """Return when it has ended."""
        self._scheduler.wait(self._ready)
        self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether it is seen to have ended, be it by an error, which ``wait`` raises: the seed says when that is."""
        self._scheduler.pause()
        if not self._seen and self._ready() and self._scheduler.random() < _PROMPT:
            self._seen = True
            if not self._what.broken:
                self._what.move()
        return self._seen

    def _finish(self) -> None:
        if self._what.broken:
            raise RuntimeError(self._what.broken)
        self._what.move()
        self._seen = True


def _closed(rank: int) -> str:
    return f"[simulated network] Connection closed by peer [rank {rank}]"


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _told(what: tuple[Any, ...]) -> str:
    return " ".join(map(str, what))


def _stack(frames: Any) -> str:
    import traceback

    return "".join(traceback.format_list(frames[-12:]))
