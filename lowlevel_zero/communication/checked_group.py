"""CheckedGroup: a shard group whose ranks compare what they are about to do before they do it, for debugging.

Each collective has a *meeting*: every rank publishes a signature of what it comes with in the group's store, waits for
those of the others and compares. Where they differ, or a rank doesn't come in time, all ranks raise the same error: the
first to know writes it into the store, where all look while they wait, and when they next come.

Reductions are published when they are started, but begun only once all ranks have published them. A rank whose
backward is over may be waiting for something else by then; so whoever waits, for whatever it is, begins meanwhile the
reductions that have become ready. What the hosts tell each other needs no collective at all: it travels with the
signatures.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..alignment import END_TO_END, Alignment
from ..options import ZeroOptions
from .collectives import ShardGroup
from .lost_ranks import Lookout, farewell
from .process_group import of_group, prefixed
from .progress import AGREEMENT, BROADCAST, EXCHANGE, GATHER, MESSAGE, NORM, REDUCTION, About, listed
from .transport import Pending
from .two_levels import TwoLevels

# Seconds to wait for the last rank where stalls aren't reported; and between looks.
_PATIENCE = 60.0
_FIRST_LOOK, _SLOWEST_LOOK = 0.0002, 0.02

T = TypeVar("T")


class _Numbers:
    """Of a process group's optimizers whose ranks compare, which all ranks count alike."""

    def __init__(self) -> None:
        self.numbers = count()


@dataclass(frozen=True)
class Meeting:
    """One collective's, as this rank has published it: where all ranks' signatures are, and what errors call it."""

    keys: tuple[str, ...]
    name: str


class Meetings:
    """All meetings of one optimizer.

    Args:
        group: the ranks.
        patience: seconds to wait for the last of them.
    """

    def __init__(self, group: dist.ProcessGroup, patience: float) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._patience = patience
        self._store = prefixed(f"lowlevel_zero/debug/{next(of_group(group, _Numbers).numbers)}", group)
        self._published: dict[str, int] = {}
        self._own: list[str] = []

    def publish(self, kind: str, signature: str, payload: object = None, name: str | None = None) -> Meeting:
        """Say that this rank has come to the next collective of ``kind``, and what with; errors call it ``name``."""
        self._raise_if_failed()
        serial = self._published.get(kind, 0)
        self._published[kind] = serial + 1
        meeting = Meeting(tuple(f"{kind}/{serial}/{rank}" for rank in range(self._size)), name or signature)
        own = meeting.keys[self._rank]
        self._store.set(own, json.dumps([signature, payload]))
        self._store.set(f"last/{self._rank}", meeting.name)
        self._own.append(own)
        return meeting

    def all_here(self, meeting: Meeting) -> bool:
        """Whether all ranks have come."""
        return bool(self._store.check(list(meeting.keys)))

    def compare(self, meeting: Meeting, meanwhile: Callable[[], None]) -> list[Any]:
        """What all ranks have said, in rank order, once they have come with one signature; raises otherwise."""
        deadline, pause, lookout = time.monotonic() + self._patience, _FIRST_LOOK, Lookout(self._ranks)
        while not self.all_here(meeting):
            self._raise_if_failed()
            gone = lookout.lost()
            if gone:
                self._fail(str(farewell(gone, meeting.name)))
            if time.monotonic() > deadline:
                self._fail(self._who_is_missing(meeting))
            meanwhile()
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST_LOOK)
        told = [json.loads(self._store.get(key)) for key in meeting.keys]
        if any(signature != told[0][0] for signature, _ in told):
            self._fail(_difference([signature for signature, _ in told]))
        return [payload for _, payload in told]

    def forget(self) -> None:
        """All ranks have compared what they published before the last meeting."""
        for key in self._own[:-1]:
            self._store.delete_key(key)
        del self._own[:-1]

    def _who_is_missing(self, meeting: Meeting) -> str:
        missing = [rank for rank, key in enumerate(meeting.keys) if not self._store.check([key])]
        where = "; ".join(f"rank {rank} {self._last_of(rank)}" for rank in missing)
        return (
            f"expected all ranks at the same call, rank {self._rank} came to «{meeting.name}» and has waited "
            f"{self._patience:g} s: {where}"
        )

    def _last_of(self, rank: int) -> str:
        key = f"last/{rank}"
        return f"last came to «{str(self._store.get(key), 'utf-8')}»" if self._store.check([key]) else "never came"

    def _fail(self, text: str) -> NoReturn:
        raise RuntimeError(str(self._store.compare_set("failed", "", text), "utf-8"))

    def _raise_if_failed(self) -> None:
        if self._store.check(["failed"]):
            raise RuntimeError(str(self._store.get("failed"), "utf-8"))


