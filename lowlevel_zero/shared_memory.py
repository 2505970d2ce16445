"""SharedMemory: wires between the processes of one host, which read them right where their peers packed them.

A rank packs a wire into a slot of its arena and mails each peer a header: where it lies. That letter is also
what orders memory: whoever has received it sees what was written before it was sent. Who has read the wire says
so, and when all have, the slot is used again. Nobody ever waits for that: while none is known to be free, wires
get fresh ones, since a rank may be a whole backward ahead of its peers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import EllipsisType
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .arena import Address, Arena, OthersArena, Slot
from .exchange import GATHER, REDUCE, SUMMED, Exchange, sum_rows
from .mail import Header, Subject
from .transport import Pending, keep_own, lay_end_to_end

T = TypeVar("T")

# Bytes of idle slots that are kept from step to step, at most, eight wires of the default size: getting memory anew
# takes three times as long as packing it.
KEPT = 32 * 2**20


class Packed(NamedTuple):
    """A wire in a slot."""

    wire: Tensor
    slot: Slot


class Turn:
    """An all-reduce in two turns: each rank's wire is packed, each rank's own row of it summed.

    Attributes:
        packed: this rank's.
        packed_by_all: what peers say when they have packed theirs.
        summed: what they say when they have summed their row; None: this rank hasn't summed its own.
    """

    __slots__ = ("packed", "packed_by_all", "summed")

    def __init__(self, packed: Packed, packed_by_all: list[Subject]) -> None:
        self.packed = packed
        self.packed_by_all = packed_by_all
        self.summed: list[Subject] | None = None


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
        for _, of in self.peers:
            own.mail.watch(of, addresses[of].process)
        self._handed_out: list[Packed] = []
        self._turns: deque[Turn] = deque()
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
            return sum_rows([own, *self._views(theirs, own.numel(), wire.dtype, start)])

        return self._send(packed, REDUCE, finish)

    def all_reduce(self, wire: Tensor) -> Pending[Tensor]:
        """Each rank sums its own row in rank order, and copies the others' sums: the same everywhere bit for bit.

        A wire of another shape, or of two ranks, every rank sums as a whole right away: of two, that moves no more
        bytes, and waits once.
        """
        packed = self._take_or_copy(wire, [...])
        if self.size > 2 and wire.dim() == 2 and len(wire) == self.size:
            return self._in_two_turns(packed)

        def finish(theirs: list[Header]) -> Tensor:
            views = self._views(theirs, wire.numel(), wire.dtype)
            return sum_rows(self._in_rank_order(packed.wire.view(-1), views)).view(wire.shape)

        return self._send(packed, REDUCE, finish)

    def _in_two_turns(self, packed: Packed) -> Pending[Tensor]:
        """The slot's own row, which peers have no other use for, becomes the sum that they copy."""
        mail, own = self._own.mail, packed.wire[self.rank]
        turn = Turn(packed, self._tell(packed, REDUCE))
        self._turns.append(turn)

        def done() -> bool:
            self._take_first_turns()
            return turn.summed is not None and mail.has(turn.summed)

        def read() -> Tensor:
            self._take_first_turns(up_to=turn)
            assert turn.summed is not None
            theirs = mail.wait(turn.summed, self._timeout)
            rows = [
                arena.view(header.offset + of * own.nbytes, own.numel(), own.dtype)
                for arena, header, (_, of) in zip(self._theirs, theirs, self.peers, strict=True)
            ]
            total = torch.stack(self._in_rank_order(own, rows))
            self._release(packed, theirs)
            return total

        return Pending((), (packed.wire,), read, done)

    def _take_first_turns(self, up_to: Turn | None = None) -> None:
        """Sum this rank's row of what has come, in the order in which all ranks started; wait for ``up_to``."""
        mail = self._own.mail
        while self._turns and ((up_to is not None and up_to.summed is None) or mail.has(self._turns[0].packed_by_all)):
            turn = self._turns.popleft()
            own = turn.packed.wire[self.rank]
            theirs = mail.wait(turn.packed_by_all, self._timeout)
            views = self._views(theirs, own.numel(), own.dtype, self.rank * own.nbytes)
            own.copy_(sum_rows(self._in_rank_order(own, views)))
            turn.summed = self._tell(turn.packed, SUMMED)

    def _in_rank_order(self, own: Tensor, theirs: Sequence[Tensor]) -> list[Tensor]:
        by_rank = dict(zip((of for _, of in self.peers), theirs, strict=True)) | {self.rank: own}
        return [by_rank[rank] for rank in range(self.size)]

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor]) -> Pending[None]:
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
        for arena in self._theirs:
            arena.mail.tell(Subject(kind, self.rank, serial), Header(packed.slot.offset, packed.slot.number))
        return [Subject(kind, of, serial) for _, of in self.peers]

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


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that a collective of ``group`` may take."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None) or dist.constants.default_pg_timeout
    return float(timeout.total_seconds())
