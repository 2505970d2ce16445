"""ShardGroup: the ranks that share every parameter, and how they talk.

Which transport is fast is decided here and nowhere else. NCCL and its like run their native collectives; on gloo,
rows go straight to the rank that wants them, through shared memory where all ranks are processes of one host. gloo
carries a device's wires through the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..alignment import END_TO_END, Alignment
from .byte_messages import as_message, batches, read_message
from .compression import Fp8, encoded_size
from .exchange import ADDED, PRESENT, Exchange
from .groups import backends_by_device, is_fake, side_group
from .hosts import SWITCH, InCommon, exchange, in_common, largest
from .lost_ranks import LostRank, naming_lost
from .process_group import default_group, timeout_of
from .progress import AGREEMENT, BROADCAST, EXCHANGE, GATHER, MESSAGE, NORM, REDUCTION, About, Place, Progress
from .staging import Staged
from .transport import Alone, Direct, HostTransport, Native, Pending, SumsInFp32, Transport, then
from .watchdog import SHARE_OF_TIMEOUT, Watch, dismiss, next_number, watch

_LEAST = torch.iinfo(torch.int64).min

T = TypeVar("T")


class ShardGroup:
    """The process group over which parameters are sharded.

    Args:
        group: the process group; None: the default one.

    Attributes:
        rank: which slice of each parameter is this process's.
        size: slices that a parameter is cut into.
        place: this process's rank among all over which gradients are summed; the first's values are everybody's.
        ranks: how many these are: ``size``, or more where slices have replicas (see ``two_levels``).
        number: of this instance among those of the process group that have an order of their own, the same on all
            ranks; 0: it has none.
        progress: how far this rank has come with what it began here.

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
        self.rank = self.place = dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError(
                "dp_process_group: expected a group that this process belongs to, got one without it: "
                "construct the optimizer on member ranks only"
            )
        self.size = self.ranks = dist.get_world_size(self.group)
        self._global_ranks = dist.get_process_group_ranks(self.group)
        self._backends = backends_by_device(self.group)
        self._native: Direct = Alone(self.rank, 1) if self.size == 1 else Native(self.group)
        self._common: InCommon | None = None  # nobody else is there
        self._hosts: HostTransport = Alone(self.rank, 1)
        if self.size > 1 and not is_fake(self.group):
            self._common = in_common(self.group)
            self._hosts = Exchange(side_group(self.group))
        self._sent = {"reduce": 0, "gather": 0}
        self.number = 0
        self.progress = Progress()
        self._watch: Watch | None = None
        self._watch_number = next_number(self.group)
        self._lost: LostRank | None = None

    def watch(self, timeout: float) -> None:
        """From now on report what takes longer than so many seconds, or a share of the group's timeout; 0: nothing."""
        if self._watch is None and timeout > 0 and self.ranks > 1 and not is_fake(self.group):
            share = SHARE_OF_TIMEOUT * timeout_of(self.group)
            self._watch = watch(self.group, self._watch_number, self.progress, min(timeout, share))

    def own_wires(self, shared: bool = True, sums_in_fp32: bool = False) -> None:
        """Give what hosts send each other from here an order of its own; all ranks call it.

        On gloo a rank may then be ahead with one optimizer's wires when another's, or the caller's own collectives,
        are next. On NCCL the order of all optimizers' wires must be the same on every rank. If ``shared`` and all
        ranks are processes of one host, wires on gloo travel through shared memory, unless
        ``LOWLEVEL_ZERO_SHARED_MEMORY=0`` is set on one of them. ``sums_in_fp32``: reduce-scatters sum 16-bit wires in
        fp32 elsewhere too.
        """
        if sums_in_fp32 and self.size > 1:
            self._native = SumsInFp32(self.group)
        if self._common is None:
            return
        self.number = next(self._common.numbers)
        self._hosts = Exchange(side_group(self.group), self.number)
        if not self._on_gloo(torch.device("cpu")):
            return
        (refused,) = self.largest([not shared or os.environ.get(SWITCH) == "0"])
        if not refused:
            self._hosts = self._common.share_memory(self.group, self.number) or self._hosts

    def release(self) -> None:
        """The instance is gone, and all of its wires have been waited for."""
        self._hosts.rest(for_good=True)
        self._leave()

    def abandon(self, under_way: Sequence[Pending[Any]]) -> None:
        """The instance is gone, with wires that nobody has waited for: let them travel."""
        if self._common is not None:
            self._common.keep([pending.unclaimed() for pending in under_way])
        self._leave()

    def _leave(self) -> None:
        if self._watch is not None:
            dismiss(self._watch)

    def apart(self) -> dist.ProcessGroup:
        """A gloo group over the same ranks, for a checkpoint's collectives, be they a thread's beside training."""
        return side_group(self.group)

    # ---- what the group is, and can do ----

    @property
    def slices(self) -> dist.ProcessGroup | None:
        """The process group whose ranks hold slices 0, 1, 2, ...; None: no group has them in this order."""
        return self.group

    @property
    def slice_ranks(self) -> list[int]:
        """Global ranks of who holds slices 0, 1, 2, ..."""
        return self._global_ranks

    def serves(self, device: torch.device) -> bool:
        """Whether the group's backends can carry tensors of ``device``."""
        return device.type in self.device_types

    def way_of(self, device: torch.device) -> str | None:
        """How wires of ``device`` travel, in words; None: as its backend has it."""
        if self._common is None or not self._on_gloo(device):
            return None
        return self._common.way_of(self._hosts)

    @property
    def device_types(self) -> list[str]:
        """Types of the devices whose tensors the group can carry."""
        return sorted(self._backends)

    # ---- the data path: one wire, [size, row], at a time ----

    # With ``fp8``, on several ranks, rows travel as ``compression.py`` has it.

    def new_wire(self, row: int, dtype: torch.dtype, device: torch.device, fp8: bool = False) -> Tensor:
        """A wire for one reduction, to be filled; a reduction takes others too, but this one without a copy."""
        return self._transport(device, fp8).new_wire(row, dtype, device)

    def in_flight(self, device: torch.device, row_only: bool) -> int | None:
        """Reductions of ``device``'s tensors, to a row or all, that are worth having under way; None: any number."""
        transport = self._transport(device)
        return transport.in_flight if row_only or not transport.keeps_wires else None

    def reduce_scatter(self, wire: Tensor, fp8: bool = False, about: About | None = None) -> Pending[Tensor]:
        """Start summing ``wire`` over the ranks; the result is this rank's row of the sum, ``[row]``.

        ``wire`` (``[size, row]``, contiguous) must stay as it is until the result is there, and may be gone then.
        """
        self._note_sent("reduce", _row_bytes(wire.shape[1], wire.dtype, fp8))
        return self._begun(REDUCTION, about, wire, lambda: self._transport(wire.device, fp8).reduce_scatter(wire))

    def all_reduce(self, wire: Tensor, fp8: bool = False, about: About | None = None) -> Pending[Tensor]:
        """Start summing ``wire`` over the ranks; the result has its shape, and may be ``wire``."""
        self._note_sent("reduce", _row_bytes(wire.shape[1], wire.dtype, fp8), times=2)
        return self._begun(REDUCTION, about, wire, lambda: self._transport(wire.device, fp8).all_reduce(wire))

    def all_gather(self, wire: Tensor) -> Pending[Tensor]:
        """Start filling ``wire`` (``[size, row]``, contiguous): every rank gives its own row; in place."""
        self._note_sent("gather", wire[0].nbytes)
        return self._begun(GATHER, None, wire, lambda: self._transport(wire.device).all_gather(wire))

    def gather(
        self,
        own: Sequence[Tensor],
        rows: Sequence[Tensor],
        fp8: bool = False,
        alignment: Alignment = END_TO_END,
        about: About | None = None,
    ) -> Pending[None]:
        """Start filling ``rows``, each ``[size, s]``, with every rank's ``own``, each ``[s]`` and cast as ``rows``.

        ``rows`` are on one device and of one dtype. Where it takes a wire to carry them they lie end to end in its row,
        whose width is aligned. All of ``own`` may be their very rows; else they are free again when this returns.
        """
        numel = sum(each.numel() for each in own)
        row = alignment.padded(numel) if len(own) > 1 else numel
        self._note_sent("gather", _row_bytes(row, rows[0].dtype, fp8))
        transport = self._transport(rows[0].device, fp8)
        return self._begun(GATHER, about, rows[0], lambda: transport.gather(own, rows, row))

    def all_to_all(
        self, wire: Tensor, sizes: Sequence[int], into: Tensor, sizes_into: Sequence[int]
    ) -> Pending[Tensor]:
        """Start handing ``wire`` (1-D) out, ``sizes[r]`` elements of it to rank ``r``, in the order of ranks.

        The result is ``into`` (1-D), of which ``sizes_into[r]`` elements come from rank ``r``. Both must stay as they
        are until the result is there.
        """
        others = wire.numel() - sizes[self.rank]
        self._sent["step"] = self._sent.get("step", 0) + others * wire.element_size()
        transport = self._transport(wire.device)
        return self._begun(EXCHANGE, None, wire, lambda: transport.all_to_all(wire, sizes, into, sizes_into))

    def traffic(self) -> dict[str, int]:
        """Bytes of wires that this rank has handed to others so far, by purpose: "reduce", "gather", and Muon's "step".

        An all-reduce counts as the reduce-scatter and the gather that it is worth, whatever the backend does.
        """
        return dict(self._sent)

    def held(self) -> list[Tensor]:
        """Memory that wires take on the host, or that is kept for them."""
        return self._hosts.held()

    def rest(self) -> None:
        """Nothing is under way on this rank, for a while: give memory back that wires took."""
        self._hosts.rest()

    def sum_scalar(self, value: Tensor) -> Pending[Tensor]:
        """Start summing ``value`` (0-d, or a few numbers) over the ranks, in place.

        On CUDA (NCCL) without a host synchronisation.
        """
        if not self._on_gloo(value.device):
            return self._begun(NORM, None, value, lambda: self._native.all_reduce(value))
        summed = value if not _is_staged(value.device) else value.cpu()

        def add(told: list[Tensor]) -> Tensor:
            return value.copy_(torch.stack(told).sum(dim=0).view(value.shape))  # in rank order: the same bits

        return self._begun(NORM, None, summed, lambda: then(self._hosts.exchange_few(summed.view(-1), ADDED), add))

    def broadcast(self, tensors: Sequence[Tensor], by_way_of: torch.device) -> None:
        """Overwrite ``tensors`` with rank 0's values, whatever their dtypes, in a few large messages.

        Those on devices that the group doesn't serve travel by way of one that it does, this rank's own.
        """
        if self.ranks == 1:
            return
        for batch in batches(tensors):
            self._wait(BROADCAST, partial(self._broadcast_batch, batch, by_way_of))

    # ---- the control path: a few integers on the host, in an order of its own ----

    def largest(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum of every rank's ``values``, on the host.

        It travels beside the data path, so ranks may stand at different wires when they call it.
        """
        return list(values) if self._common is None else self._agreed(partial(largest, values=values), self._common)

    def maximum(self, values: Tensor) -> Pending[Tensor]:
        """Start the element-wise maximum over the ranks of a few bytes on the host, in place.

        It travels beside the wires: all ranks make these calls in the same order among their rounds, but not among
        calls of ``largest``. Its ``done`` tells when it is.
        """

        def most(told: list[Tensor]) -> Tensor:
            return values.copy_(torch.stack(told).amax(dim=0))

        def start() -> Pending[Tensor]:
            return then(self._hosts.noticed(self._hosts.exchange_few(values, PRESENT)), most)

        return self._begun(MESSAGE, None, values, start)

    def alike(self, values: Sequence[int]) -> bool:
        """Whether every rank has the same ``values``."""
        bounds = self.largest([*values, *(-value for value in values)])
        return bounds[: len(values)] == [-bound for bound in bounds[len(values) :]]

    def from_rank_zero(self, values: Sequence[int]) -> list[int]:
        """Rank 0's ``values``, on the host; every rank gives as many."""
        is_heard = self.place == 0 or self._common is None
        return self.largest(values if is_heard else [_LEAST] * len(values))

    def exchange(self, mine: object) -> list[Any]:
        """Every rank's ``mine`` in rank order, pickled: for the rare case in which something differs."""
        if self._common is None:
            return [mine] * self.ranks
        return self._agreed(partial(exchange, mine=mine), self._common)

    # ---- how ----

    def _begun(self, kind: str, about: About | None, tensor: Tensor, start: Callable[[], Pending[T]]) -> Pending[T]:
        """Start what carries tensors of ``tensor``'s device, such that one sees who waits for it, and who is lost."""
        place = self.progress.begin(kind, about)
        by_device = not (tensor.device.type == "cpu" or self._on_gloo(tensor.device))
        with self._all_needed(place):
            return start().within(partial(self._wait_for, place, by_device))

    def _agreed(self, agree: Callable[[HostTransport], T], common: InCommon) -> T:
        """What ranks agree on, in one order for all optimizers of the process group."""
        return self._wait(AGREEMENT, lambda: agree(common.agreements))

    def _wait(self, kind: str, act: Callable[[], T]) -> T:
        """Do what returns when all ranks have come to it."""
        return self._wait_for(self.progress.begin(kind), False, act)

    def _wait_for(self, place: Place, by_device: bool, act: Callable[[], T]) -> T:
        with self._all_needed(place):
            return self.progress.wait(place, act, by_device)

    @contextmanager
    def _all_needed(self, place: Place) -> Iterator[None]:
        """A part of a collective. Once a rank is lost there is none any more: others may wait for this one's end."""
        if self._lost is not None:
            raise LostRank(str(self._lost))
        try:
            with naming_lost(self.group, place):
                yield
        except LostRank as lost:
            self._lost = lost
            raise

    def _transport(self, device: torch.device, fp8: bool = False) -> Transport:
        direct = self._hosts if self._on_gloo(device) else self._native
        way = Fp8(direct) if fp8 and self.size > 1 else direct
        return Staged(way) if self._on_gloo(device) and _is_staged(device) else way

    def _on_gloo(self, device: torch.device) -> bool:
        return self.ranks > 1 and self._backends.get(device.type) == "gloo"

    def _note_sent(self, purpose: str, row: int, times: int = 1) -> None:
        """Account for a wire with rows of so many bytes, of which others get all but one."""
        self._sent[purpose] += times * (self.size - 1) * row

    def _broadcast_batch(self, batch: list[Tensor], by_way_of: torch.device) -> None:
        """Send the tensors of one device as one message of bytes."""
        message = as_message(batch)
        if self._on_gloo(message.device):
            message = message.cpu()
        elif not self.serves(message.device):
            message = message.to(by_way_of)
        dist.broadcast(message, src=self._global_ranks[0], group=self.group)
        read_message(message, batch)


def _row_bytes(row: int, dtype: torch.dtype, fp8: bool) -> int:
    return encoded_size(row) if fp8 else row * dtype.itemsize


def _is_staged(device: torch.device) -> bool:
    """Whether gloo can't take tensors of ``device`` as they are."""
    return device.type != "cpu"