@dataclass
class _Deferred:
    """A reduction that is begun when all ranks have published it."""

    meeting: Meeting
    begin: Callable[[], Pending[Any]]
    begun: Pending[Any] | None = None

    def done(self) -> bool:
        """Whether it is over."""
        return self.begun is not None and self.begun.done()


class CheckedGroup(ShardGroup):
    """The ranks of one group, distrustful.

    Args:
        groups: what makes the shard group.
        patience: seconds to wait for the last rank.
    """

    def __init__(self, *groups: Any, patience: float) -> None:
        super().__init__(*groups)
        self._meetings = Meetings(self.group, patience)
        self._deferred: deque[_Deferred] = deque()

    # ---- wires ----

    def reduce_scatter(self, wire: Tensor, fp8: bool = False, about: About | None = None) -> Pending[Tensor]:
        """As ever, later."""
        return self._later(wire, about, partial(super().reduce_scatter, wire, fp8, about))

    def all_reduce(self, wire: Tensor, fp8: bool = False, about: About | None = None) -> Pending[Tensor]:
        """As ever, later."""
        return self._later(wire, about, partial(super().all_reduce, wire, fp8, about))

    def all_gather(self, wire: Tensor) -> Pending[Tensor]:
        """As ever, after a meeting."""
        self._meet(GATHER, _shapes([wire]))
        return super().all_gather(wire)

    def gather(
        self,
        own: Sequence[Tensor],
        rows: Sequence[Tensor],
        fp8: bool = False,
        alignment: Alignment = END_TO_END,
        about: About | None = None,
    ) -> Pending[None]:
        """As ever, after a meeting."""
        self._meet(GATHER, _shapes(rows), about)
        return super().gather(own, rows, fp8, alignment, about)

    def all_to_all(
        self, wire: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]
    ) -> Pending[Tensor]:
        """As ever, after a meeting."""
        self._meet(EXCHANGE, str(wire.dtype))
        return super().all_to_all(wire, sizes, into, sizes_into)

    def sum_scalar(self, value: Tensor) -> Pending[Tensor]:
        """As ever, after a meeting, at which all reductions of the step are over."""
        self._meet(NORM, _shapes([value]))
        self._meetings.forget()
        return super().sum_scalar(value)

    def broadcast(self, tensors: Sequence[Tensor], by_way_of: torch.device) -> None:
        """As ever, after a meeting."""
        self._meet(BROADCAST, _shapes(tensors))
        super().broadcast(tensors, by_way_of)

    # ---- what the hosts tell each other ----

    def largest(self, values: Sequence[int]) -> list[int]:
        """As ever."""
        told = self._meet(AGREEMENT, f"{len(values)} numbers", payload=[int(value) for value in values])
        return [max(column) for column in zip(*told, strict=True)]

    def from_rank_zero(self, values: Sequence[int]) -> list[int]:
        """As ever."""
        told: list[list[int]] = self._meet(AGREEMENT, f"{len(values)} numbers of rank 0's", payload=list(values))
        return told[0]

    def exchange(self, mine: object) -> list[Any]:
        """As ever."""
        payload = base64.b64encode(pickle.dumps(mine)).decode()
        return [pickle.loads(base64.b64decode(theirs)) for theirs in self._meet(AGREEMENT, "objects", payload=payload)]

    def maximum(self, values: Tensor) -> Pending[Tensor]:
        """As ever: published at once, compared when it is waited for. One rank's backward may meet another's step."""
        size = f"{len(values)} bytes"
        name = self._signature(MESSAGE, size, None)
        meeting = self._meetings.publish(MESSAGE, f"{MESSAGE}: {size}", values.tolist(), name)

        def finish() -> Tensor:
            told = self._wait_at(MESSAGE, meeting)
            return values.copy_(values.new_tensor(told).amax(dim=0))

        return Pending((), (values,), finish, lambda: self._meetings.all_here(meeting))

    # ---- how ----

    def _meet(self, kind: str, what: str, about: About | None = None, payload: object = None) -> list[Any]:
        return self._wait_at(kind, self._meetings.publish(kind, self._signature(kind, what, about), payload))

    def _wait_at(self, kind: str, meeting: Meeting) -> list[Any]:
        return self.progress.wait(self.progress.begin(kind), partial(self._compare, meeting))

    def _compare(self, meeting: Meeting) -> list[Any]:
        return self._meetings.compare(meeting, self._begin_what_is_ready)

    def _signature(self, kind: str, what: str, about: About | None) -> str:
        when = f"step {self.progress.step + 1}"
        if kind == REDUCTION:
            when += f", micro-batch {self.progress.micro_batch + 1}"
        elif kind != GATHER:
            when += f", in {_called()}"
        bucket = "" if about is None or about.bucket is None else f" of bucket {about.bucket}"
        names = "" if about is None else f" of {listed(about.names())}"
        return f"{kind}{bucket} ({when}): {what}{names}"

    def _later(self, wire: Tensor, about: About | None, begin: Callable[[], Pending[T]]) -> Pending[T]:
        meeting = self._meetings.publish(REDUCTION, self._signature(REDUCTION, _shapes([wire]), about))
        deferred = _Deferred(meeting, begin)
        self._deferred.append(deferred)
        self._begin_what_is_ready()
        return Pending((), (wire,), partial(self._finish, deferred), deferred.done)

    def _finish(self, deferred: _Deferred) -> Any:
        while deferred.begun is None:
            self._compare(self._deferred[0].meeting)
            self._begin_what_is_ready()
        return deferred.begun.wait()

    def _begin_what_is_ready(self) -> None:
        while self._deferred and self._meetings.all_here(self._deferred[0].meeting):
            first = self._deferred[0]
            self._meetings.compare(first.meeting, _nothing)
            first.begun = first.begin()
            self._deferred.popleft()


