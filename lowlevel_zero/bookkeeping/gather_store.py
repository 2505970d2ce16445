"""The gather store: brings stepped slices back into the working parameters, at once or while the next forward runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ..alignment import alignment_of
from ..communication.collectives import ShardGroup
from ..communication.progress import About
from ..communication.transport import Pending
from ..streams import Mark, Streams
from .awaited import arrived, can_be_awaited, let_await
from .offload import Offload
from .parameter_store import ShardedParameter, note_versions

# Two wires: one is filled while the other travels.
IN_FLIGHT = 2


class Gather:
    """Parameters whose rows are under way together.

    Attributes:
        records: the parameters.
        awaited: whoever reads one of them waits; else they have to be there when the step has ended.
    """

    __slots__ = ("_pending", "_streams", "_written", "awaited", "records")

    def __init__(
        self, records: Sequence[ShardedParameter], pending: Pending[None], streams: Streams, awaited: bool
    ) -> None:
        self._streams = streams
        self._written: Mark | None = None
        self.records = records
        self.awaited = awaited
        self._pending: Pending[None] | None = pending
        if awaited:
            let_await((record.p for record in records), self.finish)

    def finish(self) -> None:
        """Return when the rows are in place for the current stream; may be called again, also after an error.

        A reader on another stream has to wait too: until the device has written them they stay awaited.
        """
        written_now = self._pending is not None
        if self._pending is not None:
            self._write(self._pending)
            self._pending = None
        if self._written is not None:
            self._written.wait()
            if self._written.query():
                self.forget()
        if written_now:
            note_versions(self.records)

    @torch.no_grad()
    def _write(self, pending: Pending[None]) -> None:
        with self._streams.home():
            pending.wait()
            self._written = self._streams.mark()

    def forget(self) -> None:
        """What reads a parameter from now on comes after it has been written: let them be ordinary ones."""
        if self.awaited:
            arrived(record.p for record in self.records)
        self._written = None


class GatherStore:
    """Gathers parameters, those that were stepped together at a time.

    Args:
        group: the ranks that share the parameters.
        streams: what gathers are started and finished on.
        overlap: don't wait at the end of a step, where a parameter can see to it that its readers wait.
        offload: what brings masters up from the host; None: they are where the parameters are.
        wide_rows: pad rows for NCCL's bandwidth.
    """

    def __init__(
        self,
        group: ShardGroup,
        streams: Streams,
        overlap: bool = False,
        offload: Offload | None = None,
        wide_rows: bool = False,
    ) -> None:
        self._wide_rows = wide_rows
        self._group = group
        self._streams = streams
        self._offload = offload
        self._overlap = overlap
        self._under_way: deque[Gather] = deque()

    def start(self, records: Sequence[ShardedParameter]) -> None:
        """Start gathering ``records``, which are of one kind; alike on every rank."""
        # The write goes past p: without this, a backward through the old values would go unnoticed.
        _increment_versions([record.p for record in records])
        for record in records:
            record.stepped = True
        awaited = self._overlap and all(can_be_awaited(record.p) for record in records)
        with self._streams.home(join=False):
            own = [record.p32 for record in records]
            if self._offload is not None:
                own = self._offload.lift(own, records[0].row)
            rows = [record.rows for record in records]
            alignment = alignment_of(rows[0].dtype, self._wide_rows)
            pending = self._group.gather(own, rows, records[0].fp8, alignment, About(records))
        self._under_way.append(Gather(records, pending, self._streams, awaited))
        if not awaited:
            self._finish_oldest(leave=IN_FLIGHT)

    def end_step(self) -> None:
        """A step has started all its gathers: wait for those that nobody else will wait for."""
        for gather in self._under_way:
            if not gather.awaited:
                gather.finish()
        self._under_way = deque(gather for gather in self._under_way if gather.awaited)

    def finish(self) -> None:
        """Return when everything is in place."""
        self._finish_oldest(leave=0)

    def _finish_oldest(self, leave: int) -> None:
        while len(self._under_way) > leave:
            oldest = self._under_way[0]
            oldest.finish()
            oldest.forget()
            self._under_way.popleft()


def _increment_versions(tensors: list[Tensor]) -> None:
    if _MANY_AT_ONCE:
        torch.autograd.graph.increment_version(tensors)
    else:
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def _takes_many() -> bool:
    try:
        torch.autograd.graph.increment_version([])
    except (TypeError, RuntimeError):  # torch 2.4, say
        return False
    return True


_MANY_AT_ONCE = _takes_many()
