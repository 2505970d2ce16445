"""Hosts: what the optimizers of one process group have in common, and what its ranks' hosts agree on."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import AGREED, Exchange
from .groups import side_group
from .lost_ranks import know, naming_lost, own_process
from .process_group import of_group
from .transport import HostTransport, Pending

if TYPE_CHECKING:  # they need what only Linux has
    from .arena import Arena
    from .shared_memory import Pool

SWITCH = "LOWLEVEL_ZERO_SHARED_MEMORY"


class InCommon:
    """What all optimizers of a process group use together, on this rank.

    Attributes:
        numbers: of the optimizers, which all ranks count alike.
        agreements: how the ranks agree, in one order.
    """

    agreements: HostTransport

    def __init__(self) -> None:
        self.numbers = count(1)
        self._has_met = False
        self._pool: Pool | str | None = None
        self._kept: list[Pending[Any]] = []

    def share_memory(self, group: dist.ProcessGroup, number: int) -> HostTransport | None:
        """The way through shared memory of the optimizer of this number; None on all ranks if one of them can't.

        All ranks of ``group`` call it.
        """
        if self._pool is None:
            self._pool = _pool(group, self.agreements)
            self.agreements = self._over_pool(group, 0) or self.agreements
        return self._over_pool(group, number)

    def way_of(self, hosts: HostTransport) -> str:
        """How an optimizer's tensors travel, in words."""
        if hosts.shares_memory:
            return "shared memory of one host"
        why_not = self._pool if isinstance(self._pool, str) else f"{SWITCH}=0 is set on one of them"
        return f"pairwise messages over gloo ({why_not})"

    def meet(self, group: dist.ProcessGroup) -> None:
        """Have the ranks of ``group`` know each other's processes; all call it, and once is enough."""
        if not self._has_met:
            self._has_met = True
            self.agreements = Exchange(side_group(group))
            with naming_lost(group, "first meeting of all ranks"):
                processes = exchange(self.agreements, own_process())
            know(dict(zip(dist.get_process_group_ranks(group), processes, strict=True)))

    def keep(self, under_way: Sequence[Pending[Any]]) -> None:
        """Let these travel, though nobody may wait for them.

        gloo stops reading from a peer when it has no tensor any more for what comes: all that comes after it, for
        whichever optimizer, would never be read.
        """
        self._kept = [*(pending for pending in self._kept if not pending.done()), *under_way]

    def _over_pool(self, group: dist.ProcessGroup, number: int) -> HostTransport | None:
        if self._pool is None or isinstance(self._pool, str):
            return None
        from .shared_memory import SharedMemory

        return SharedMemory(side_group(group), number, self._pool)


def in_common(group: dist.ProcessGroup) -> InCommon:
    """What the optimizers of ``group`` have in common; all of its ranks, of which there are several, call it."""
    common = of_group(group, InCommon)
    common.meet(group)
    return common


def largest(ranks: HostTransport, values: Sequence[int]) -> list[int]:
    """The element-wise maximum of every rank's ``values``, an agreement: they have one order on all ranks."""
    told = ranks.exchange_few(torch.tensor(values, dtype=torch.int64, device="cpu"), AGREED).wait()
    most: list[int] = torch.stack(told).amax(dim=0).tolist()
    return most


def exchange(ranks: HostTransport, mine: object) -> list[Any]:
    """Every rank's ``mine`` in rank order, pickled; in one order with agreements."""
    data = bytearray(pickle.dumps(mine))
    (length,) = largest(ranks, [len(data)])
    data.extend(bytes(length - len(data)))
    told = ranks.exchange_few(torch.frombuffer(data, dtype=torch.uint8), AGREED).wait()
    return [pickle.loads(_bytes(theirs)) for theirs in told]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _pool(group: dist.ProcessGroup, ranks: HostTransport) -> Pool | str:
    """Memory that every rank can see every other's of, else why not; alike on all."""
    own = _own_arena(dist.get_world_size(group))
    told = exchange(ranks, own if isinstance(own, str) else own.address)
    if isinstance(own, str) or _refusals(told):
        return _refusals(told)
    pool = _pool_of(group, own, told)
    told = exchange(ranks, pool if isinstance(pool, str) else None)
    return _refusals(told) or pool


def _own_arena(ranks: int) -> Arena | str:
    try:
        from .arena import Arena

        return Arena(ranks)
    except (ImportError, AttributeError) as error:
        return f"not on its system: {error}"
    except OSError as error:
        return str(error)


def _pool_of(group: dist.ProcessGroup, own: Arena, addresses: Sequence[Any]) -> Pool | str:
    from .shared_memory import Pool

    try:
        return Pool(group, own, addresses)
    except (OSError, ValueError, AttributeError) as error:  # other hosts, containers or users; an old system
        return str(error)


def _refusals(told: Sequence[object]) -> str:
    """Which ranks have said that they can't, and why; empty: none has."""
    return "; ".join(f"rank {rank}: {word}" for rank, word in enumerate(told) if isinstance(word, str))
