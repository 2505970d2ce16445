"""Debug checks: ranks compare what they are about to do before they do it.

Before each collective every rank publishes a *fingerprint* of it in the group's store, waits for those of the others
and compares. Where they differ, or a rank doesn't come in time, all ranks raise the same error: the first to know
writes it into the store, where all look while they wait, and at their next collective.

Reductions and presence maps are published when they are started, but begun only once all ranks have published them. A
rank whose backward is over may be waiting for something else by then; so whoever waits, for whatever it is, begins
meanwhile what has become ready. What begins keeps the order in which it was started.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from ..communication.failed_ranks import listed_ranks, lost, lost_rank_error
from ..communication.process_groups import is_fake, store_of
from ..communication.progress import (
    AGREEMENT,
    GATHER,
    MESSAGE,
    NORM,
    REDUCTION,
    About,
    Collective,
    Progress,
    called,
    listed,
)
from ..communication.shard_group import ShardGroup
from ..communication.work import Work
from ..options import ZeroOptions
from .stall_report import watch

_PATIENCE = 60.0  # seconds to wait for the last rank where stalls aren't reported
_FIRST_LOOK, _SLOWEST_LOOK = 0.0002, 0.02  # seconds

T = TypeVar("T")


def checked(group: ShardGroup, options: ZeroOptions) -> ShardGroup:
    """``group``, watched; its ranks compare what they do from now on if that is chosen; all ranks call it."""
    if options.debug:
        check(group, options.stall_timeout or _PATIENCE)
    watch(group, options.stall_timeout)
    return group


def check(group: ShardGroup, patience: float) -> None:
    """Have the ranks of ``group`` compare from now on; all call it. ``patience``: seconds to wait for the last."""
    if group.ranks > 1 and not is_fake(group.group):
        group.progress = CheckedProgress(group, patience)


@dataclass
class _Pending:
    """A collective whose fingerprint this rank has published, and that is begun when all ranks have.

    Attributes:
        keys: where all ranks' fingerprints are.
        name: what errors call it.
        begin: begins it.
        begun: it, once it has begun.
    """

    keys: list[str]
    name: str
    begin: Callable[[], Work[Any]]
    begun: Work[Any] | None = None


class FingerprintStore:
    """The fingerprints of one shard group's collectives, in its store.

    Args:
        group: the shard group.
        patience: seconds to wait for the last rank.
    """

    def __init__(self, group: ShardGroup, patience: float) -> None:
        self._rank, self._size = group.group_rank, group.ranks
        self._ranks = dist.get_process_group_ranks(group.group)
        self._patience = patience
        self._store = store_of(group.group, f"debug/{group.number}")
        self._own: list[str] = []
        self._to_forget: list[str] = []

    def publish(self, at: str, fingerprint: str, name: str) -> list[str]:
        """Say that this rank has come to a collective, and what with; where all ranks say so."""
        self._raise_if_failed()
        keys = [f"{at}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], fingerprint)
        self._store.set(f"last/{self._rank}", name)
        self._own.append(keys[self._rank])
        return keys

    def all_here(self, pending: _Pending) -> bool:
        """Whether all ranks have come."""
        return bool(self._store.check(pending.keys))

    def compare(self, pending: _Pending, meanwhile: Callable[[], None]) -> None:
        """Return once all have come with one fingerprint; raise otherwise."""
        deadline, pause = time.monotonic() + self._patience, _FIRST_LOOK
        while not self.all_here(pending):
            self._raise_if_failed()
            gone = lost(self._ranks)
            if gone:
                self._fail(str(lost_rank_error(gone, pending.name)))
            if time.monotonic() > deadline:
                self._fail(self._who_is_missing(pending))
            meanwhile()
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST_LOOK)
        fingerprints = [str(self._store.get(key), "utf-8") for key in pending.keys]
        if len(set(fingerprints)) > 1:
            self._fail(_difference(fingerprints))

    def forget(self) -> None:
        """Remove what this rank published a step ago, which all ranks have compared by now."""
        for key in self._to_forget:
            self._store.delete_key(key)
        self._to_forget, self._own = self._own, []

    def _who_is_missing(self, pending: _Pending) -> str:
        missing = [rank for rank, key in enumerate(pending.keys) if not self._store.check([key])]
        where = "; ".join(f"rank {rank} {self._last_of(rank)}" for rank in missing)
        return (
            f"expected all ranks at the same call, rank {self._rank} came to «{pending.name}» and has waited "
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


class CheckedProgress(Progress):
    """Begins a collective when all ranks have come to the same one.

    Args:
        group: the shard group.
        patience: seconds to wait for the last rank.
    """

    def __init__(self, group: ShardGroup, patience: float) -> None:
        super().__init__(group.context)
        self._published: defaultdict[str, int] = defaultdict(int)
        self.fingerprints = FingerprintStore(group, patience)
        self._buffers: deque[_Pending] = deque()
        self._maps: deque[_Pending] = deque()
        self._agreements: deque[_Pending] = deque()

    def start(
        self, kind: str, about: About | None, tensors: Sequence[Tensor], begin: Callable[..., Work[T]], *args: Any
    ) -> Work[T]:
        """Begin it later; but at once, when all have come, where somebody is about to wait for it anyway."""
        self.check_process(kind)
        serial = self._published[kind]
        self._published[kind] = serial + 1
        collective = Collective(kind, serial, self.step, self.micro_batch, about)
        name = _fingerprint(collective, tensors)
        # A backward's presence map may come along with a step's.
        fingerprint = f"{kind}: {_shapes(tensors)}" if kind == MESSAGE else name
        keys = self.fingerprints.publish(f"{kind}/{serial}", fingerprint, name)
        pending = _Pending(keys, name, partial(super().start, kind, about, tensors, begin, *args))
        queue = {MESSAGE: self._maps, AGREEMENT: self._agreements}.get(kind, self._buffers)
        queue.append(pending)
        wait_and_begin = partial(self.wait, collective, False, partial(self._begin, pending, queue))
        if kind in (REDUCTION, MESSAGE):
            self._begin_what_is_ready()
        else:
            wait_and_begin()
        if kind == NORM:  # at which all reductions of the step are over
            self.fingerprints.forget()
        return Work(partial(_finish, wait_and_begin, pending), partial(self._is_done, pending), tuple(tensors))

    def _begin(self, pending: _Pending, queue: deque[_Pending]) -> None:
        while pending.begun is None:
            self.fingerprints.compare(queue[0], self._begin_what_is_ready)
            self._begin_what_is_ready()

    def _is_done(self, pending: _Pending) -> bool:
        self._begin_what_is_ready()
        return pending.begun is not None and pending.begun.done()

    def _begin_what_is_ready(self) -> None:
        for queue in (self._maps, self._agreements, self._buffers):
            while queue and self.fingerprints.all_here(queue[0]):
                self.fingerprints.compare(queue[0], lambda: None)
                queue[0].begun = queue[0].begin()
                queue.popleft()


def _finish(wait_and_begin: Callable[[], None], pending: _Pending) -> Any:
    if pending.begun is None:
        wait_and_begin()
    return cast("Work[Any]", pending.begun).wait()


def _fingerprint(collective: Collective, tensors: Sequence[Tensor]) -> str:
    when = f"step {collective.step + 1}"
    if collective.kind == REDUCTION:
        when += f", micro-batch {collective.micro_batch + 1}"
    elif collective.kind != GATHER:
        when += f", in {called(sys._getframe())}"
    about = collective.about
    bucket = "" if about is None or about.bucket is None else f" of bucket {about.bucket}"
    names = "" if about is None else f" of {listed(about.names())}"
    return f"{collective.kind}{bucket} ({when}): {_shapes(tensors)}{names}"


def _shapes(tensors: Sequence[Tensor]) -> str:
    shapes = [f"{list(tensor.shape)}" for tensor in tensors]
    dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
    return f"{listed(shapes)} {dtypes}"


def _difference(fingerprints: Sequence[str]) -> str:
    first = fingerprints[0]
    rank = next(rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != first)
    like = [other for other, fingerprint in enumerate(fingerprints) if fingerprint == fingerprints[rank]]
    return (
        f"expected the same call on every rank, rank 0 came to «{first}», "
        f"{listed_ranks(like)} to «{fingerprints[rank]}»"
    )
