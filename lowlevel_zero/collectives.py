"""ShardGroup: the ranks that share every parameter, and the only file that calls torch's collectives.

Two questions are answered here and nowhere else: which of torch's names a collective goes by, and which way
of doing it is fast on the backend at hand. NCCL and its like run their native collectives. gloo's native
reduce-scatter and all-gather are several times slower than sending each row straight to the rank that wants it
and summing there, which also sums 16-bit gradients in fp32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames the two and warns on the old names.
_RENAMED = hasattr(dist, "reduce_scatter_single")
_reduce_scatter_single = getattr(dist, "reduce_scatter_single" if _RENAMED else "reduce_scatter_tensor")
_all_gather_single = getattr(dist, "all_gather_single" if _RENAMED else "all_gather_into_tensor")

# Tags of messages between two ranks.
_REDUCE, _GATHER = 7001, 7002

_BROADCAST_BYTES = 64 * 2**20


class Pending:
    """A collective that is under way: its work handles, its tensors, and how they become the result.

    Attributes:
        tensors: what the collective reads and writes; kept alive here until the result is taken.
    """

    __slots__ = ("_finish", "_works", "tensors")

    def __init__(self, works: Sequence[dist.Work], tensors: tuple[Tensor, ...], finish: Callable[[], Tensor]) -> None:
        self._works = works
        self._finish = finish
        self.tensors = tensors

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Tensor:
        """The result. On CUDA the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        return self._finish()


