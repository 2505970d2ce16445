"""Messages by tag between simulated ranks, as gloo has them.

Those of one tag between two ranks come in the order of sending, those of different tags in any. A send ends when the
peer has posted its receive. The data moves at a moment that the seed draws, between both sides' posts and the moment in
which one of them sees its end: who writes to a tensor too early, or reads it, gets wrong numbers. A receive whose work
is dropped before its message comes stops all that comes from that peer afterwards, as gloo stops reading then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from .pending import PROMPT, Pending, apart, closed
from .scheduler import Scheduler

# Group, sender, receiver (ranks in the group), tag.
Channel: TypeAlias = tuple[str, int, int, int]


@dataclass(eq=False)
class Transfer(Pending):
    """One message, from its first side's post on.

    Attributes:
        source, sink: the tensors; None: that side hasn't come yet.
        held: it doesn't come before nobody can go on without it.
        dropped: nobody has the receiver's work any more.
        lost: it comes after one that was dropped, and is never read.
        over: the data has moved.
        broken: a side's process has ended before the other side came.
    """

    source: Tensor | None = None
    sink: Tensor | None = None
    held: bool = False
    dropped: bool = False
    lost: bool = False
    over: bool = False
    broken: str = ""

    def is_ready(self, asked: dict[int, bool] | None = None) -> bool:
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
                if self.source.dtype == self.sink.dtype and self.source.shape == self.sink.shape:
                    self.sink.copy_(self.source)
                else:
                    self.sink.view(-1).view(torch.uint8).copy_(self.source.contiguous().view(-1).view(torch.uint8))
            self.over = True
            self.source = self.sink = None


class Messages:
    """All that are under way.

    Args:
        scheduler: hands the baton over.
        dead: global ranks whose process has ended.
        log: of all that is sent.
        fail: ends the simulation.

    Attributes:
        sent: by global rank, how many messages it has sent.
        hold: a global rank, and which one of the messages that it sends is held back; None: none is.
        tells: works tell when they have ended, as the seed has it; else who has waited alone knows, as with gloo today.
    """

    def __init__(self, scheduler: Scheduler, dead: set[int], log: list[object], fail: Callable[[str], None]) -> None:
        self.scheduler, self._dead, self._log, self._fail = scheduler, dead, log, fail
        self.tells = scheduler.random() < PROMPT
        self.sent: dict[int, int] = {}
        self.hold: tuple[int, int] | None = None
        self._held: list[Transfer] = []
        self._watched: set[ref[Message]] = set()  # works that may be freed soon
        self._unread: set[tuple[str, int, int]] = set()  # group, sender and receiver of whom nothing is read any more
        self._sends: dict[Channel, deque[Transfer]] = {}
        self._receives: dict[Channel, deque[Transfer]] = {}
        self._ends: dict[Channel, tuple[int, int]] = {}

    def send(self, channel: Channel, ends: tuple[int, int], tensor: Tensor) -> Message:
        """Post a message; ``ends``: global ranks of its sender and receiver."""
        number = self.sent.get(ends[0], 0)
        self.sent[ends[0]] = number + 1
        transfer = self._post(self._sends, self._receives, channel, ends)
        transfer.source = tensor
        if (ends[0], number) == self.hold:
            transfer.held = True
            self._held.append(transfer)
        self._log.append((channel, tensor.numel()))
        return self._posted(transfer, channel, False)

    def receive(self, channel: Channel, ends: tuple[int, int], tensor: Tensor) -> Message:
        """Post where a message goes."""
        transfer = self._post(self._receives, self._sends, channel, ends)
        transfer.sink = tensor
        return self._posted(transfer, channel, True)

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
            if rank in self._dead:
                transfer.broken = closed(rank)
        self._ends[channel] = ends
        own.setdefault(channel, deque()).append(transfer)
        return transfer

    def _posted(self, transfer: Transfer, channel: Channel, receives: bool) -> Message:
        self._follow(transfer, channel)
        if transfer.matched():
            source, sink = transfer.source, transfer.sink
            assert source is not None
            assert sink is not None
            if source.numel() * source.element_size() != sink.numel() * sink.element_size():
                self._fail(f"a message of {_described(source)} meets a receive of {_described(sink)}")
            if self.scheduler.random() < PROMPT and not transfer.lost:
                transfer.finish()
        self.scheduler.may_pause()
        return Message(self, transfer, channel, receives)

    def _follow(self, transfer: Transfer, channel: Channel) -> None:
        """Lose what comes after a dropped one from the same sender; and that one itself, when it comes."""
        if self._unread:
            transfer.lost = channel[:3] in self._unread
        if transfer.dropped and transfer.matched():
            self._unread.add(channel[:3])
            transfer.lost = True

    def dropped_with(self, work: Message, transfer: Transfer, channel: Channel) -> None:
        """Drop a message when its receiver's ``work`` is freed."""

        def drop(freed: ref[Message]) -> None:
            self._watched.discard(freed)
            if not transfer.over:
                self._drop(transfer, channel)

        self._watched.add(ref(work, drop))

    def _drop(self, transfer: Transfer, channel: Channel) -> None:
        """Nobody has the receiver's work any more: where it comes gloo stops reading from its sender."""
        transfer.dropped = True
        if transfer.source is not None:
            self._unread.add(channel[:3])
            transfer.lost = True

    def relieve(self) -> bool:
        """Nobody can go on: let held messages come; whether there were any."""
        held, self._held = self._held, []
        for transfer in held:
            transfer.held = False
        return bool(held)

    def bury(self, rank: int) -> None:
        """The process of a global ``rank`` has ended: break what it hasn't taken part in yet."""
        for posted in (self._sends, self._receives):
            for channel, transfers in posted.items():
                if rank in self._ends[channel]:
                    for transfer in transfers:
                        transfer.broken = closed(rank)

    def unmatched(self) -> list[str]:
        """Messages whose other side never came."""
        return [
            f"{kind} on {name}: rank {sender} to rank {receiver}, tag {tag}"
            for kind, posted in (("send", self._sends), ("receive", self._receives))
            for (name, sender, receiver, tag), transfers in posted.items()
            for _ in transfers
        ]


