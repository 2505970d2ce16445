"""SharedMemory: wires between the processes of one host, which read them right where their peers packed them.

A rank packs a wire into a slot of its arena and mails each peer a header: where it lies. That letter is also
what orders memory: whoever has received it sees what was written before it was sent. Who has read the wire says
so, and when all have, the slot is used again. Nobody ever waits for that: while none is known to be free, wires
get fresh ones, since a rank may be a whole backward ahead of its peers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from types import EllipsisType
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..alignment import RowLayout
from .arena import Address, Arena, OthersArena, Slot
from .exchange import GATHER, REDUCE, SUMMED, Exchange, sum_rows
from .mail import Header, Subject
from .process_group import timeout_of
from .transport import Pending, keep_own, lay_out

T = TypeVar("T")

# Bytes of idle slots that are kept from step to step, at most, eight wires of the default size: getting memory anew
# takes three times as long as packing it.
KEPT = 32 * 2**20


class Packed(NamedTuple):
    """A wire in a slot.

    Attributes:
        wire: the wire.
        slot: where it is.
        spare: room behind it for this rank's row of the sum, ``[row]``; None: there is none.
    """

    wire: Tensor
    slot: Slot
    spare: Tensor | None = None


class AllReduction:
    """A wire of more than two ranks, whose rows are best summed by one rank each.

    Attributes:
        packed: this rank's wire.
        serial: its number among all reductions.
        expected: what peers say when they have packed theirs.
        theirs: where those are; None: not all have come.
    """

    __slots__ = ("expected", "packed", "serial", "theirs")

    def __init__(self, packed: Packed, serial: int, expected: list[Subject]) -> None:
        self.packed = packed
        self.serial = serial
        self.expected = expected
        self.theirs: list[Header] | None = None


class SharedMemory(Exchange):
    """Wires through arenas.

    Args:
        group: the gloo group of these ranks.
        own: this rank's arena.
        addresses: of every rank's, in rank order.

    Raises:
        OSError, ValueError: a peer's arena can't be reached from here.
    """

    # Ranks that compute on the same cores are seldom abreast: let one that is ahead go on.
    in_flight = 8

    def __init__(self, group: dist.ProcessGroup, own: Arena, addresses: Sequence[Address]) -> None:
        super().__init__(group)
        self._own = own
        self._theirs = [OthersArena(addresses[of]) for _, of in self.peers]
        self._arena_of = {of: arena for (_, of), arena in zip(self.peers, self._theirs, strict=True)}
        for _, of in self.peers:
            own.mail.watch(of, addresses[of].process)
        self._handed_out: list[Packed] = []
        self._unsummed: deque[AllReduction] = deque()
        self._spare_rows = 0
        self._serials: defaultdict[int, int] = defaultdict(int)
        self._timeout = timeout_of(group)

    def new_wire(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A wire in a slot; each is handed to one reduction."""
        packed = self._packed((self.size + self._spare_rows) * row, dtype)
        wire, spare = packed.wire[: self.size * row], packed.wire[self.size * row :]
        packed = Packed(wire.view(self.size, row), packed.slot, spare if self._spare_rows else None)
        self._handed_out.append(packed)
        return packed.wire

    def swap(self, wire: Tensor) -> Pending[Tensor]:
        """Each rank copies its own row of all wires."""
        packed = self._take_or_copy(wire, [to for to, _ in self.peers])
        own = wire[self.rank]
        start = self.rank * own.numel() * wire.element_size()

        def finish(headers: list[Header]) -> Tensor:
            theirs = torch.empty(self.size, own.numel(), dtype=own.dtype)
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
        """All rows summed in rank order: the sums are the same bit for bit, whoever adds them up.

        Of more than two wires every rank first sums its own row, for its peers to copy. Nobody waits for that: a row
        that its owner hasn't summed yet is summed here too.
        """
        packed = self._take_or_copy(wire, [...])
        if self.size == 2 or wire.dim() != 2 or len(wire) != self.size:
            return self._send(packed, REDUCE, lambda theirs: self._summed_here(packed, theirs))
        self._spare_rows = 1
        serial = self._serials[REDUCE]
        reduction = AllReduction(packed, serial, self._tell(packed, REDUCE))
        self._unsummed.append(reduction)

        def done() -> bool:
            self._sum_own_rows()
            return reduction.theirs is not None

        return Pending((), (packed.wire,), lambda: self._added_up(reduction), done)

    def _summed_here(self, packed: Packed, theirs: Sequence[Header]) -> Tensor:
        views = self._views(theirs, packed.wire.numel(), packed.wire.dtype)
        return sum_rows(self._in_rank_order(packed.wire.view(-1), views)).view(packed.wire.shape)

    def _sum_own_rows(self, up_to: AllReduction | None = None) -> None:
        """Sum this rank's row of the wires that have come, in the order of their start; wait for ``up_to``."""
        mail = self._own.mail
        while self._unsummed and ((up_to is not None and up_to.theirs is None) or mail.has(self._unsummed[0].expected)):
            reduction = self._unsummed.popleft()
            reduction.theirs = mail.wait(reduction.expected, self._timeout)
            spare = reduction.packed.spare
            if spare is not None:
                sum_rows(self._row_of_all(reduction, self.rank), into=spare)
                self._tell_of(reduction.packed.slot, Subject(SUMMED, self.rank, reduction.serial))

    def _added_up(self, reduction: AllReduction) -> Tensor:
        self._sum_own_rows(up_to=reduction)
        total = torch.empty_like(reduction.packed.wire)
        for rank, row in enumerate(total):
            summed = self._summed_by(rank, reduction)
            if summed is None:
                sum_rows(self._row_of_all(reduction, rank), into=row)
            else:
                row.copy_(summed)
        self._own.mail.skip(SUMMED, up_to=reduction.serial)
        self._release(reduction.packed, reduction.theirs or ())
        return total

    def _summed_by(self, rank: int, reduction: AllReduction) -> Tensor | None:
        """The sum of its row that a rank offers, ``[row]``, if it does already."""
        if rank == self.rank:
            return reduction.packed.spare
        header = self._own.mail.take(Subject(SUMMED, rank, reduction.serial))
        if header is None:
            return None
        wire = reduction.packed.wire
        return self._arena_of[rank].view(header.offset + wire.nbytes, wire.shape[1], wire.dtype)

    def _row_of_all(self, reduction: AllReduction, rank: int) -> list[Tensor]:
        """One row of everybody's wire, in rank order."""
        own = reduction.packed.wire[rank]
        return self._in_rank_order(own, self._views(reduction.theirs or (), own.numel(), own.dtype, rank * own.nbytes))

    def _in_rank_order(self, own: Tensor, theirs: Sequence[Tensor]) -> list[Tensor]:
        by_rank = dict(zip((of for _, of in self.peers), theirs, strict=True)) | {self.rank: own}
        return [by_rank[rank] for rank in range(self.size)]

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], layout: RowLayout) -> Pending[None]:
        """Each rank copies what it lacks out of the others' slots, straight to where it belongs."""
        packed = self._packed(layout.columns, rows[0].dtype)
        lay_out(packed.wire, own, layout)
        giving = len(rows[0])  # ranks that have more than padding
        if self.rank < giving:
            keep_own(own, rows, self.rank)  # from own, not the slot: an fp32 master is its row already

        def finish(theirs: list[Header]) -> None:
            views = self._views(theirs, layout.columns, rows[0].dtype)
            for of, view in ((of, view) for (_, of), view in zip(self.peers, views, strict=True) if of < giving):
                homes = layout.spread([each[of] for each in rows], view.new_empty)
                torch.split_with_sizes_copy(view, layout.pieces, out=homes)

        return self._send(packed, GATHER, finish)

    def everybody_s(self, few: Tensor, kind: int) -> Pending[list[Tensor]]:
        """Start telling all ranks a few numbers (1-D), as many on each; the result is everybody's, in rank order.

        Those of one ``kind`` have an order of their own.
        """
        packed = self._packed(few.numel(), few.dtype)
        packed.wire.copy_(few)

        def finish(theirs: list[Header]) -> list[Tensor]:
            views = self._views(theirs, few.numel(), few.dtype)
            return self._in_rank_order(few, [view.clone() for view in views])

        return self._send(packed, kind, finish)

    def held(self) -> list[Tensor]:
        """Slots, in use or kept."""
        return self._own.held()

    def rest(self, for_good: bool = False) -> None:
        """Give back what idle slots take, but for what the next step needs anyway."""
        self._own.give_back(0 if for_good else KEPT)

    # ---- slots ----

    def _packed(self, numel: int, dtype: torch.dtype) -> Packed:
        """Room for a wire; it is free again when all ranks, this one too, have finished with it."""
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
            theirs = self._own.mail.wait(expected, self._timeout)
            result = finish(theirs)
            self._release(packed, theirs)
            return result

        return Pending((), (packed.wire,), read, lambda: self._own.mail.has(expected))

    def _tell(self, packed: Packed, kind: int) -> list[Subject]:
        """Tell the peers where a wire lies; what they will tell of theirs, turn by turn."""
        serial = self._serials[kind]
        self._serials[kind] += 1
        self._tell_of(packed.slot, Subject(kind, self.rank, serial))
        return [Subject(kind, of, serial) for _, of in self.peers]

    def _tell_of(self, slot: Slot, about: Subject) -> None:
        for arena in self._theirs:
            arena.mail.tell(about, Header(slot.offset, slot.number))

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
