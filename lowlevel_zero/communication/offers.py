"""Offers: sums that live once a host, each row in the memory of the rank that summed it, for others to copy.

Nobody waits for an offer: who looks at a row that its owner hasn't summed yet sums it too, to the same bits. So a rank
keeps its peers' wires until it has all their offers, or can't look any more; and likewise keeps offers until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from threading import RLock

import torch
from torch import Tensor

from .arena import Arena, OthersArena, Slot
from .exchange import sum_rows
from .mail import Header, Subject
from .rows import Rows


class SharedSum:
    """A reduction for which all ranks have packed a wire, as one of them knows it.

    Attributes:
        about: what this rank's offer is about.
        slot: of this rank's wire.
        theirs: of its peers', by rank.
        wires: all ranks', ``[size, row]`` each, in rank order; empty: this rank has finished with them.
        offers: where sums of rows lie, by rank.
        forgotten: nobody here can look any more.
    """

    __slots__ = ("about", "forgotten", "offers", "slot", "theirs", "wires")

    def __init__(self, about: Subject, slot: Slot, theirs: dict[int, int], wires: list[Tensor]) -> None:
        self.about = about
        self.slot = slot
        self.theirs = theirs
        self.wires = wires
        self.offers: dict[int, Header] = {}
        self.forgotten = False


class Offers:
    """All sums that this rank can look at, or has to answer for.

    Args:
        rank: this one.
        own: its arena.
        others: its peers', by rank.
    """

    def __init__(self, rank: int, own: Arena, others: Mapping[int, OthersArena]) -> None:
        self._rank = rank
        self._own = own
        self._others = others
        self._awaiting: list[SharedSum] = []
        self._lock = RLock()  # threads of several optimizers; again in the same one, where a collection frees another
        self._forgotten: deque[SharedSum] = deque()

    def offer(self, summed: SharedSum) -> Rows:
        """Sum this rank's row, and tell the others where it lies."""
        rows = [wire[self._rank] for wire in summed.wires]
        slot, row = self._own.lend(rows[0].numel(), rows[0].dtype, readers=len(self._others))
        sum_rows(rows, into=row)
        for arena in self._others.values():
            arena.mail.mention(summed.about, Header(slot.offset, slot.number))
        with self._lock:
            self._awaiting.append(summed)
        return OfferedRows(self, summed, row)

    def tidy(self) -> None:
        """See what has been offered, and tell the others what this rank has finished with."""
        if self._awaiting or self._forgotten:
            with self._lock:
                self._tidy()

    def _tidy(self) -> None:
        if self._awaiting:
            self._own.mail.collect()
            self._awaiting = [summed for summed in self._awaiting if not self._complete(summed)]
        while self._forgotten:
            summed = self._forgotten.popleft()
            summed.forgotten = True
            self._finish_wires(summed)
            for rank, header in summed.offers.items():
                self._others[rank].mail.tell_read(header.slot)

    def forget(self, summed: SharedSum) -> None:
        """Nobody can look at this one any more; may be called at any time, in the midst of anything."""
        self._forgotten.append(summed)

    def columns(self, summed: SharedSum, row: Tensor, start: int, count: int) -> Iterator[Tensor]:
        """Some of each row, ``[count]``, in rank order; ``row`` is this rank's. Only to be read, and at once."""
        self.tidy()
        for rank in range(len(self._others) + 1):
            if rank == self._rank:
                yield row[start : start + count]
            elif rank in summed.offers:
                offset = summed.offers[rank].offset + start * row.element_size()
                yield self._others[rank].view(offset, count, row.dtype)
            else:
                yield sum_rows([wire[rank, start : start + count] for wire in summed.wires])

    def _complete(self, summed: SharedSum) -> bool:
        """Whether all offers have come, so that nobody needs the wires."""
        for rank in self._others.keys() - summed.offers.keys():
            header = self._own.mail.take(summed.about._replace(sender=rank))
            if header is not None:
                summed.offers[rank] = header
                if summed.forgotten:
                    self._others[rank].mail.tell_read(header.slot)
        if len(summed.offers) < len(self._others):
            return False
        self._finish_wires(summed)
        return True

    def _finish_wires(self, summed: SharedSum) -> None:
        if summed.wires:
            summed.wires = []
            self._own.finish(summed.slot)
            for rank, slot in summed.theirs.items():
                self._others[rank].mail.tell_read(slot)


class OfferedRows(Rows):
    """This rank's row, which others may look at: to be written to once they can't any more; and theirs."""

    __slots__ = ("_offers", "_row", "_summed")

    writable = False

    def __init__(self, offers: Offers, summed: SharedSum, row: Tensor) -> None:
        self._offers = offers
        self._summed = summed
        self._row = row

    def __del__(self) -> None:
        self._offers.forget(self._summed)

    @property
    def at_hand(self) -> Tensor:
        """This rank's row."""
        return self._row

    @property
    def row(self) -> Tensor:
        """This rank's row."""
        return self._row

    def columns(self, start: int, count: int) -> Tensor:
        """Some of all rows, ``[size, count]``, copied when this is called."""
        return torch.stack(list(self._offers.columns(self._summed, self._row, start, count)))

    def add_to(self, total: Tensor) -> None:
        """Add them, without a copy in between."""
        for into, row in zip(total, self._offers.columns(self._summed, self._row, 0, total.shape[1]), strict=True):
            into.add_(row)

    def held(self) -> list[Tensor]:
        """This rank's row."""
        return [self._row]
