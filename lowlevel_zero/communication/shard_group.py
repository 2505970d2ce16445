"""ShardGroup: the ranks that share every parameter, and what they do together.

A ``Communicator`` (of one process group, or of a grid of ranks: ``hierarchical.py``) brings buffers from rank to rank;
here each collective is accounted for, and begun such that one sees who waits for it and who is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..partition import END_TO_END, Alignment
from .backends.backend import AGREED, MAXIMUM, PRESENT
from .communicator import Communicator
from .fp8 import encoded_size
from .process_groups import side_group as side_group_of
from .progress import AGREEMENT, BROADCAST, EXCHANGE, GATHER, MESSAGE, NORM, REDUCTION, About, Progress
from .work import Work

_LEAST = torch.iinfo(torch.int64).min


class ShardGroup:
    """The ranks over which parameters are sharded.

    Args:
        ranks: a process group, or what its ranks talk by; None: the default process group.

    Attributes:
        group: the process group of all ranks.
        rank: which slice of each parameter is this process's.
        size: slices that a parameter is cut into.
        group_rank: this process's rank among all over which gradients are summed; the first's values are everybody's.
        ranks: how many these are: ``size``, or more where slices have replicas (see ``hierarchical``).
        slice_ranks: global ranks of who holds slices 0, 1, 2, ...
        instance: of the shard groups that were made of the process group, which it is; the same on all ranks.
        device_types: types of the devices whose tensors the group can carry.
        progress: how far this rank has come with what it began here; diagnostics put their own.

    Raises:
        RuntimeError: no process group is initialised.
        ValueError: this process doesn't belong to the group.
    """

    def __init__(self, ranks: dist.ProcessGroup | Communicator | None = None) -> None:
        self.communicator = ranks if isinstance(ranks, Communicator) else Communicator(ranks)
        self.group = self.communicator.group
        self.rank, self.size = self.communicator.rank, self.communicator.size
        self.group_rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device_types = self.communicator.device_types
        self.slice_ranks = self.communicator.slice_ranks
        self.instance = next(self.communicator.context.shard_groups)
        self.progress = Progress(self.group)
        self._context = self.communicator.context
        self._rows = {"reduce": 0, "gather": 0}  # bytes of those of buffers, by purpose
        self._parts: dict[str, int] = {}  # bytes of those of no rows, by purpose

    @property
    def number(self) -> int:
        """Of this instance among those of the process group that have an order of their own; 0: it has none."""
        return self.communicator.number

    def release(self) -> None:
        """The instance is gone, and all of its buffers have been waited for."""
        self.progress.left = True
        self.communicator.trim(for_good=True)

    def abandon(self, under_way: Sequence[Work[Any]]) -> None:
        """The instance is gone, with buffers that nobody has waited for: let them travel."""
        self.progress.left = True
        self.communicator.keep([Work(work.done, work.done, work.tensors) for work in under_way])

    def side_group(self) -> dist.ProcessGroup:
        """A gloo group over the same ranks, for a checkpoint's collectives, be they a thread's beside training."""
        return side_group_of(self.group)

    # ---- the data path: one flat buffer, [size, row], at a time; with ``fp8``, rows travel as ``fp8.py`` has it ----

    def new_buffer(self, row: int, dtype: torch.dtype, device: torch.device, fp8: bool = False) -> Tensor:
        """A buffer for one reduction, to be filled; a reduction takes others too, but this one without a copy."""
        return self.communicator.backend(device, fp8).new_buffer(row, dtype, device)

    def in_flight(self, device: torch.device, row_only: bool) -> int | None:
        """Reductions of ``device``'s tensors, to a row or all, that are worth having under way; None: any number."""
        backend = self.communicator.backend(device)
        return backend.in_flight if row_only or backend.limits_all_reduce else None

    def reduce_scatter(self, buffer: Tensor, fp8: bool = False, about: About | None = None) -> Work[Tensor]:
        """Start summing ``buffer`` over the ranks; the result is this rank's row of the sum, ``[row]``.

        ``buffer`` (``[size, row]``, contiguous) must stay as it is until the result is there, and may be gone then.
        """
        row = buffer.shape[1]
        self._rows["reduce"] += encoded_size(row) if fp8 else row * buffer.element_size()
        backend = self.communicator.backend(buffer.device, fp8)
        return self.progress.start(REDUCTION, about, (buffer,), backend.reduce_scatter, buffer)

    def all_reduce(self, buffer: Tensor, fp8: bool = False, about: About | None = None) -> Work[Tensor]:
        """Start summing ``buffer`` over the ranks; the result has its shape, and may be ``buffer``."""
        row = buffer.shape[1]
        self._rows["reduce"] += 2 * (encoded_size(row) if fp8 else row * buffer.element_size())
        backend = self.communicator.backend(buffer.device, fp8)
        return self.progress.start(REDUCTION, about, (buffer,), backend.all_reduce, buffer)

    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """Start filling ``buffer`` (``[size, row]``, contiguous): every rank gives its own row; in place."""
        return self.gather([buffer[self.rank]], [buffer]).then(lambda _: buffer)

    def gather(
        self,
        own: Sequence[Tensor],
        rows: Sequence[Tensor],
        fp8: bool = False,
        alignment: Alignment = END_TO_END,
        about: About | None = None,
    ) -> Work[None]:
        """Start filling ``rows``, each ``[size, s]``, with every rank's ``own``, each ``[s]`` and cast as ``rows``.

        ``rows`` are on one device and of one dtype. Where it takes a buffer to carry them they lie end to end in its
        row, whose width is aligned. All of ``own`` may be their very rows; else they are free again when this returns.
        """
        numel = sum(map(Tensor.numel, own))
        row = alignment.padded(numel) if len(own) > 1 else numel
        self._rows["gather"] += encoded_size(row) if fp8 else row * rows[0].element_size()
        backend = self.communicator.backend(rows[0].device, fp8)
        return self.progress.start(GATHER, about, rows, backend.gather, own, rows, row)

    def all_to_all(self, buffer: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]) -> Work[Tensor]:
        """Start handing ``buffer`` (1-D) out, ``sizes[r]`` elements of it to rank ``r``, in the order of ranks.

        The result is ``into`` (1-D), of which ``sizes_into[r]`` elements come from rank ``r``. Both must stay as they
        are until the result is there.
        """
        sent = (buffer.numel() - sizes[self.rank]) * buffer.element_size()
        self._parts["step"] = self._parts.get("step", 0) + sent
        backend = self.communicator.backend(buffer.device)
        return self.progress.start(EXCHANGE, None, (buffer,), backend.all_to_all, buffer, sizes, into, sizes_into)

    def traffic(self) -> dict[str, int]:
        """Bytes of buffers that this rank has handed to others so far, by purpose: "reduce", "gather", Muon's "step".

        An all-reduce counts as the reduce-scatter and the gather that it is worth, whatever the backend does.
        """
        return self.communicator.traffic(self._rows) | self._parts

    # ---- a few numbers ----

    def sum_scalar(self, value: Tensor) -> Work[Tensor]:
        """Start summing ``value`` (0-d, or a few numbers) over the slices; the result may be ``value``.

        On CUDA (NCCL) without a host synchronisation.
        """
        return self.progress.start(NORM, None, (value,), self.communicator.backend(value.device).sum, value)

    def broadcast(self, tensors: Sequence[Tensor], by_way_of: torch.device) -> None:
        """Overwrite ``tensors`` with rank 0's values, whatever their dtypes, in a few large messages.

        Those on devices that the group doesn't serve travel by way of one that it does, this rank's own.
        """
        spread = partial(self.communicator.broadcast, tensors, by_way_of)
        self.progress.start(BROADCAST, None, tensors, Work, spread).wait()

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum of every rank's ``values``, on the host.

        It travels beside the data path, so ranks may stand at different buffers when they call it.
        """
        few, exchange = torch.tensor(values, dtype=torch.int64, device="cpu"), self._context.agreements.exchange
        agreed: list[int] = self.progress.start(AGREEMENT, None, (few,), exchange, few, AGREED, MAXIMUM).wait().tolist()
        return agreed

    def start_all_reduce_max(self, values: Tensor) -> Work[Tensor]:
        """Start the element-wise maximum over the ranks of a few bytes on the host.

        It travels beside the buffers: all ranks make these calls in the same order among their syncs, but not among
        calls of ``all_reduce_max``. Its ``done`` tells when it is.
        """
        return self.progress.start(MESSAGE, None, (values,), self.communicator.hosts.exchange, values, PRESENT, MAXIMUM)

    def alike(self, values: Sequence[int]) -> bool:
        """Whether every rank has the same ``values``."""
        bounds = self.all_reduce_max([*values, *(-value for value in values)])
        return bounds[: len(values)] == [-bound for bound in bounds[len(values) :]]

    def from_rank_zero(self, values: Sequence[int]) -> list[int]:
        """Rank 0's ``values``, on the host; every rank gives as many."""
        is_heard = self.group_rank == 0 or not self.communicator.has_others
        return self.all_reduce_max(values if is_heard else [_LEAST] * len(values))

    def all_gather_object(self, mine: object) -> list[Any]:
        """Every rank's ``mine`` in rank order, pickled: for the rare case in which something differs."""
        if not self.communicator.has_others:
            return [mine] * self.ranks
        gather: Work[list[Any]] = self.progress.start(
            AGREEMENT, None, (), Work, partial(self._context.agreements.all_gather_object, mine)
        )
        return gather.wait()
