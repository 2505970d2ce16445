"""Functions on ``p.grad``: they take gradients out for packing, and show, hide and clear the sharded gradient.

While a parameter has a ``g``, or its bucket is being reduced, ``p.grad`` is the parameter's handle, a
``ShardedGradient``. A later backward puts a plain gradient in its place; the two are told apart by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from sys import getrefcount

import torch
from torch import Tensor

from .sharded_parameter import Handle, ShardedParameter, check_grad_dtype


def take_gradients(records: Iterable[ShardedParameter], arrivals: Collection[int]) -> list[Tensor | None]:
    """Move each ``p.grad`` out, flat, ``[numel]``, and show the sharded gradient instead; None: there is none.

    One that came with a graph may still hang on it. Of a parameter that is frozen through ``param_groups`` one goes
    that is among ``arrivals``, this sync's. The sharded one takes its place, on all ranks alike, also of one that isn't
    dense, or of another dtype by ``p.grad_dtype``, for which it raises.
    """
    taken: list[Tensor | None] = []
    refusals: list[Callable[[], object]] = []
    for record in records:
        p = record.p
        gradient = p.grad
        if gradient is record.shown:
            gradient, record.pending = record.pending, None
        elif isinstance(gradient, Handle):  # assigned by hand, which a step refuses: to pack it would read other ranks'
            gradient = None
        if not record.p32.requires_grad and record.index in arrivals:
            gradient = None
        if gradient is not None:
            record.worked = True
            if gradient.layout is not torch.strided:
                refusals.append(partial(record.refuse_sparse, gradient))
            elif not record.is_flat:
                gradient = gradient.reshape(-1) if record.is_contiguous else record.flatten(gradient)
        try:
            p.grad = record.shown = record.handle
        except RuntimeError:  # the model has been converted, which the step refuses
            p.grad = record.shown = None
            refusals.append(partial(check_grad_dtype, p, record.name))
        record.p32.grad = record.slice_handle
        record.arrived = False
        taken.append(gradient)
    for refuse in refusals:
        refuse()
    return taken


def hide_gradients(records: Iterable[ShardedParameter]) -> None:
    """Mark records as having no ``g``, and take the handles out of ``p.grad`` and ``p32.grad``."""
    for record in records:
        record.worked = False
        if record.shown is not None:
            if record.p.grad is record.shown:
                record.p.grad = None
            record.shown = record.pending = None
        record.p32.grad = None


def clear_gradients(records: Iterable[ShardedParameter]) -> None:
    """Drop all gradients of ``records``, reduced or not; handles that callers have kept raise from now on."""
    kept = []
    for record in records:
        record.arrived = record.worked = False
        record.shown = record.pending = None
        record.p.grad = record.p32.grad = None
        if getrefcount(record.handle) > _ALONE or getrefcount(record.slice_handle) > _ALONE:
            kept.append(record)
    retire_handles(kept)


def retire_handles(records: Iterable[ShardedParameter]) -> None:
    """Replace the handles that callers have kept by new ones; the kept ones raise from now on.

    Whether anybody keeps one is told by its references: ``.grad`` of a new one costs ten times as much.
    """
    for record in records:
        if getrefcount(record.handle) > _ALONE and record.handle is not None:
            record.handle = record.handle.retire()
        if getrefcount(record.slice_handle) > _ALONE and record.slice_handle is not None:
            record.slice_handle = record.slice_handle.retire()


class _Slot:
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = object()


_slot = _Slot()
_ALONE = getrefcount(_slot.held)  # references of what one attribute holds