class CheckedLevels(CheckedGroup, TwoLevels):
    """Those of two levels."""


def checked(group: ShardGroup, options: ZeroOptions) -> ShardGroup:
    """``group``, watched; distrustful if that is chosen and there is somebody to compare with; all ranks call it."""
    if not options.debug or group.ranks == 1 or dist.get_backend(group.group) == "fake":
        group.watch(options.stall_timeout)
        return group
    patience = options.stall_timeout or _PATIENCE
    if isinstance(group, TwoLevels):
        distrustful: CheckedGroup = CheckedLevels(*group.made_of, patience=patience)
    else:
        distrustful = CheckedGroup(group.group, patience=patience)
    distrustful.watch(options.stall_timeout)
    return distrustful


def _shapes(tensors: Sequence[Tensor]) -> str:
    shapes = [f"{list(tensor.shape)}" for tensor in tensors]
    dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
    return f"{listed(shapes)} {dtypes}"


def _called() -> str:
    """The name of the method that the caller's code has called: the outermost one of this package."""
    name, frame = "", sys._getframe()
    package = __name__.partition(".")[0] + "."
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(package):
            name = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return name


def _nothing() -> None:
    pass


def _difference(signatures: Sequence[str]) -> str:
    first = signatures[0]
    rank = next(rank for rank, signature in enumerate(signatures) if signature != first)
    like = [other for other, signature in enumerate(signatures) if signature == signatures[rank]]
    return (
        f"expected the same call on every rank, rank 0 came to «{first}», "
        f"{'rank' if len(like) == 1 else 'ranks'} {', '.join(map(str, like))} to «{signatures[rank]}»"
    )
