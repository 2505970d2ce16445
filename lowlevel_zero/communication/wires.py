"""Wires: on gloo, the group in which one optimizer's wires travel, and how; lent from one optimizer to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .exchange import Exchange
from .groups import gloo_like
from .transport import Direct, Pending

if TYPE_CHECKING:  # they need what only Linux has
    from .arena import Arena
    from .shared_memory import SharedMemory

SWITCH = "LOWLEVEL_ZERO_SHARED_MEMORY"


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
        shared: the one through shared memory, or why there can't be one; None: not tried yet.
        busy: an instance of this rank has it.
    """

    group: dist.ProcessGroup
    transport: Direct
    shared: SharedMemory | str | None = None
    busy: bool = False

    @property
    def fast(self) -> SharedMemory | None:
        """The transport, if it is shared memory."""
        return _memory(self.shared) if self.transport is self.shared else None

    def share(self, ranks: Agreeing, wanted: bool) -> None:
        """Use shared memory or not, alike on all ranks."""
        if wanted and self.shared is None:
            self.shared = _shared_memory(ranks, self.group)
        memory = _memory(self.shared) if wanted else None
        if memory is not None:
            self.transport = memory
        elif self.fast is not None:
            self.transport = Exchange(self.group)

    def __str__(self) -> str:
        if self.fast is not None:
            return "shared memory of one host"
        why_not = self.shared if isinstance(self.shared, str) else f"{SWITCH}=0 is set on one of them"
        return f"pairwise messages over gloo ({why_not})"


def _memory(shared: SharedMemory | str | None) -> SharedMemory | None:
    return None if isinstance(shared, str) else shared


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
    return _memory(lent[0].shared) if lent else None


def keep(under_way: Sequence[Pending[Any]]) -> None:
    """Let these travel, though nobody may wait for them."""
    _kept[:] = [*(pending for pending in _kept if not pending.done()), *under_way]


def _shared_memory(ranks: Agreeing, group: dist.ProcessGroup) -> SharedMemory | str:
    """Wires in shared memory if every rank can see every other's, else why not; alike on all."""
    own = _own_arena(dist.get_world_size(group))
    told = ranks.exchange(own if isinstance(own, str) else own.address)
    if isinstance(own, str) or _refusals(told):
        return _refusals(told)
    transport = _over_arenas(group, own, told)
    told = ranks.exchange(transport if isinstance(transport, str) else None)
    return _refusals(told) or transport


def _own_arena(ranks: int) -> Arena | str:
    try:
        from .arena import Arena

        return Arena(ranks)
    except (ImportError, AttributeError) as error:
        return f"not on its system: {error}"
    except OSError as error:
        return str(error)


def _over_arenas(group: dist.ProcessGroup, own: Arena, addresses: Sequence[Any]) -> SharedMemory | str:
    from .shared_memory import SharedMemory

    try:
        return SharedMemory(group, own, addresses)
    except (OSError, ValueError, AttributeError) as error:  # other hosts, containers or users; an old system
        return str(error)


def _refusals(told: Sequence[object]) -> str:
    """Which ranks have said that they can't, and why; empty: none has."""
    return "; ".join(f"rank {rank}: {word}" for rank, word in enumerate(told) if isinstance(word, str))