class Message:
    """One side of a message under way, as torch's callers know a work.

    Args:
        messages: all that are under way.
        transfer: the message.
        channel: what it is on.
        receives: it is the receiver's.
    """

    __slots__ = ("__weakref__", "_channel", "_messages", "_receives", "_scheduler", "_transfer", "_waited")

    def __init__(self, messages: Messages, transfer: Transfer, channel: Channel, receives: bool) -> None:
        self._messages, self._scheduler = messages, messages.scheduler
        self._transfer, self._channel, self._receives = transfer, channel, receives
        self._waited = False

    def __del__(self) -> None:
        """Let it be known, where a receiver has no other.

        The garbage collector calls this also for a work that the optimizer's own ``__del__`` hands to a thread. Such a
        work lives on, and is dropped later, or never.
        """
        if self._receives and not self._transfer.over:
            self._messages.dropped_with(self, self._transfer, self._channel)

    def _is_ready(self) -> bool:
        transfer = self._transfer
        if transfer.lost and self._receives:
            return bool(transfer.broken)
        return transfer.is_ready()

    def _finish(self) -> None:
        if not self._transfer.lost:
            self._transfer.finish()

    def wait(self, timeout: Any = None) -> bool:
        """Return when it has gone, or come."""
        self._scheduler.wait(self._is_ready)
        self._waited = True
        if self._transfer.broken:
            raise RuntimeError(self._transfer.broken)
        self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether it is seen to have ended, be it by an error, which ``wait`` raises: the seed says when that is."""
        self._scheduler.pause()
        if not self._messages.tells:
            return self._waited
        if self._is_ready() and (self._transfer.over or self._scheduler.random() < PROMPT):
            if not self._transfer.broken:
                self._finish()
            return True
        return False


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
