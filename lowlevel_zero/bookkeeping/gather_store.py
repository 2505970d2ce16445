"""The gather store: gathers stepped slices into the parameters, at once or during the next forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ..communication.progress import About, Progress
from ..communication.shard_group import ShardGroup
from ..communication.work import Work
from ..partition import alignment_of
from ..streams import Mark, Streams
from .awaited import arrived, can_be_awaited, defer_until_read
from .bucket_store import StepOnDevice
from .sharded_parameter import ShardedParameter
from .step_state import Damage, StepState

T = TypeVar("T")

# Elements of slices that are stepped and gathered in one call, so that the cost of the call itself is negligible.
PART = 2**19


def in_parts(items: Iterable[tuple[Hashable, int, T]]) -> Iterator[list[T]]:
    """Group successive items of one kind to parts of at least ``PART`` elements, and yield the parts.

    ``items``: the kind, the elements of a slice, and the item itself.
    """
    part: list[T] = []
    before: Hashable = None
    elements = 0
    for kind, size, item in items:
        if part and (elements >= PART or kind != before):
            yield part
            part, elements = [], 0
        part.append(item)
        before, elements = kind, elements + size
    if part:
        yield part


@dataclass(eq=False, repr=False)
class Gather:
    """Parameters that were stepped together, while their rows are gathered."""

    records: Sequence[ShardedParameter]
    _pending: Work[None] | None
    _streams: Streams
    _state: StepState
    _progress: Progress
    awaited: bool  # readers of the parameters wait for them; else the step waits
    _written: Mark | None = None

    def finish_gather(self, on_host: bool = False) -> None:
        """Wait until the rows are in place for the current stream, or ``on_host`` for all; may be called again.

        A reader on another stream has to wait too: until the device has written them they stay awaited. An error is
        raised once, and leaves parameters undefined. A fork of this process can't finish the gather: each read raises.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                self._write(pending)
            except BaseException as error:
                if self._progress.is_forked:
                    self._pending = pending
                    raise
                self._state.failure.note(error, Damage.GRADIENTS | Damage.PARAMETERS)
                self.forget()
                raise
            for record in self.records:
                record.version = record.p._version
        if self._written is not None:
            (self._written.synchronize if on_host else self._written.wait)()
            if on_host or self._written.query():
                self.forget()

    @torch.no_grad()
    def _write(self, pending: Work[None]) -> None:
        with self._streams.home():
            pending.wait()
            self._written = self._streams.mark() if self.awaited else None

    def forget(self) -> None:
        """Make the parameters ordinary ones again: reads from now on come after the write."""
        arrived([record.p for record in self.records])
        self._written = None


@dataclass(eq=False, repr=False)
class GatherStore:
    """Starts and finishes the gathers of one shard group, in order."""

    _group: ShardGroup  # the ranks that share the parameters
    _streams: Streams  # on which gathers are started and finished
    _stepping: StepOnDevice  # where masters are
    _state: StepState  # of the optimizer's step, which learns of failed gathers
    _overlap: bool  # don't wait at the end of a step, where a parameter can see to it that its readers wait
    _wide_rows: bool  # pad rows for NCCL's bandwidth
    _under_way: deque[Gather] = field(default_factory=deque)

    def start_gather(self, records: Sequence[ShardedParameter]) -> None:
        """Start gathering stepped parameters of one device, dtype and owner (None: all own rows). Communicates."""
        # The write goes past p: without this, a backward through the old values would go unnoticed.
        _increment_version([record.p for record in records])
        for record in records:
            record.stepped = True
        awaited = self._overlap and can_be_awaited(record.p for record in records)
        with self._streams.home(join=False):
            masters = [record.p32 if record.is_flat else record.master_row for record in records]
            own = self._stepping.own_rows(masters, records[0].row)
            rows = [record.rows for record in records]
            alignment = alignment_of(rows[0].dtype, self._wide_rows)
            pending = records[0].split.gather(self._group, own, rows, records[0].fp8, alignment, About(records))
        gather = Gather(records, pending, self._streams, self._state, self._group.progress, awaited)
        if awaited:
            defer_until_read((record.p for record in records), gather.finish_gather)
        self._under_way.append(gather)

    def limit(self) -> None:
        """Wait for the oldest gathers if more are under way than the backend needs, unless readers await the latest."""
        latest = self._under_way[-1]
        most = self._group.backend(latest.records[0].padded.device).gathers_in_flight
        if len(self._under_way) > most and not latest.awaited:
            self.finish(leave=most)

    def gather(self, records: Sequence[ShardedParameter]) -> None:
        """Gather ``records``, whose slices have changed, and wait for it. Communicates, alike on every rank."""
        gathered = [record for record in records if not record.is_empty]
        for part in in_parts((record.kind, record.split.slice_size, record) for record in gathered):
            self.start_gather(part)
            self.limit()
        self.finish()

    def end_step(self) -> None:
        """Wait for the step's gathers whose parameters can't be awaited by their readers."""
        for gather in [each for each in self._under_way if not each.awaited]:
            self._under_way.remove(gather)
            gather.finish_gather()

    def finish(self, leave: int = 0) -> None:
        """Wait for all gathers but the last ``leave``."""
        while len(self._under_way) > leave:
            oldest = self._under_way[0]
            oldest.finish_gather()
            if oldest.awaited:
                oldest.forget()
            self._under_way.popleft()


def _one_by_one(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


# Of many at once, but for torch 2.4.
_increment_version: Callable[[list[Tensor]], None] = torch.autograd.graph.increment_version
try:
    _increment_version([])
except (TypeError, RuntimeError):
    _increment_version = _one_by_one
