"""SharedMemory: wires between the processes of one host, which read them right where their peers packed them.

A rank packs a wire into a slot of its arena and mails each peer a header: where it lies. That letter is also
what orders memory: whoever has received it sees what was written before it was sent. Who has read the wire says
so, and when all have, the slot is used again. Nobody ever waits for that: while none is known to be free, wires
get fresh ones, since a rank may be a whole backward ahead of its peers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import EllipsisType
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .arena import Address, Arena, OthersArena, Slot
from .exchange import GATHER, REDUCE, Exchange, sum_rows
from .mail import Header, Subject
from .process_group import timeout_of
from .sequel import OnThread
from .transport import Pending, keep_own, lay_end_to_end

T = TypeVar("T")

# Bytes of idle slots that are kept from step to step, at most, eight wires of the default size: getting memory anew
# takes three times as long as packing it.
KEPT = 32 * 2**20


class Packed(NamedTuple):
    """A wire in a slot.

    Attributes:
        wire: the wire.
        slot: where it is.
    """

    wire: Tensor
    slot: Slot


class Pool:
    """The arenas of all ranks of a process group, as one of them sees them; all of its optimizers use it.

    Args:
        group: the ranks, all on one host.
        own: this rank's arena.
        addresses: of every rank's, in rank order.

    Attributes:
        own: this rank's.
        others: its peers', by rank.
        late: threads that wait for room in peers' pipes, by rank.
        timeout: seconds to wait for a peer.

    Raises:
        OSError, ValueError: a peer's arena can't be reached from here.
    """

    def __init__(self, group: dist.ProcessGroup, own: Arena, addresses: Sequence[Address]) -> None:
        rank, self.timeout = dist.get_rank(group), timeout_of(group)
        self.own = own
        others = {of: address for of, address in enumerate(addresses) if of != rank}
        self.others = {of: OthersArena(address) for of, address in others.items()}
        self.late = {of: OnThread() for of in self.others}
        for of, arena in self.others.items():
            own.mail.watch(of, arena.mail)

    def tidy(self) -> None:
        """Tell the others what this rank has finished with."""
        for arena in self.others.values():
            arena.mail.tell_what_is_left()


class SharedMemory(Exchange):
    """Wires through arenas.

    Args:
        group: the gloo group of these ranks.
        number: of the optimizer whose wires these are.
        pool: the ranks' arenas.
    """

    # Ranks that compute on the same cores are seldom abreast: let one that is ahead go on.
    in_flight = 8
    keeps_wires = False
    shares_memory = True

    def __init__(self, group: dist.ProcessGroup, number: int, pool: Pool) -> None:
        super().__init__(group, number)
        self._pool = pool
        self._own = pool.own
        self._theirs = [pool.others[of] for _, of in self.peers]
        self._handed_out: list[Packed] = []
        self._serials: defaultdict[int, int] = defaultdict(int)

    def new_wire(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A wire in a slot; each is handed to one reduction."""
        packed = self._packed(self.size * row, dtype)
        packed = packed._replace(wire=packed.wire.view(self.size, row))
        self._handed_out.append(packed)
        return packed.wire

    def swap(self, wire: Tensor) -> Pending[Tensor]:
        """Each rank copies its own row of all wires."""
        packed = self._take_or_copy(wire, [to for to, _ in self.peers])
        own = wire[self.rank]
        start = self.rank * own.numel() * wire.element_size()

        def finish(headers: list[Header]) -> Tensor:
            theirs = own.new_empty(self.size, own.numel())
            theirs[self.rank] = own
            for (_, of), view in zip(self.peers, self._views(headers, own.numel(), own.dtype, start), strict=True):
                theirs[of] = view
            return theirs

        return self._send(packed, REDUCE, finish)

    def reduce_scatter(self, wire: Tensor) -> Pending[Tensor]:
        """Each rank sums its own row of all wires, in the order in which ``Exchange`` does."""
        packed = self._take_or_copy(wire, [to for to, _ in self.peers])
        own = wire[self.rank]
        start = self.rank * own.numel() * wire.element_size()

        def finish(theirs: list[Header]) -> Tensor:
            return sum_rows([own, *self._views(theirs, own.numel(), wire.dtype, start)])

        return self._send(packed, REDUCE, finish)

    def all_reduce(self, wire: Tensor) -> Pending[Tensor]:
        """Every rank sums all rows, in rank order: to the same bits."""
        packed = self._take_or_copy(wire, [...])

        def finish(theirs: list[Header]) -> Tensor:
            views = self._views(theirs, wire.numel(), wire.dtype)
            return sum_rows(self._in_rank_order(packed.wire.view(-1), views)).view(wire.shape)

        return self._send(packed, REDUCE, finish)

    def _in_rank_order(self, own: Tensor, theirs: Sequence[Tensor]) -> list[Tensor]:
        by_rank = dict(zip((of for _, of in self.peers), theirs, strict=True)) | {self.rank: own}
        return [by_rank[rank] for rank in range(self.size)]

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Pending[None]:
        """Each rank copies what it lacks out of the others' slots, straight to where it belongs."""
        sizes = [each.numel() for each in own]
        packed = self._packed(sum(sizes), rows[0].dtype)
        lay_end_to_end(packed.wire, own)
        keep_own(own, rows, self.rank)  # from own, not the slot: an fp32 master is its row already

        def finish(theirs: list[Header]) -> None:
            views = self._views(theirs, sum(sizes), rows[0].dtype)
            for (_, of), view in zip(self.peers, views, strict=True):
                torch.split_with_sizes_copy(view, sizes, out=[each[of] for each in rows])

        return self._send(packed, GATHER, finish)

    def exchange_few(self, few: Tensor, kind: int) -> Pending[list[Tensor]]:
        """In a slot."""
        packed = self._packed(few.numel(), few.dtype)
        packed.wire.copy_(few)

        def finish(theirs: list[Header]) -> list[Tensor]:
            views = self._views(theirs, few.numel(), few.dtype)
            return self._in_rank_order(few, [view.clone() for view in views])

        return self._send(packed, kind, finish)

    def noticed(self, pending: Pending[T]) -> Pending[T]:
        """It is ``done`` when the headers have come."""
        return pending

    def held(self) -> list[Tensor]:
        """Slots, in use or kept."""
        return self._own.held()

    def rest(self, for_good: bool = False) -> None:
        """Give back what idle slots take, but for what the next step needs anyway."""
        self._pool.tidy()
        self._own.give_back(0 if for_good else KEPT)

    # ---- slots ----

    def _packed(self, numel: int, dtype: torch.dtype) -> Packed:
        """Room for a wire; it is free again when all ranks, this one too, have finished with it."""
        self._pool.tidy()
        slot = self._own.take(numel * dtype.itemsize, readers=self.size)
        return Packed(self._own.view(slot, numel, dtype), slot)

    def _take_or_copy(self, wire: Tensor, wanted: Iterable[int | EllipsisType]) -> Packed:
        """The slot that ``wire`` was packed into; of one that lies elsewhere the ``wanted`` rows are copied."""
        for place, packed in enumerate(self._handed_out):
            if packed.wire.data_ptr() == wire.data_ptr():
                return self._handed_out.pop(place)
        packed = self._packed(wire.numel(), wire.dtype)
        packed = packed._replace(wire=packed.wire.view(wire.shape))
        for rows in wanted:
            packed.wire[rows].copy_(wire[rows])
        return packed

    # ---- headers ----

    def _send(self, packed: Packed, kind: int, finish: Callable[[list[Header]], T]) -> Pending[T]:
        """Tell the peers where a wire lies; ``finish`` gets where theirs do, turn by turn, and reads them."""
        expected = self._tell(packed, kind)

        def read() -> T:
            theirs = self._own.mail.wait(expected, self._pool.timeout)
            result = finish(theirs)
            self._release(packed, theirs)
            return result

        return Pending((), (packed.wire,), read, lambda: self._own.mail.has(expected))

    def _tell(self, packed: Packed, kind: int) -> list[Subject]:
        """Tell the peers where a wire lies; what they will tell of theirs, turn by turn."""
        serial = self._serials[kind]
        self._serials[kind] += 1
        about = Subject(self.kind(kind), self.rank, serial)
        self._tell_of(packed.slot, about)
        return [about._replace(sender=of) for _, of in self.peers]

    def _tell_of(self, slot: Slot, about: Subject) -> None:
        header = Header(slot.offset, slot.number)
        for (_, of), arena in zip(self.peers, self._theirs, strict=True):
            if not arena.mail.tell(about, header):
                late = partial(arena.mail.tell_late, about, header, self._pool.timeout)
                self._pool.late[of].after(Pending((), (), late), _nothing_more)

    def _release(self, packed: Packed, theirs: Sequence[Header]) -> None:
        """This rank has finished with a wire of its own and with its peers'."""
        self._own.finish(packed.slot)
        for arena, header in zip(self._theirs, theirs, strict=True):
            arena.mail.tell_read(header.slot)

    def _views(self, theirs: Sequence[Header], numel: int, dtype: torch.dtype, start: int = 0) -> list[Tensor]:
        """What the peers' slots hold from byte ``start`` on, turn by turn."""
        return [
            arena.view(header.offset + start, numel, dtype) for arena, header in zip(self._theirs, theirs, strict=True)
        ]


def _nothing_more(_: None) -> Pending[None]:
    return Pending((), (), lambda: None)
