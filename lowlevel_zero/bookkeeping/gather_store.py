"""The gather store: fills wires with updated rows, and starts and finishes their gather into the parameters."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from ..collectives import ShardGroup
from ..transport import Pending
from .parameter_store import ShardedParameter

# Two wires: one is filled while the other travels.
IN_FLIGHT = 2


class Gather(NamedTuple):
    """Parameters whose rows are under way."""

    records: list[ShardedParameter]
    pending: Pending[None]


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
        pending = self._group.gather([record.p32 for record in records], [record.rows for record in records])
        self._in_flight.append(Gather(records, pending))
        self._finish(leave=IN_FLIGHT)

    def finish(self) -> None:
        """Return when all that was started has arrived."""
        self._finish(leave=0)

    def _finish(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            records, pending = self._in_flight.popleft()
            pending.wait()
            for record in records:
                # The write went past p: without this, a backward through the old values would go unnoticed.
                torch.autograd.graph.increment_version(record.p)
                record.note_version()
                record.stepped = True
