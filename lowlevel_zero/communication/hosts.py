"""Hosts: what the optimizers of one process group have in common, and what its ranks' hosts agree on."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arena import Arena
from .exchange import AGREED, Exchange
from .groups import side_group
from .lost_ranks import know, naming_lost, own_process
from .process_group import of_group
from .shared_memory import Pool, SharedMemory
from .transport import HostTransport, Pending


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
        self._pool: Pool | None = None
        self._has_tried = False
        self._kept: list[Pending[Any]] = []

    def pool(self, group: dist.ProcessGroup) -> Pool | None:
        """Memory that every rank can see every other's of; None on all if one can't. All ranks of ``group`` call it."""
        if not self._has_tried:
            self._has_tried = True
            self._pool = _pool(group, self.agreements)
            if self._pool is not None:
                self.agreements = SharedMemory(side_group(group), 0, self._pool)
        return self._pool

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


def in_common(group: dist.ProcessGroup) -> InCommon:
    """What the optimizers of ``group`` have in common; all of its ranks, of which there are several, call it."""
    common = of_group(group, InCommon)
    common.meet(group)
    return common


def largest(ranks: HostTransport, values: Sequence[int]) -> list[int]:
    """The element-wise maximum of every rank's ``values``, an agreement: they have one order on all ranks."""
    told = ranks.exchange_few(torch.tensor(values, dtype=torch.int64), AGREED).wait()
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


def _pool(group: dist.ProcessGroup, ranks: HostTransport) -> Pool | None:
    own, pool = None, None
    with suppress(OSError, AttributeError):  # no memfd: not Linux, or an old one
        own = Arena()
    addresses = exchange(ranks, own and own.address)
    if own is not None and all(addresses):
        with suppress(OSError, ValueError, AttributeError):  # other hosts, containers or users; an old system
            pool = Pool(group, own, addresses)
    (failed,) = largest(ranks, [pool is None])
    return None if failed else pool
