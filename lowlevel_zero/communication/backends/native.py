"""The native backend runs the process group's own collectives, such as NCCL's."""

from __future__ import annotations

import os
from typing import cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat_buffers import sum_rows_in_fp32
from ..work import OnStream, Work
from .backend import BufferBackend, referent

# torch 2.13 renames the two and warns on the old names.
_RENAMED = hasattr(dist, "reduce_scatter_single")
_reduce_scatter_single = getattr(dist, "reduce_scatter_single" if _RENAMED else "reduce_scatter_tensor")
_all_gather_single = getattr(dist, "all_gather_single" if _RENAMED else "all_gather_into_tensor")

# With one of these set, the host waits for NCCL's works, and not a stream.
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


class Native(BufferBackend):
    """A backend that runs the collectives of the process group's own backend, such as NCCL's.

    Args:
        sums_in_fp32: of 16-bit buffers each rank sums its row in fp32, from what the others hand it: as many bytes
            travel, and no sum is rounded more than once. (Megatron's way.)
    """

    def __init__(self, group: dist.ProcessGroup, sums_in_fp32: bool = False) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.chain = OnStream()
        self._ref = ref(group)
        self._sums_in_fp32 = sums_in_fp32
        self._host_waits = any(os.environ.get(name, "") not in ("", "0") for name in _BLOCKING_WAIT)

    @property
    def _group(self) -> dist.ProcessGroup:
        """Return the process group, or raise ``RuntimeError`` if it has been destroyed."""
        return referent(self._ref)

    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """Start a reduce-scatter into a new row; an all-to-all if it sums 16-bit rows in fp32. Communicates."""
        if self._sums_in_fp32 and buffer.element_size() <= 2:
            return self.exchange_rows(buffer).then(lambda theirs: sum_rows_in_fp32(theirs, theirs.dtype))
        row = buffer.new_empty(buffer.shape[1])
        work = _reduce_scatter_single(row, buffer.view(-1), group=self._group, async_op=True)
        return self._work(work, row, buffer)

    def all_reduce(self, buffer: Tensor) -> Work[Tensor]:
        """Start an all-reduce of ``buffer`` in place. Communicates."""
        return self._work(dist.all_reduce(buffer, group=self._group, async_op=True), buffer)

    def reduce(self, buffer: Tensor, owner: int) -> Work[Tensor]:
        """Start a reduce to ``owner``, in place, or 16-bit in an fp32 copy if ``sums_in_fp32``. Communicates."""
        wide = self._sums_in_fp32 and buffer.element_size() <= 2
        given, dtype = buffer.float() if wide else buffer, buffer.dtype
        own = given.view(-1) if self.rank == owner else given.new_empty(0)  # not a view, which would keep the buffer
        work = dist.reduce(given, dist.get_global_rank(self._group, owner), group=self._group, async_op=True)
        return self._work(work, own, given).then(lambda total: total.to(dtype))

    def broadcast(self, buffer: Tensor, owner: int) -> Work[Tensor]:
        """Start a broadcast of ``buffer`` from ``owner``, in place. Communicates."""
        first = dist.get_global_rank(self._group, owner)
        return self._work(dist.broadcast(buffer, first, group=self._group, async_op=True), buffer)

    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """Start an all-gather into ``buffer``, in place. Communicates."""
        work = _all_gather_single(buffer.view(-1), buffer[self.rank], group=self._group, async_op=True)
        return self._work(work, buffer)

    def exchange_rows(self, buffer: Tensor) -> Work[Tensor]:
        """Start an all-to-all of rows into a new buffer, as bytes: gloo doesn't take all dtypes. Communicates."""
        theirs = torch.empty_like(buffer)
        raw = theirs.view(-1).view(torch.uint8), buffer.view(-1).view(torch.uint8)
        return self._work(dist.all_to_all_single(*raw, group=self._group, async_op=True), theirs, buffer)

    def _work(self, work: object, result: Tensor, *others: Tensor) -> Work[Tensor]:
        """Return a work that waits for torch's and gives ``result``; ``ready`` asks torch's only if the host waits."""
        handle = cast(dist.Work, work)

        def finish() -> Tensor:
            handle.wait()
            return result

        begun = Work(finish, tensors=(result, *others))
        if self._host_waits or result.is_cpu:
            begun.ready = handle.is_completed
        return begun
