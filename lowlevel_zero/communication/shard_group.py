"""ShardGroup: the ranks that share parameters, their collectives, and the choice of backends.

Which backend is fast is decided here and nowhere else. NCCL and its like run their native collectives; on gloo, rows go
straight to the rank that wants them, through shared memory where all ranks are processes of one host. gloo carries a
device's buffers through the host. Each collective is accounted for, and begun such that one sees who waits for it and
who is missing. (Ranks in rows and columns: ``grid.py``.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor

from ..partition import END_TO_END, Alignment
from .backends.backend import DEVICE_BUCKET, Alone, Backend, HostBackend, Kind
from .backends.memory_pool import Memory, open_pool
from .backends.native import Native
from .backends.pairwise import Pairwise
from .backends.shared_memory import SharedMemory
from .backends.staged import Staged, is_staged
from .fp8 import Fp8, encoded_size
from .process_groups import (
    backends_by_device,
    buffer_group,
    context_of,
    data_group,
    default_group,
    is_fake,
    side_group,
    timeout_of,
)
from .progress import AGREEMENT, GATHER, MESSAGE, NORM, REDUCTION, About, Progress, called
from .runtime import Threads, Worker, runtime
from .work import Work

SWITCH = "LOWLEVEL_ZERO_SHARED_MEMORY"

T = TypeVar("T")

_HOST = torch.device("cpu")
_LEAST = torch.iinfo(torch.int64).min
_SHORTEST_NAP = 5e-5  # seconds


class ShardGroup:
    """The ranks over which parameters are sharded, with the collectives on flat buffers and small messages.

    Args:
        group: the process group; None: the default one.

    Attributes:
        rank: the number of this process's slice of each parameter.
        size: the number of slices of each parameter.
        group_rank: this process's rank among all ranks over which gradients are summed; rank 0's values are broadcast.
        ranks: the number of these ranks: ``size``, or more where slices have replicas (see ``grid.py``).
        slice_ranks: the global ranks that hold slices 0, 1, 2, ...
        holders: the global ranks that hold slice 0, 1, 2, ...: one each, or several replicas.
        number: numbers the connected shard groups of one process group, alike on all ranks; 0: not connected.
        device_types: the types of devices whose tensors the group can carry.
        has_others: there are other ranks, and they aren't fake.
        backend: ``backend(device, fp8)`` carries a device's buffers.

    Raises:
        RuntimeError: no process group is initialised, or this process is a fork of the one that used it before.
        ValueError: this process doesn't belong to the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "expected an initialised process group, got none: call torch.distributed.init_process_group() "
                "first (or start the program with torchrun); one process alone needs it too, with world_size=1"
            )
        group = group if group is not None else default_group()
        self.rank = self.group_rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(
                "dp_process_group: expected a group that this process belongs to, got one without it: "
                "construct the optimizer on member ranks only"
            )
        self.size = self.ranks = dist.get_world_size(group)
        self.slice_ranks = dist.get_process_group_ranks(group)
        self.holders: Sequence[Sequence[int]] = [[rank] for rank in self.slice_ranks]
        self._backends = backends_by_device(group)
        self.device_types = sorted(self._backends)
        self.has_others = self.size > 1 and not is_fake(group)
        self.context = context_of(group)
        self.progress = Progress(self.context)
        if self.has_others:
            self.progress.process = self.context.process
            self.progress.check_process(called(sys._getframe()))
        self.context.users.add(self)
        self.number, self._exchanges = 0, self.context.exchanges
        self._waiting: Worker | None = None
        self.backend = cache(partial(type(self)._choose, proxy(self)))  # a bound method would make a reference cycle
        self._rows = {"sum": 0, "spread": 0, "gather": 0}  # bytes of those of buffers: "spread" are all-reduces' sums
        self._owns_data = False  # devices' tensors have a group of their own
        self._native: HostBackend | Native = Alone(0, 1) if self.size == 1 else Native(group)
        self._host_backend: HostBackend | None = None if self.has_others else Alone(0, 1)

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the process group of all ranks; raise if it has been destroyed."""
        return self.context.group

    @property
    def place(self) -> str:
        """Return a name for it in the store, alike on all ranks: its number, or until it has one, when it was made."""
        return str(self.number) if self.number else f"0/{self._exchanges}"

    @property
    def host_backend(self) -> HostBackend:
        """Return the backend for tensors on the CPU and for small messages. May communicate when it is first made."""
        if self._host_backend is None:
            self._host_backend = self._messages(self.number)
        return self._host_backend

    def _messages(self, number: int, buffers: bool = False) -> Pairwise:
        """Return a new backend of messages, with a group for ``buffers`` if set. Communicates where it makes groups."""
        own = buffer_group(self.group) if buffers else None
        return Pairwise(side_group(self.group), self.context.threads, number, own)

    def _agreements(self) -> HostBackend:
        """Return the backend of agreements; the first call communicates, on all ranks together."""
        if not self.has_others:
            return self.host_backend
        if self.context.agreements is None:
            self.context.agreements = self._messages(0)
            processes = self.context.agreements.all_gather_object(runtime().own_process())
            ranks = dist.get_process_group_ranks(self.group)
            context_of(default_group()).processes.update(zip(ranks, processes, strict=True))
        self.context.exchanges += 1
        return self.context.agreements

    def connect(self, sums_in_fp32: bool = False, own: bool = True) -> None:
        """Take a number, and choose and set up the backends that carry buffers with the other ranks. Communicates.

        The ranks have agreed on it before, so each of them has the same number for it (see ``agreement.agree``).
        If all ranks are processes of one host, buffers on gloo travel through shared memory, unless
        ``LOWLEVEL_ZERO_SHARED_MEMORY=0`` is set on one of them. ``sums_in_fp32``: reduce-scatters sum 16-bit buffers in
        fp32 elsewhere too. ``own``: devices' buffers have a group of their own; else their order among the caller's
        collectives must be the same on every rank.
        """
        self.backend.cache_clear()
        self._owns_data = own
        self.context.shard_groups += 1
        self.number = self.context.shard_groups
        self.progress.run(AGREEMENT, partial(self._make_groups, sums_in_fp32))

    def _make_groups(self, sums_in_fp32: bool) -> None:
        """Make the group of devices' buffers, and on gloo set up shared memory or messages. Communicates."""
        if self.size > 1:
            self._native = Native(data_group(self.group) if self._owns_data else self.group, sums_in_fp32)
        if self.on_gloo(_HOST):
            memory = self._shared_memory()
            self._host_backend = (
                self._messages(self.number, buffers=True)
                if memory is None
                else SharedMemory(self.rank, memory, self.number)
            )

    def _shared_memory(self) -> Memory | None:
        """Return the memory that all ranks share; None if one refuses it or can't map another's. Communicates."""
        context, agreements = self.context, self._agreements()
        refused = torch.tensor([int(os.environ.get(SWITCH) == "0")], device="cpu")
        if agreements.maximum(refused, Kind.AGREEMENT).wait():
            return None
        if context.pool is None:
            context.pool = open_pool(agreements, self.slice_ranks, timeout_of(self.group), context.threads)
            if isinstance(context.pool, Memory):
                context.agreements = SharedMemory(self.rank, context.pool, 0)
        return context.pool if isinstance(context.pool, Memory) else None

    # ---- which backend carries what ----

    @property
    def levels(self) -> Sequence[ShardGroup]:
        """Return the shard groups whose backends carry buffers: this one, or a grid's column and row."""
        return (self,)

    def group_of(self, device: torch.device) -> dist.ProcessGroup:
        """Return the process group whose collectives carry tensors of ``device``. May communicate."""
        return data_group(self.group) if self._owns_data and not self.on_gloo(device) else self.group

    def on_gloo(self, device: torch.device) -> bool:
        """Return whether gloo carries tensors of ``device`` to other ranks; False where there are none."""
        return self.has_others and self._backends.get(device.type) == "gloo"

    def _choose(self, device: torch.device, fp8: bool = False) -> Backend:
        direct = self._direct(device)
        way = Fp8(direct) if fp8 and self.size > 1 else direct
        return Staged(way) if self.on_gloo(device) and is_staged(device) else way

    def _direct(self, device: torch.device) -> HostBackend | Native:
        """Return the backend that carries the buffers of ``device`` without rounding them to fp8."""
        return self.host_backend if self.on_gloo(device) else self._native

    def describe_backend(self, device: torch.device) -> str | None:
        """Return how buffers of ``device`` travel in a gloo group, as text; None by other backends or alone."""
        if not self.on_gloo(device):
            return None
        if self.host_backend.shares_memory:
            return "shared memory of one host"
        pool = self.context.pool
        return f"pairwise messages over gloo ({pool if isinstance(pool, str) else f'{SWITCH}=0 is set on one of them'})"

    def bucket_size(self, device: torch.device) -> int:
        """Return the default size of a gradient bucket on ``device``, in elements."""
        return self.backend(device).bucket_size if device.type == "cpu" else DEVICE_BUCKET

    # ---- the data path: one flat buffer, [size, row], at a time; with ``fp8``, rows travel as ``fp8.py`` has it ----

    def new_buffer(
        self, row: int, dtype: torch.dtype, device: torch.device, fp8: bool = False, rows: int | None = None
    ) -> Tensor:
        """Return an uninitialised buffer, ``[rows or size, row]``, in the backend's memory, for one reduction."""
        return self.backend(device, fp8).new_buffer(row, dtype, device, rows)

    def reduce_scatter(self, buffer: Tensor, fp8: bool = False, about: About | None = None) -> Work[Tensor]:
        """Start summing ``buffer`` over the ranks; the result is this rank's row of the sum, ``[row]``. Communicates.

        ``buffer`` (``[size, row]``, contiguous) must stay as it is until the result is there, and may be gone then.
        """
        row = buffer.shape[1]
        self._rows["sum"] += encoded_size(row) if fp8 else row * buffer.element_size()
        backend = self.backend(buffer.device, fp8)
        return self.progress.start(REDUCTION, about, backend.reduce_scatter, buffer)

    def all_reduce(self, buffer: Tensor, fp8: bool = False, about: About | None = None) -> Work[Tensor]:
        """Start summing ``buffer`` over the ranks; the result has its shape, and may be ``buffer``. Communicates."""
        row = -(-buffer.numel() // self.size)
        nbytes = encoded_size(row) if fp8 else row * buffer.element_size()
        self._rows["sum"] += nbytes
        self._rows["spread"] += nbytes
        backend = self.backend(buffer.device, fp8)
        return self.progress.start(REDUCTION, about, backend.all_reduce, buffer)

    def reduce(self, buffer: Tensor, owner: int, about: About | None = None) -> Work[Tensor]:
        """Start reducing ``buffer`` to ``owner``, which gets the sum, 1-D; others get an empty tensor. Communicates."""
        self._rows["sum"] += -(-buffer.nbytes // self.size)
        return self.progress.start(REDUCTION, about, self.backend(buffer.device).reduce, buffer, owner)

    def broadcast_from(
        self, owner: int, own: Sequence[Tensor], whole: Sequence[Tensor], about: About | None = None
    ) -> Work[None]:
        """Start copying ``owner``'s ``own`` into ``whole`` on all ranks, cast to ``whole``'s dtype. Communicates.

        All are on one device and of one dtype. Other ranks' ``own`` isn't looked at. The owner's may be ``whole``
        itself; else it is free again when this returns.
        """
        self._rows["gather"] += -(-sum(each.nbytes for each in whole) // self.size)
        backend = self.backend(whole[0].device)
        return self.progress.start(GATHER, about, backend.broadcast_from, owner, own, whole)

    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """Start filling ``buffer``, ``[size, row]``, in place, with every rank's own row of it. Communicates."""
        return self.gather([buffer[self.rank]], [buffer]).then(lambda _: buffer)

    def gather(
        self,
        own: Sequence[Tensor],
        rows: Sequence[Tensor],
        fp8: bool = False,
        alignment: Alignment = END_TO_END,
        about: About | None = None,
    ) -> Work[None]:
        """Start filling ``rows``, each ``[size, s]``, with all ranks' ``own``, each ``[s]``, cast alike. Communicates.

        ``rows`` are on one device and of one dtype. Where it takes a buffer to carry them they lie end to end in its
        row, whose width is aligned. All of ``own`` may be their very rows; else they are free again when this returns.
        """
        numel = sum(map(Tensor.numel, own))
        row = alignment.padded(numel) if len(own) > 1 else numel
        self._rows["gather"] += encoded_size(row) if fp8 else row * rows[0].element_size()
        backend = self.backend(rows[0].device, fp8)
        return self.progress.start(GATHER, about, backend.gather, own, rows, row)

    def traffic(self) -> dict[str, int]:
        """Return the bytes of buffers that this rank has sent so far, for "reduce" and "gather". Doesn't communicate.

        An all-reduce counts as the reduce-scatter and the gather that it is worth, whatever the backend does; so does
        a reduction to one rank, or a broadcast, as the mean over the ranks.
        """
        rows, others = self._rows, self.size - 1
        return {"reduce": others * (rows["sum"] + rows["spread"]), "gather": others * rows["gather"]}

    # ---- a few numbers ----

    def sum_scalar(self, value: Tensor) -> Work[Tensor]:
        """Start summing ``value``, 0-d or a few numbers, over the slices; no device is waited for. Communicates."""
        return self.progress.start(NORM, None, self.backend(value.device).sum, value)

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum of every rank's ``values``, by the backend of agreements. Communicates."""
        few = torch.tensor(values, dtype=torch.int64, device="cpu")
        most = self.progress.run(AGREEMENT, lambda: self._agreements().maximum(few, Kind.AGREEMENT).wait())
        agreed: list[int] = most.tolist()
        return agreed

    def start_all_reduce_max(self, values: Tensor) -> Work[Tensor]:
        """Start an element-wise maximum of a few bytes over the ranks, beside the buffers. Communicates.

        All ranks make these calls in the same order among their syncs, but not among calls of ``all_reduce_max``. Its
        ``ready`` tells when it is over.
        """
        return self.progress.start(MESSAGE, None, self.host_backend.maximum, values, Kind.PRESENCE_MAP)

    def from_rank_zero(self, values: Sequence[int]) -> list[int]:
        """Return rank 0's ``values``; every rank passes as many. Communicates."""
        is_heard = self.group_rank == 0 or not self.has_others
        return self.all_reduce_max(values if is_heard else [_LEAST] * len(values))

    def all_gather_object(self, mine: T) -> list[T]:
        """Return every rank's ``mine`` in rank order, pickled on the way. Communicates."""
        if not self.has_others:
            return [mine] * self.ranks
        return self.progress.run(AGREEMENT, lambda: self._agreements().all_gather_object(mine))

    # ---- waiting for ranks that may not come ----

    def comes(self, work: Work[Any], seconds: float) -> bool:
        """Wait at most ``seconds`` for ``work`` of the hosts, and return whether it is over.

        Messages make progress only while a thread waits: it goes on after this returns.
        """
        began = now = runtime().now()
        if self.host_backend.shares_memory:
            while not (over := work.ready()) and now < began + seconds:
                runtime().sleep(max(_SHORTEST_NAP, (now - began) / 8))
                now = runtime().now()
            return over
        if self._waiting is None:
            self._waiting = runtime().worker("lowlevel_zero waiting", self.context.threads)
        waited = self._waiting.submit(work.wait)
        work.wait, work.ready = waited.result, waited.done
        with suppress(Exception):  # whoever takes the result raises it
            waited.result(seconds)
        return waited.done()

    # ---- memory, and the end ----

    def held(self) -> list[Tensor]:
        """Return the host memory that is used or kept for buffers. Doesn't communicate."""
        backends = [level._host_backend for level in self.levels]
        return [tensor for backend in backends if backend is not None for tensor in backend.held()]

    def trim(self, for_good: bool = False) -> None:
        """Free idle memory of buffers; ``for_good``: all of it. Nothing may be under way on this rank."""
        for level in self.levels:
            if level._host_backend is not None:
                level._host_backend.trim(for_good)

    def leave(self, threads: Threads | None = None) -> None:
        """Note that this rank left, and free its buffers: now, or in a thread after collectives that are under way.

        Other ranks wait for reductions that are still under way here. The thread is one of ``threads``, or else of the
        process group's.
        """
        self.progress.left = True
        works, self.progress.under_way = self.progress.under_way, {}
        if not works:
            self.trim(for_good=True)
        elif not sys.is_finalizing():  # when it is, no thread can be started
            worker = runtime().worker("lowlevel_zero leaving", threads or self.context.threads)
            worker.submit(partial(_finish, list(works.values()), self))


def _finish(waits: list[Callable[[], Any]], group: ShardGroup) -> None:
    """Wait for each collective under way, ignoring their errors, and then free all memory of buffers."""
    while waits:
        with suppress(RuntimeError):
            waits.pop(0)()
    group.trim(for_good=True)
