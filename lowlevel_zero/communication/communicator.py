"""Communicator: the ranks of one process group, and the backends that carry what.

Which backend is fast is decided here and nowhere else. NCCL and its like run their native collectives; on gloo, rows go
straight to the rank that wants them, through shared memory where all ranks are processes of one host. gloo carries a
device's buffers through the host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..streams import streams_of
from .backends.backend import AGREED, MAXIMUM, Alone, Backend, HostBackend
from .backends.memory_pool import Memory, open_pool
from .backends.native import Native
from .backends.pairwise import Pairwise
from .backends.shared_memory import SharedMemory
from .backends.staged import Staged
from .failed_ranks import know, naming_lost
from .flat_buffers import as_message, batches, read_message
from .fp8 import Fp8
from .process_groups import backends_by_device, context_of, data_group, default_group, is_fake, side_group, timeout_of
from .processes import own_process
from .work import Chain, OnStream, OnThread, Work

SWITCH = "LOWLEVEL_ZERO_SHARED_MEMORY"

_HOST = torch.device("cpu")


class Communicator:
    """The ranks of one process group, each of which holds a slice.

    Args:
        group: the process group; None: the default one.

    Attributes:
        group: the process group.
        rank: which slice this process holds.
        size: slices that a parameter is cut into.
        slice_ranks: global ranks of who holds slices 0, 1, 2, ...
        device_types: types of the devices whose tensors can be carried.
        hosts: what carries the hosts' own tensors and messages.
        backend: what carries buffers of a device, in fp8 if that is wanted and there are others.
        has_others: there are other ranks, and they are there.
        number: of this instance among those of the process group that have an order of their own, the same on all
            ranks; 0: it has none.

    Raises:
        RuntimeError: no process group is initialised.
        ValueError: this process doesn't belong to ``group``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "expected an initialised process group, got none: call torch.distributed.init_process_group() "
                "first (or start the program with torchrun); one process alone needs it too, with world_size=1"
            )
        self.group: dist.ProcessGroup = group if group is not None else default_group()
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError(
                "dp_process_group: expected a group that this process belongs to, got one without it: "
                "construct the optimizer on member ranks only"
            )
        self.size = dist.get_world_size(self.group)
        self.slice_ranks = dist.get_process_group_ranks(self.group)
        self._backends = backends_by_device(self.group)
        self.device_types = sorted(self._backends)
        self.context = context_of(self.group)
        self.has_others = self.size > 1 and not is_fake(self.group)
        self.number = 0
        self.backend = cache(self._choose)
        self._chains: dict[str, Chain] = {}
        self._native: Backend = Alone(self.rank, 1) if self.size == 1 else Native(data_group(self.group))
        self.hosts: HostBackend = Alone(self.rank, 1)
        if self.has_others:
            self._meet()
            self.hosts = Pairwise(side_group(self.group))

    def _meet(self) -> None:
        """Have the ranks know each other's processes; all come, and once is enough."""
        if isinstance(self.context.agreements, Alone):
            self.context.agreements = agreements = Pairwise(side_group(self.group))
            with naming_lost(self.group, "first meeting of all ranks"):
                processes = agreements.all_gather_object(own_process())
            know(dict(zip(self.slice_ranks, processes, strict=True)))

    def connect(self, shared: bool = True, sums_in_fp32: bool = False) -> None:
        """Give what hosts send each other from here an order of its own; all ranks call it.

        On gloo a rank may then be ahead with one optimizer's buffers when another's, or the caller's own collectives,
        are next. On NCCL the order of all optimizers' buffers must be the same on every rank. If ``shared`` and all
        ranks are processes of one host, buffers on gloo travel through shared memory, unless
        ``LOWLEVEL_ZERO_SHARED_MEMORY=0`` is set on one of them. ``sums_in_fp32``: reduce-scatters sum 16-bit buffers in
        fp32 elsewhere too.
        """
        if sums_in_fp32 and self.size > 1:
            self._native = Native(data_group(self.group), sums_in_fp32=True)
        self.backend.cache_clear()
        if not self.has_others:
            return
        self.number = next(self.context.connected)
        self.hosts = Pairwise(side_group(self.group), self.number)
        if self.on_gloo(_HOST):
            refused = torch.tensor([int(not shared or os.environ.get(SWITCH) == "0")], device="cpu")
            if not self.context.agreements.exchange(refused, AGREED, MAXIMUM).wait():
                self._share_memory()

    def _share_memory(self) -> None:
        """Go through shared memory, if all ranks can; alike on all."""
        context = self.context
        if context.pool is None:
            context.pool = open_pool(self.rank, self.size, timeout_of(self.group), context.agreements)
            if isinstance(context.pool, Memory):
                context.agreements = SharedMemory(self.rank, context.pool, 0)
        if isinstance(context.pool, Memory):
            self.hosts = SharedMemory(self.rank, context.pool, self.number)

    # ---- which backend carries what ----

    def on_gloo(self, device: torch.device) -> bool:
        """Whether gloo carries tensors of ``device``."""
        return self.has_others and self._backends.get(device.type) == "gloo"

    def _choose(self, device: torch.device, fp8: bool = False) -> Backend:
        direct = self.hosts if self.on_gloo(device) else self._native
        way = Fp8(direct, self._chain(device)) if fp8 and self.size > 1 else direct
        return Staged(way) if self.on_gloo(device) and is_staged(device) else way

    def _chain(self, device: torch.device) -> Chain:
        """Orders what comes second on ``device``: one for all of it."""
        if device.type not in self._chains:
            self._chains[device.type] = OnThread() if self.on_gloo(device) else OnStream(streams_of([device]))
        return self._chains[device.type]

    def way_of(self, device: torch.device) -> str | None:
        """How buffers of ``device`` travel, in words; None: as the process group's backend has it."""
        if not self.on_gloo(device):
            return None
        if self.hosts.shares_memory:
            return "shared memory of one host"
        pool = self.context.pool
        return f"pairwise messages over gloo ({pool if isinstance(pool, str) else f'{SWITCH}=0 is set on one of them'})"

    def traffic(self, rows: Mapping[str, int]) -> dict[str, int]:
        """Bytes that others get of buffers whose rows have so many, by purpose: all rows but this rank's."""
        return {purpose: (self.size - 1) * nbytes for purpose, nbytes in rows.items()}

    # ---- what isn't a buffer ----

    def broadcast(self, tensors: Sequence[Tensor], by_way_of: torch.device) -> None:
        """Overwrite ``tensors`` with rank 0's values: see ``ShardGroup.broadcast``."""
        for batch in batches(tensors) if self.size > 1 else ():
            message = as_message(batch)
            if self.on_gloo(message.device):
                message = message.cpu()
            elif message.device.type not in self.device_types:
                message = message.to(by_way_of)
            dist.broadcast(message, src=self.slice_ranks[0], group=self.group)
            read_message(message, batch)

    # ---- memory, and the end ----

    def held(self) -> list[Tensor]:
        """Memory that buffers take on the host, or that is kept for them."""
        return self.hosts.held()

    def trim(self, for_good: bool = False) -> None:
        """Nothing is under way on this rank: give memory back that buffers took."""
        self.hosts.trim(for_good)

    def keep(self, under_way: Sequence[Work[Any]]) -> None:
        """Let these travel, though nobody will wait for them.

        gloo stops reading from a peer when it has no tensor any more for what comes: all that comes after it, for
        whichever optimizer, would never be read.
        """
        kept = self.context.abandoned
        kept[:] = [*(work for work in kept if not work.done()), *under_way]


def is_staged(device: torch.device) -> bool:
    """Whether gloo can't take tensors of ``device`` as they are."""
    return device.type != "cpu"
