"""Wires: on gloo, the group in which one optimizer's wires travel, and how; lent from one optimizer to the next."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .arena import Arena
from .exchange import Exchange
from .groups import gloo_like
from .shared_memory import SharedMemory
from .transport import Direct, Pending


class Agreeing(Protocol):
    """Ranks that can tell each other something, all at a time."""

    def largest(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum of every rank's ``values``."""

    def exchange(self, mine: object) -> list[Any]:
        """Every rank's ``mine`` in rank order."""


@dataclass
class Wires:
    """A gloo group for wires, and how they travel in it.

    Attributes:
        transport: in use.
        shared: the one through shared memory; None: not tried yet; False: the ranks don't see each other's.
        busy: an instance of this rank has it.
    """

    group: dist.ProcessGroup
    transport: Direct
    shared: SharedMemory | bool | None = None
    busy: bool = False

    @property
    def fast(self) -> SharedMemory | None:
        """The transport, if it is shared memory."""
        return self.transport if isinstance(self.transport, SharedMemory) else None

    def share(self, ranks: Agreeing, wanted: bool) -> None:
        """Use shared memory or not, alike on all ranks."""
        if wanted and self.shared is None:
            self.shared = _shared_memory(ranks, self.group) or False
        if wanted and isinstance(self.shared, SharedMemory):
            self.transport = self.shared
        elif isinstance(self.transport, SharedMemory):
            self.transport = Exchange(self.group)


# By group: the groups made for wires, in the order of making, which is the same on all ranks.
_lent: WeakKeyDictionary[dist.ProcessGroup, list[Wires]] = WeakKeyDictionary()

# What nobody may ever wait for, kept until it is done. gloo stops reading from a peer when it has no tensor any more
# for what comes, and whoever destroys the process group then waits forever for what was to be read after it.
_kept: list[Pending[Any]] = []


def borrow(ranks: Agreeing, group: dist.ProcessGroup, shared: bool) -> Wires:
    """Wires that no instance of any rank has, made if there are none; all ranks call it.

    Through shared memory if all want to be ``shared``, and are processes of one host.
    """
    lent = _lent.setdefault(group, [])
    plain, *taken = ranks.largest([not shared, *(wires.busy for wires in lent)])
    free = [wires for wires, busy in zip(lent, taken, strict=True) if not busy]
    if not free:
        own = gloo_like(group)
        free = [Wires(own, Exchange(own))]
        lent += free
    free[0].busy = True
    free[0].share(ranks, not plain)
    return free[0]


def board(group: dist.ProcessGroup) -> SharedMemory | None:
    """Where the hosts of all ranks of ``group`` can tell each other something fast; None: they can't, or not yet.

    It is the same for all optimizers, whose agreements have one order.
    """
    lent = _lent.get(group)
    return lent[0].shared if lent and isinstance(lent[0].shared, SharedMemory) else None


def keep(under_way: Sequence[Pending[Any]]) -> None:
    """Let these travel, though nobody may wait for them."""
    _kept[:] = [*(pending for pending in _kept if not pending.done()), *under_way]


def _shared_memory(ranks: Agreeing, group: dist.ProcessGroup) -> SharedMemory | None:
    """Wires in shared memory if every rank can see every other's, else None on all."""
    own, transport = None, None
    with suppress(OSError, AttributeError):  # no memfd: not Linux, or an old one
        own = Arena()
    addresses = ranks.exchange(own and own.address)
    if own is not None and all(addresses):
        with suppress(OSError, ValueError, AttributeError):  # other hosts, containers or users; an old system
            transport = SharedMemory(group, own, addresses)
    (failed,) = ranks.largest([transport is None])
    return None if failed else transport
