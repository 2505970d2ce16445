"""SharedMemory: wires between the processes of one host, which read them right where their peers packed them.

A rank packs a wire into a slot of its arena and mails each peer a header: where it lies. That letter is also
what orders memory: whoever has received it sees what was written before it was sent. Who has read the wire says
so, and when all have, the slot is used again. Nobody ever waits for that: while none is known to be free, wires
get fresh ones, since a rank may be a whole backward ahead of its peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .arena import Address, Arena, OthersArena, Slot
from .exchange import GATHER, REDUCE, SUMMED, Exchange, sum_rows
from .mail import Header, Subject
from .transport import Pending, keep_own, lay_end_to_end

T = TypeVar("T")

# Bytes of idle slots that are kept from step to step, four wires of the default size: getting memory anew takes
# three times as long as packing it.
KEPT = 16 * 2**20


class Packed(NamedTuple):
    """A wire in a slot."""

    wire: Tensor
    slot: Slot


class SharedMemory(Exchange):
    """Wires through arenas.

    Args:
        group: the gloo group of these ranks.
        own: this rank's arena.
        addresses: of every rank's, in rank order.

    Raises:
        OSError, ValueError: a peer's arena can't be reached from here.
    """

    def __init__(self, group: dist.ProcessGroup, own: Arena, addresses: Sequence[Address]) -> None:
        super().__init__(group)
        self._own = own
        self._theirs = [OthersArena(addresses[of]) for _, of in self.peers]
        for _, of in self.peers:
            own.mail.watch(of, addresses[of].process)
        self._handed_out: list[Packed] = []
        self._serials = {REDUCE: 0, GATHER: 0, SUMMED: 0}
        self._timeout = _timeout_of(group)

    def new_wire(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A wire in a slot; each is handed to one reduction."""
        packed = self._packed(self.size * row, dtype)
        packed = packed._replace(wire=packed.wire.view(self.size, row))
        self._handed_out.append(packed)
        return packed.wire

    def reduce_scatter(self, wire: Tensor) -> Pending[Tensor]:
        """Each rank sums its own row of all wires, in the order in which ``Exchange`` does."""
        packed = self._take_or_copy(wire, [to for to, _ in self.peers])
        own = wire[self.rank]
        start = self.rank * own.numel() * wire.element_size()

        def finish(theirs: list[Header]) -> Tensor:
            return sum_rows([own, *self.views(theirs, own.numel(), wire.dtype, start)])

        return self._send(packed, REDUCE, finish)

    def all_reduce(self, wire: Tensor) -> Pending[Tensor]:
        """The same bits on all ranks: two sum both wires; more sum a row each, and copy the others' sums."""
        packed = self._take_or_copy(wire, range(self.size))
        if self.size > 2:
            summing = RowByRow(self, packed)
            return Pending((), (packed.wire,), summing.finish, summing.done)

        def finish(theirs: list[Header]) -> Tensor:
            (view,) = self.views(theirs, wire.numel(), wire.dtype)
            pair = (packed.wire.view(-1), view)
            return sum_rows(pair if self.rank == 0 else pair[::-1]).view(wire.shape)

        return self._send(packed, REDUCE, finish)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor]) -> Pending[None]:
        """Each rank copies what it lacks out of the others' slots, straight to where it belongs."""
        sizes = [each.numel() for each in own]
        packed = self._packed(sum(sizes), rows[0].dtype)
        lay_end_to_end(packed.wire, own)
        keep_own(own, rows, self.rank)  # from own, not the slot: an fp32 master is its row already

        def finish(theirs: list[Header]) -> None:
            views = self.views(theirs, sum(sizes), rows[0].dtype)
            for (_, of), view in zip(self.peers, views, strict=True):
                torch.split_with_sizes_copy(view, sizes, out=[each[of] for each in rows])

        return self._send(packed, GATHER, finish)

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

    def _take_or_copy(self, wire: Tensor, wanted: Iterable[int]) -> Packed:
        """The slot that ``wire`` was packed into; of one that lies elsewhere the ``wanted`` rows are copied."""
        for place, packed in enumerate(self._handed_out):
            if packed.wire.data_ptr() == wire.data_ptr():
                return self._handed_out.pop(place)
        packed = self._packed(wire.numel(), wire.dtype)
        packed = packed._replace(wire=packed.wire.view(wire.shape))
        for rank in wanted:
            packed.wire[rank].copy_(wire[rank])
        return packed

    # ---- headers ----

    def _send(self, packed: Packed, kind: int, finish: Callable[[list[Header]], T]) -> Pending[T]:
        """Tell the peers where a wire lies; ``finish`` gets where theirs do, turn by turn, and reads them."""
        expected = self.tell(packed, kind)

        def read() -> T:
            theirs = self.wait(expected)
            result = finish(theirs)
            self.release(packed, theirs)
            return result

        return Pending((), (packed.wire,), read, lambda: self.has(expected))

    def tell(self, packed: Packed, kind: int) -> list[Subject]:
        """Tell the peers where a wire lies; gives what they will tell of theirs, turn by turn."""
        serial = self._serials[kind]
        self._serials[kind] += 1
        for arena in self._theirs:
            arena.mail.tell(Subject(kind, self.rank, serial), Header(packed.slot.offset, packed.slot.number))
        return [Subject(kind, of, serial) for _, of in self.peers]

    def has(self, expected: Sequence[Subject]) -> bool:
        """Whether the peers have told all of this."""
        return self._own.mail.has(expected)

    def wait(self, expected: Sequence[Subject]) -> list[Header]:
        """What the peers have told, when they have; each once."""
        return self._own.mail.wait(expected, self._timeout)

    def release(self, packed: Packed, theirs: Sequence[Header]) -> None:
        """This rank has read what it wanted of its own wire and of the peers'."""
        self._own.finish(packed.slot)
        for arena, header in zip(self._theirs, theirs, strict=True):
            arena.mail.tell_read(header.slot)

    def views(self, theirs: Sequence[Header], numel: int, dtype: torch.dtype, start: int = 0) -> list[Tensor]:
        """What the peers' slots hold from byte ``start`` on, turn by turn."""
        return [
            arena.view(header.offset + start, numel, dtype) for arena, header in zip(self._theirs, theirs, strict=True)
        ]


