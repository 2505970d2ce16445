"""The gather store: fills wires with updated rows, and starts and finishes their gather into the parameters."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives import Pending, ShardGroup
from .parameter_store import ShardedParameter
from .wire import unpack

# Two wires: one is filled while the other travels.
IN_FLIGHT = 2


class Gather(NamedTuple):
    """Parameters whose rows are under way; ``rows`` is empty where they travel straight into their storage."""

    records: list[ShardedParameter]
    pending: Pending
    rows: list[Tensor]


class GatherStore:
    """Brings updated slices back into the working parameters, bucket by bucket.

    Args:
        group: the ranks that share the parameters.
    """

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._in_flight: deque[Gather] = deque()

    def start(self, records: list[ShardedParameter]) -> None:
        """Start gathering ``records``, stepped together and of one kind; alike on every rank."""
        self._start(records)
        self._finish(leave=IN_FLIGHT)

    def finish(self) -> None:
        """Return when all that was started has arrived."""
        self._finish(leave=0)

    def _start(self, records: list[ShardedParameter]) -> None:
        if len(records) == 1:
            record = records[0]
            if not record.shares_storage:
                record.row.copy_(record.p32)
            self._in_flight.append(Gather(records, self._group.all_gather(record.rows), []))
            return
        sizes = [record.split.slice_size for record in records]
        lead = records[0].padded
        wire = torch.empty(self._group.size, sum(sizes), dtype=lead.dtype, device=lead.device)
        slots = wire[self._group.rank].split_with_sizes(sizes)
        torch._foreach_copy_(slots, [record.p32 for record in records])
        self._in_flight.append(Gather(records, self._group.all_gather(wire), [record.rows for record in records]))

    def _finish(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            records, pending, rows = self._in_flight.popleft()
            wire = pending.wait()
            if rows:
                unpack(wire, rows)
            for record in records:
                # The write went past p: without this, a backward through the old values would go unnoticed.
                torch.autograd.graph.increment_version(record.p)
                record.note_version()
                record.stepped = True
