"""One record a parameter, and the p <-> p32 <-> g mapping that says which of them worked in a step.

Every tensor of the package is defined here once:

========  =========================================================  ==================  =====================
name      is                                                         shape               dtype
========  =========================================================  ==================  =====================
p         working parameter: what the model computes with            the model's         the model's
padded    the storage behind p; row r belongs to rank r              [world_size * s]    p's
p32       master slice: the optimizer's copy of this rank's row      [s], or see below   fp32 (or p's)
g         this rank's slice of the gradient, summed over the ranks:  [s]                 the buffer's, or fp32
          its part of its bucket's shard
========  =========================================================  ==================  =====================

A parameter that one rank owns whole has one row, ``p32`` of ``p``'s shape on its owner, and nothing on other ranks. Of
a stack of matrices, ``[E, m, n]``, that is cut between them ``p32`` is ``[E / world_size, m, n]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from ..communication.fp8 import is_rounded
from ..partition import Split
from .awaited import wait_for
from .storages import flat_in_memory_order, move_onto, move_to_padded


class Position(NamedTuple):
    """The place of a parameter in its shard group, in the param groups and in the model."""

    number: int  # among those of its shard group, in order of registration
    group: int  # index of its param group
    name: str  # the model's own, without wrappers, for messages
    shard_group: int = 0  # index of the one whose ranks share it


class Known(NamedTuple):
    """A possible value of ``p32``, ``[s]``, from which ``p`` may have been rounded, perhaps to fp8."""

    value: Tensor
    fp8: bool


class Handle(Tensor):
    """The base class of ``ShardedGradient``, the object that is ``p.grad`` while there is a ``g``."""

    to_local: Callable[[], Tensor]  # returns a copy of this rank's slice, ``[s]``; all ranks call it
    retire: Callable[[], Handle]  # makes every further use raise, and returns a new object for the next gradient


class ShardedParameter:
    """The record of one parameter: its tensors (see the table above) and its place in the optimizer."""

    # Every step looks at each record: so it lies in two or three lines of cache, where a dict would take several more.
    __slots__ = (
        *("p", "p32", "handle", "slice_handle", "shown", "pending", "worked", "arrived", "is_contiguous"),
        *("index", "is_empty", "short", "stepped", "version", "address", "row", "rows", "group", "fp8", "split"),
        *("shares_storage", "kind", "view", "padded", "rank", "communication_dtype", "name", "shard_group"),
        *("waiting", "saved_master", "slice_version", "is_flat", "__weakref__"),
    )

    def __init__(
        self,
        position: Position,
        p: nn.Parameter,
        split: Split,
        rank: int,
        communication_dtype: torch.dtype | None = None,
        fp8: bool = False,
    ) -> None:
        self.index, self.group, self.name, self.shard_group = position
        self.p = p
        self.is_contiguous = p.is_contiguous()  # its elements lie in their own order
        self.is_empty = p.numel() == 0  # nothing of it travels
        self.split = split  # how its elements are shared
        self.is_flat = split.is_flat  # ``p32`` is 1-D
        self.short = split.short  # elements that a bucket buffer wants of its gradient behind those that there are
        self.rank = rank  # whose row is ours
        self.communication_dtype = communication_dtype or p.dtype  # of its bucket's buffer; with ``fp8``, of its sum
        self.fp8 = fp8  # what travels of it does so in fp8, so ``p`` is ``p32`` rounded to that
        self.padded = move_to_padded(p, split)
        self.kind = self.padded.device, self.padded.dtype, self.communication_dtype, fp8, split.owner  # one a bucket
        self.view = torch.as_strided(self.padded, p.shape, p.stride())  # ``padded`` as ``p`` shows it
        self.address = p.data_ptr()  # where ``padded`` begins in memory, and ``p`` has to
        self.rows = self.padded.view(split.rows, split.padded_numel // split.rows)  # [world_size, s], or [1, numel]
        self.row = split.own_row(self.rows, rank)  # this rank's part of it
        self.p32: Tensor = split.shaped(self.row, p)
        self.shares_storage = True  # ``p32`` is over the row itself, not a copy of it
        self.note_version()
        self.note_slice()
        self.saved_master: Known | None = None  # loaded for ``p32``: the next step takes what rounds to ``p``
        self.worked = False  # there is a ``g``: since gradients were cleared, a rank is known to have had one for it
        self.arrived = False  # a backward has left a gradient in ``p.grad`` that hasn't been reduced
        self.waiting: ReferenceType[Tensor] | None = None  # the ``p.grad`` that was left to wait for a later sync
        self.stepped = False  # ``p32`` has been stepped, or loaded, so it may hold more than what rounds to ``p``
        self.handle: Handle | None = None  # is ``p.grad`` while there is a ``g``, or its bucket is being reduced
        self.slice_handle: Handle | None = None  # the handle for ``p32.grad``
        self.shown: Tensor | None = None  # the ``handle``, where ``p.grad`` has been made that; else None
        self.pending: Tensor | None = None  # the unreduced gradient that a backward has added to it since, or None

    @property
    def common_name(self) -> str:
        """Return a name that is the same on all ranks: for an expert, its index and shard group instead of its name."""
        return f"expert parameter {self.index} of group {self.shard_group}" if self.shard_group else self.name

    @property
    def owns_some(self) -> bool:
        """Return whether no other rank owns the parameter whole; this rank's row may be padding alone."""
        return self.split.owner in (None, self.rank)

    @property
    def keeps_more(self) -> bool:
        """Return whether ``p32`` may be more precise than ``p``: its dtype differs, or ``p`` travels in fp8."""
        return self.fp8 or self.p32.dtype != self.p.dtype

    def make_master(self, dtype: torch.dtype, on_host: bool = False) -> None:
        """Make ``p32`` a copy of the row in ``dtype``, or the row itself where dtype, device and fp8 allow it.

        It is an ``nn.Parameter`` that requires grad, as what optimizers step is: some skip any other tensor. It has
        ``p``'s own attributes, now and later: some optimizers read a factor of the learning rate there. ``on_host``: a
        copy on the host, whatever its dtype.
        """
        device = torch.device("cpu") if on_host else self.row.device
        own = self.row_for_master(device, dtype, copy=on_host or self.fp8)
        self.shares_storage = own is self.row
        # ``data`` has a count of writes of its own: a gather into the row isn't one of ``p32``'s.
        self.p32 = nn.Parameter(self.split.shaped(own.data, self.p))
        self.p32.__dict__ = self.p.__dict__
        self.note_version()
        self.note_slice()

    @property
    def master_row(self) -> Tensor:
        """Return the elements of ``p32`` in the order of ``row``, ``[s]``."""
        return self.flat_slice(self.p32)

    def row_for_master(self, device: torch.device, dtype: torch.dtype, copy: bool = False) -> Tensor:
        """Return the row on ``device`` in ``dtype``: the row itself if it is so already, unless ``copy``."""
        return self.row.to(device, dtype, copy=copy)

    def refresh_master(self) -> None:
        """Overwrite ``p32`` with ``p``'s values, or with a saved master that rounds to them."""
        self.take_back()
        self.share_again()
        if not self.shares_storage:
            self._settle(keeps_own=False)

    def restore_master(self, master: Tensor, fp8: bool) -> None:
        """Overwrite ``p32``, unless it is the row, with a saved master where that rounds to ``p``, now or in a step.

        So its low bits come back whether the model is loaded before or after, and one that isn't the model's any
        more (trained on elsewhere, by an optimizer that carried it along) does no harm. ``fp8``: the run that saved it
        sent parameters in fp8.
        """
        if not self.shares_storage:
            self.saved_master = Known(master.to(self.p32), fp8 or self.fp8)
            self._settle()
            self.stepped = True

    def _settle(self, keeps_own: bool = True) -> None:
        """Set ``p32`` to ``_settled``, and note that the optimizer has written it."""
        with torch.no_grad():
            self.master_row.copy_(self._settled(keeps_own))
        self.note_slice()

    @property
    def settled_master(self) -> Tensor:
        """Return ``p32`` as the next step will settle it if the caller has written ``p``; ``p32`` stays as it is."""
        is_settled = self.shares_storage or not (self.writes or self.saved_master) or not self.owns_some
        return self.p32.detach() if is_settled else self.shaped(self._settled())

    @torch.no_grad()
    def _settled(self, keeps_own: bool = True) -> Tensor:
        """Return for each element what rounds to ``p``: a saved master's, else ``p32``'s own, else ``p`` itself."""
        wait_for(self.p)
        row = self.row_for_master(self.p32.device, self.row.dtype)
        settled = row.to(self.p32.dtype)
        own = Known(self.master_row, self.fp8 and self.stepped) if keeps_own else None
        for known in (own, self.saved_master):
            if known is not None:
                settled = torch.where(_rounds_to(row, known), known.value, settled)
        return settled

    def share_again(self) -> None:
        """Let ``p32`` lie over the row again, where an optimizer's step has given it other memory."""
        if self.shares_storage and self.owns_some and self.p32.data_ptr() != self.row.data_ptr():
            self.p32.data = self.shaped(self.row.data)
            self.note_slice()

    def note_version(self) -> None:
        """Note that ``p`` has the same values on all ranks now; -1 stands for one that was moved, or differs."""
        self.version = self.p._version

    def note_slice(self) -> None:
        """Note that ``p32`` has values which the optimizer, or a load, has given it."""
        self.slice_version = self.p32._version

    @property
    def writes(self) -> int:
        """Return how often the caller has written ``p`` since ``note_version``; where it was moved, 1; else 0."""
        moved = self.version < 0 or self.p.data_ptr() != self.address
        return 1 if moved else self.p._version - self.version

    def follow_edits(self) -> None:
        """Copy values that the caller has written into ``p`` to ``p32``. Doesn't communicate.

        Only where ``p`` isn't the rounded ``p32`` any more, so the rest keeps its low bits, and a second call changes
        nothing. Raises as ``take_back`` does.
        """
        self.take_back()
        self.share_again()
        if not self.shares_storage and (self.p._version != self.version or self.saved_master is not None):
            self._settle()
            self.saved_master = None

    def check_kind(self) -> None:
        """Raise ``RuntimeError`` if ``p``'s dtype, device or shape has changed."""
        p, view = self.p, self.view
        if (p.dtype, p.device, p.shape) != (view.dtype, view.device, view.shape):
            raise RuntimeError(
                f"{self.name}: expected dtype, device and shape as at this optimizer's construction ({view.dtype}, "
                f"{view.device}, {tuple(view.shape)}), got {p.dtype}, {p.device}, {tuple(p.shape)}: move or convert "
                "a model (model.to, model.half, accelerator.prepare) before constructing the optimizer"
            )

    @torch.no_grad()
    def take_back(self) -> None:
        """Move ``p`` back over ``padded``, with its present values, if the caller has moved it. Doesn't communicate.

        ``p.data = ...`` does, ``model.cpu().cuda()``, ``model.to(memory_format=...)``. Strides become again what they
        were.

        Raises:
            RuntimeError: ``p`` isn't of the same dtype, device and shape any more.
        """
        if self.p.data_ptr() == self.address:
            return
        self.address = self.padded.data_ptr()  # share_memory_ moves a storage with all that look at it
        if self.p.data_ptr() != self.address:
            self.check_kind()
            move_onto(self.padded, self.view, self.p)
            self.version = -1

    def load_row(self, own: Tensor, master: Tensor | None) -> None:
        """Load this rank's row and ``p32``; other rows must be gathered afterwards.

        A row of another dtype than was saved, or that is ``p32`` itself, is made of the ``master``.
        """
        exact = own if master is None else master
        self.share_again()
        self.row[: len(own)].copy_(exact if self.shares_storage or own.dtype != self.row.dtype else own)
        if not self.shares_storage:
            self.master_row[: len(own)].copy_(exact)
        self.note_slice()
        self.saved_master = None
        self.stepped = master is not None or own.dtype != self.row.dtype

    def flatten(self, tensor: Tensor) -> Tensor:
        """Return a tensor of ``p``'s shape as ``[numel]``, in the order of ``padded``; a view if possible.

        The caller may have given ``p`` a memory of other strides since, which the next step moves back.
        """
        return flat_in_memory_order(tensor, self.view)

    def slice_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of this rank's slice, ``[s]``, of a tensor of ``p``'s shape; padding is zeros.

        A single element is on every rank: an optimizer may compute with it where there is nothing but padding, too.
        """
        flat, size = self.flatten(tensor), self.row.numel()
        if len(flat) == 1:
            return flat.expand(size).clone()
        start, stop = self.split.span(self.rank)
        own = flat.new_zeros(size)
        own[: stop - start] = flat[start:stop]
        return own

    def shaped(self, own: Tensor) -> Tensor:
        """Return this rank's slice, ``[s]``, in ``p32``'s shape; the memory is the same."""
        return self.split.shaped(own, self.view)

    def flat_slice(self, own: Tensor) -> Tensor:
        """Return a tensor of ``p32``'s shape as ``[s]``: itself if 1-D, else flat in memory order; it never pads."""
        if own.dim() == 1:
            return own
        return flat_in_memory_order(own, self.view if self.split.owner is not None else self.view[: len(own)])


def _rounds_to(row: Tensor, known: Known) -> Tensor:
    """Return a mask of the elements of ``row`` that the known value of ``p32`` rounds to."""
    plain = known.value.to(row.dtype)
    same = plain == row
    return same | is_rounded(plain, row) if known.fp8 and len(row) else same


def follow_edits(records: Iterable[ShardedParameter]) -> None:
    """Copy edited parameters into their masters, and moved ones back to their storages. Doesn't communicate."""
    edited = [record for record in records if record.writes or record.saved_master is not None]
    free_each_other(edited)
    for record in edited:
        record.follow_edits()


def take_back(records: Iterable[ShardedParameter]) -> None:
    """Move parameters back over their storages that the caller has moved, with their values. Doesn't communicate."""
    moved = [record for record in records if record.p.data_ptr() != record.address]
    free_each_other(moved)
    for record in moved:
        record.take_back()


def free_each_other(edited: Iterable[ShardedParameter]) -> None:
    """Clone ``p.data`` of moved parameters if several have moved: one may lie in memory that another moves back to."""
    moved = [record for record in edited if record.p.data_ptr() not in (record.address, record.padded.data_ptr())]
    for record in moved if len(moved) > 1 else ():
        record.p.data = record.p.data.clone()