class RowByRow:
    """An all-reduce in two turns: each rank sums its own row of all wires, then copies what the others have summed.

    The sum takes the place of a row that nobody else reads, the rank's own in its own wire.
    """

    def __init__(self, ways: SharedMemory, packed: Packed) -> None:
        self._ways = ways
        self._packed = packed
        self._wires = ways.tell(packed, REDUCE)
        self._theirs: list[Header] = []
        self._sums: list[Subject] | None = None

    def done(self) -> bool:
        """Whether ``finish`` would return at once; takes the first turn as soon as it can."""
        if self._sums is None and self._ways.has(self._wires):
            self._sum()
        return self._sums is not None and self._ways.has(self._sums)

    def finish(self) -> Tensor:
        """The sum, ``[size, row]``; a fresh tensor."""
        if self._sums is None:
            self._sum()
        assert self._sums is not None
        self._ways.wait(self._sums)
        wire, ways = self._packed.wire, self._ways
        total = torch.empty_like(wire)
        total[ways.rank].copy_(wire[ways.rank])
        for place, (_, of) in enumerate(ways.peers):
            total[of].copy_(self._rows_of(of)[place])
        ways.release(self._packed, self._theirs)
        return total

    def _sum(self) -> None:
        ways = self._ways
        self._theirs = ways.wait(self._wires)
        by_rank = dict(zip((of for _, of in ways.peers), self._rows_of(ways.rank), strict=True))
        own = by_rank[ways.rank] = self._packed.wire[ways.rank]
        own.copy_(sum_rows([by_rank[rank] for rank in range(ways.size)]))
        self._sums = ways.tell(self._packed, SUMMED)

    def _rows_of(self, rank: int) -> list[Tensor]:
        """One row of each peer's wire, turn by turn."""
        wire = self._packed.wire
        return self._ways.views(self._theirs, wire.shape[1], wire.dtype, rank * wire[0].numel() * wire.element_size())


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that a collective of ``group`` may take."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None) or dist.constants.default_pg_timeout
    return float(timeout.total_seconds())
