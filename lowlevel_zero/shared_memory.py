"""SharedMemory: wires between the processes of one host, which read them right where their peers packed them.

A rank packs a wire into a slot of its arena and sends each peer a header: where it lies. That message is also
what orders memory: whoever has received it sees what was written before it was sent. Who has read the wire says
so, and when all have, the slot is used again. Nobody ever waits for that: while none is known to be free, wires
get fresh ones, since a rank may be a whole backward ahead of its peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .arena import Address, Arena, OthersArena, Slot
from .exchange import GATHER, REDUCE, Exchange, sum_rows
from .transport import Pending, keep_own

# Bytes of idle slots that are kept from step to step, four wires of the default size: getting memory anew takes
# three times as long as packing it.
KEPT = 16 * 2**20


class Packed(NamedTuple):
    """A wire in a slot."""

    wire: Tensor
    slot: Slot


class Headers(NamedTuple):
    """The peers' headers of one wire, ``[size - 1, 2]``: offset and number of each one's slot, turn by turn."""

    works: list[dist.Work]
    theirs: Tensor
    mine: Tensor

    def came(self) -> bool:
        """Whether all are there. gloo's own handles of messages don't tell before they are waited for."""
        return all(number >= 0 for header in self.theirs.tolist() for number in header)


class SharedMemory(Exchange):
    """Wires through arenas, headers through gloo.

    Args:
        group: the gloo group for headers.
        own: this rank's arena.
        addresses: of every rank's, in rank order.

    Raises:
        OSError, ValueError: a peer's arena can't be reached from here.
    """

    def __init__(self, group: dist.ProcessGroup, own: Arena, addresses: Sequence[Address]) -> None:
        super().__init__(group)
        self._own = own
        self._theirs = [OthersArena(addresses[of]) for _, of in self.peers]
        self._handed_out: list[Packed] = []

    def new_wire(self, row: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A wire in a slot; each is handed to one reduction."""
        packed = self._packed(self.size * row, dtype)
        packed = packed._replace(wire=packed.wire.view(self.size, row))
        self._handed_out.append(packed)
        return packed.wire

    def reduce_scatter(self, wire: Tensor) -> Pending[Tensor]:
        """Each rank sums its own row of all wires, in the order in which ``Exchange`` does."""
        packed = self._take_or_copy(wire)
        headers = self._tell(packed.slot, REDUCE)
        row = wire.shape[1]

        def finish() -> Tensor:
            start = self.rank * row * wire.element_size()
            total = sum_rows([packed.wire[self.rank], *self._views(headers, row, wire.dtype, start)])
            self._finish(packed.slot, headers)
            return total

        return Pending(headers.works, (packed.wire,), finish, headers.came)

    def all_reduce(self, wire: Tensor) -> Pending[Tensor]:
        """Each rank sums all wires, in rank order: the sums are the same bit for bit."""
        packed = self._take_or_copy(wire)
        headers = self._tell(packed.slot, REDUCE)

        def finish() -> Tensor:
            views = self._views(headers, wire.numel(), wire.dtype)
            by_rank = dict(zip((of for _, of in self.peers), views, strict=True)) | {self.rank: packed.wire.view(-1)}
            total = sum_rows([by_rank[rank] for rank in range(self.size)])
            self._finish(packed.slot, headers)
            return total.view(wire.shape)

        return Pending(headers.works, (packed.wire,), finish, headers.came)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor]) -> Pending[None]:
        """Each rank copies what it lacks out of the others' slots, straight to where it belongs."""
        sizes = [each.numel() for each in own]
        packed = self._packed(sum(sizes), rows[0].dtype)
        torch._foreach_copy_(packed.wire.split_with_sizes(sizes), list(own))
        keep_own(own, rows, self.rank)  # from own, not the slot: an fp32 master is its row already
        headers = self._tell(packed.slot, GATHER)

        def finish() -> None:
            views = self._views(headers, sum(sizes), rows[0].dtype)
            for (_, of), view in zip(self.peers, views, strict=True):
                torch.split_with_sizes_copy(view, sizes, out=[each[of] for each in rows])
            self._finish(packed.slot, headers)

        return Pending(headers.works, (packed.wire,), finish, headers.came)

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

    def _take_or_copy(self, wire: Tensor) -> Packed:
        """The slot that ``wire`` was packed into; one that lies elsewhere is copied into one."""
        for place, packed in enumerate(self._handed_out):
            if packed.wire.data_ptr() == wire.data_ptr():
                return self._handed_out.pop(place)
        packed = self._packed(wire.numel(), wire.dtype)
        packed = packed._replace(wire=packed.wire.view(wire.shape))
        packed.wire.copy_(wire)
        return packed

    # ---- headers ----

    def _tell(self, slot: Slot, tag: int) -> Headers:
        mine = torch.tensor([slot.offset, slot.number])
        theirs = torch.full((self.size - 1, 2), -1)
        return Headers(self.swap([(mine, row) for row in theirs], tag), theirs, mine)

    def _views(self, headers: Headers, numel: int, dtype: torch.dtype, start: int = 0) -> list[Tensor]:
        """What the peers' slots hold from byte ``start`` on, turn by turn."""
        return [
            arena.view(offset + start, numel, dtype)
            for arena, (offset, _) in zip(self._theirs, headers.theirs.tolist(), strict=True)
        ]

    def _finish(self, slot: Slot, headers: Headers) -> None:
        """This rank has read what it wanted of its own wire and of the peers'."""
        self._own.finish(slot)
        for arena, (_, number) in zip(self._theirs, headers.theirs.tolist(), strict=True):
            arena.finish(number)