class ShardGroup:
    """The process group over which parameters are sharded.

    Args:
        group: the process group; None: the default one.

    Attributes:
        rank: this process's rank in the group.
        size: ranks in the group.

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
        self.group: dist.ProcessGroup = group if group is not None else dist.distributed_c10d._get_default_group()
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError(
                "dp_process_group: expected a group that this process belongs to, got one without it: "
                "construct the optimizer on member ranks only"
            )
        self.size = dist.get_world_size(self.group)
        self._global_ranks = dist.get_process_group_ranks(self.group)
        self._backends = _backends_by_device(self.group)
        self._control = _control_group(self.group)
        self._wires = self.group

    def own_wires(self) -> None:
        """On gloo, give wires a group of their own, and so an order of their own; all ranks call it.

        A rank may then be ahead with one optimizer's wires when another's, or the caller's own collectives, are
        next. NCCL's communicators are too large for that: there the order of all collectives must be the same on
        every rank.
        """
        if self._backends.get("cpu") != "gloo" or self.size == 1:
            return
        lent = _lent.setdefault(self.group, {})
        taken = self.largest(list(lent.values())) if lent else []
        free = [group for group, busy in zip(lent, taken, strict=True) if not busy]
        chosen = free[0] if free else _gloo_like(self.group)
        lent[chosen] = True
        self._wires = chosen

    def release(self) -> None:
        """Let another instance have this one's wires, all of which have been waited for."""
        lent = _lent.get(self.group, {})
        if self._wires in lent:
            lent[self._wires] = False

    # ---- what the group can do ----

    def serves(self, device: torch.device) -> bool:
        """Whether the group's backends can carry tensors of ``device``."""
        return device.type in self.device_types

    @property
    def device_types(self) -> list[str]:
        """Types of the devices whose tensors the group can carry (gloo: the host's alone)."""
        return sorted(kind for kind, backend in self._backends.items() if backend != "gloo" or kind == "cpu")

    # ---- the data path: one wire, [size, row], at a time ----

    def reduce_scatter(self, wire: Tensor) -> Pending:
        """Start summing ``wire`` over the ranks; the result is this rank's row of the sum, ``[row]``.

        ``wire`` (``[size, row]``, contiguous) must stay as it is until the result is there.
        """
        if self.size == 1:
            return Pending((), (wire,), lambda: wire[0])
        if self._is_gloo(wire):
            return self._reduce_scatter_by_exchange(wire)
        row = wire.new_empty(wire.shape[1])
        work = _reduce_scatter_single(row, wire.view(-1), group=self.group, async_op=True)
        return Pending((work,), (wire, row), lambda: row)

    def all_reduce(self, wire: Tensor) -> Pending:
        """Start summing ``wire`` over the ranks, in place; the result is ``wire``."""
        if self.size == 1:
            return Pending((), (wire,), lambda: wire)
        group = self._wires if self._is_gloo(wire) else self.group
        work = dist.all_reduce(wire, group=group, async_op=True)
        return Pending((cast(dist.Work, work),), (wire,), lambda: wire)

    def all_gather(self, wire: Tensor) -> Pending:
        """Start filling ``wire`` (``[size, row]``, contiguous): every rank gives its own row; in place."""
        if self.size == 1:
            return Pending((), (wire,), lambda: wire)
        if self._is_gloo(wire):
            return self._gather_by_exchange(wire)
        work = _all_gather_single(wire.view(-1), wire[self.rank], group=self.group, async_op=True)
        return Pending((work,), (wire,), lambda: wire)

    def sum_scalar(self, value: Tensor) -> Tensor:
        """``value`` (0-d) summed over the ranks, in place; on CUDA without a host synchronisation."""
        return self.all_reduce(value).wait()

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite ``tensors`` with rank 0's values, whatever their dtypes and devices, in a few large messages."""
        if self.size == 1:
            return
        pieces = deque(tensor for tensor in tensors if tensor.numel() > 0)
        while pieces:
            self._broadcast_batch(_take_batch(pieces))

    # ---- the control path: a few integers on the host, in an order of its own ----

    def largest(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum of every rank's ``values``, on the host.

        It travels beside the data path, so ranks may stand at different wires when they call it.
        """
        if self.size == 1:
            return list(values)
        agreed = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._control)
        return cast("list[int]", agreed.tolist())

    def alike(self, values: Sequence[int]) -> bool:
        """Whether every rank has the same ``values``."""
        bounds = self.largest([*values, *(-value for value in values)])
        return bounds[: len(values)] == [-bound for bound in bounds[len(values) :]]

    def from_rank_zero(self, values: Sequence[int]) -> list[int]:
        """Rank 0's ``values``, on the host; every rank gives as many."""
        if self.size == 1:
            return list(values)
        told = torch.tensor(values, dtype=torch.int64)
        dist.broadcast(told, src=self._global_ranks[0], group=self._control)
        return cast("list[int]", told.tolist())

    def exchange(self, mine: object) -> list[Any]:
        """Every rank's ``mine`` in rank order, pickled: for the rare case in which something differs."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self._control)
        return everyone

    # ---- how gloo does it ----

    def _is_gloo(self, wire: Tensor) -> bool:
        return self._backends.get(wire.device.type) == "gloo"

    def _reduce_scatter_by_exchange(self, wire: Tensor) -> Pending:
        """Each rank gets everybody's version of its own row, and sums them."""
        others = torch.empty_like(wire[1:])
        sent = [(wire[to], others[at]) for at, (to, _) in enumerate(self._peers)]
        works = self._exchange(sent, tag=_REDUCE)
        return Pending(works, (wire, others), lambda: _sum_rows(wire[self.rank], others))

    def _gather_by_exchange(self, wire: Tensor) -> Pending:
        """Each rank sends its own row to all others."""
        sent = [(wire[self.rank], wire[of]) for _, of in self._peers]
        return Pending(self._exchange(sent, tag=_GATHER), (wire,), lambda: wire)

    @property
    def _peers(self) -> list[tuple[int, int]]:
        """Whom to send to and whom to receive from, turn by turn. gloo runs on few ranks: a loop is right."""
        return [((self.rank + turn) % self.size, (self.rank - turn) % self.size) for turn in range(1, self.size)]

    def _exchange(self, rows: Sequence[tuple[Tensor, Tensor]], tag: int) -> list[dist.Work]:
        """Send and receive a row a turn; the tag tells reductions from gathers."""
        works: list[dist.Work | None] = []
        for (to, of), (mine, theirs) in zip(self._peers, rows, strict=True):
            works.append(dist.irecv(theirs, src=self._global_ranks[of], group=self._wires, tag=tag))
            works.append(dist.isend(mine, dst=self._global_ranks[to], group=self._wires, tag=tag))
        return [work for work in works if work is not None]

    def _broadcast_batch(self, batch: list[Tensor]) -> None:
        """Send the tensors of one device as one message of bytes."""
        message = torch.cat([_as_bytes(tensor) for tensor in batch])
        if not self.serves(message.device):
            message = message.to(self.device_types[0])
        dist.broadcast(message, src=self._global_ranks[0], group=self.group)
        parts = message.split_with_sizes([tensor.numel() * tensor.element_size() for tensor in batch])
        for tensor, part in zip(batch, parts, strict=True):
            # A part may start at an odd byte, which a wider dtype can't view: hence the clone.
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _sum_rows(own: Tensor, others: Tensor) -> Tensor:
    """``own`` plus all rows of ``others``, 16-bit ones in fp32; ``others`` may be overwritten.

    Two 16-bit numbers are added right as they are: their sum is rounded once either way.
    """
    if len(others) == 1:
        return others[0].add_(own)
    total = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
    for row in others:
        total += row
    return total.to(own.dtype)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _take_batch(pieces: deque[Tensor]) -> list[Tensor]:
    """The next tensors of one device that fit one message (always at least one)."""
    batch = [pieces.popleft()]
    held = batch[0].numel() * batch[0].element_size()
    while pieces and pieces[0].device == batch[0].device:
        held += pieces[0].numel() * pieces[0].element_size()
        if held > _BROADCAST_BYTES:
            break
        batch.append(pieces.popleft())
    return batch


def _backends_by_device(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type, as in ``{"cpu": "gloo", "cuda": "nccl"}``."""
    config = dist.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


_control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()

# By group: the groups made for wires, in the order of making, which is the same on all ranks, and which are in use.
_lent: WeakKeyDictionary[dist.ProcessGroup, dict[dist.ProcessGroup, bool]] = WeakKeyDictionary()


def _control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second group over the same ranks, for what the hosts tell each other; made once per group.

    Ranks that disagree on how many wires there are can still agree on it here, since neither waits for the
    other's wires. It is gloo wherever the data travels, so that it never synchronises a device.
    """
    if dist.get_world_size(group) == 1 or "fake" in _backends_by_device(group).values():
        return group
    if group not in _control_groups:
        _control_groups[group] = _gloo_like(group)
    return _control_groups[group]


def _gloo_like(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new gloo group of the same ranks; made by all of them, and by nobody else."""
    ranks = dist.get_process_group_ranks(group)
    return cast(dist.ProcessGroup, dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
