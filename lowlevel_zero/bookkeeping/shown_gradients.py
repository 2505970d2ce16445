"""Functions on ``p.grad``: they take gradients out for packing, show, hide and clear the sharded one, and check others.

While a parameter has a ``g``, or its bucket is being reduced, ``p.grad`` is the parameter's handle, a
``ShardedGradient``. A later backward puts a plain gradient in its place; the two are told apart by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from sys import getrefcount
from typing import NoReturn
from weakref import ref

import torch
from torch import Tensor

from .sharded_parameter import Handle, ShardedParameter


def show(records: Iterable[ShardedParameter]) -> None:
    """Assign the handles to ``p.grad``; a plain gradient that was there becomes ``pending``.

    The handle takes its place on all ranks alike, unless the model has been converted, which the step refuses.
    """
    for record in records:
        p, handle = record.p, record.handle
        gradient = p.grad
        if gradient is not handle:
            record.pending = gradient
        try:
            p.grad = record.shown = handle
        except RuntimeError:
            p.grad = record.shown = None


def take_gradients(records: Sequence[ShardedParameter], arrivals: Collection[int]) -> list[Tensor | None]:
    """Move each ``p.grad`` out, flat, ``[numel]``, and show the sharded gradient instead; None: there is none.

    One that came with a graph may still hang on it. One of a parameter that is frozen through ``param_groups`` is
    dropped if it is among ``arrivals``, this sync's. Raises at the end for one that isn't dense, or of another dtype by
    ``p.grad_dtype``.
    """
    taken: list[Tensor | None] = []
    refusals: list[Callable[[], object]] = []
    show(records)
    for record in records:
        gradient, record.pending = record.pending, None
        frozen = not record.p32.requires_grad and record.index in arrivals
        if frozen or isinstance(gradient, Handle):  # assigned by hand, refused by a step: packing would read others'
            gradient = None
        if gradient is not None:
            record.worked = True
            if gradient.layout is not torch.strided:
                refusals.append(partial(refuse_sparse, record, gradient))
            elif gradient.dim() != 1:
                gradient = gradient.reshape(-1) if record.is_contiguous else record.flatten(gradient)
        if record.shown is None:
            refusals.append(partial(check_grad_dtype, record.p, record.name))
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


def clear_gradients(records: Sequence[ShardedParameter]) -> None:
    """Drop all gradients of ``records``, reduced or not; handles that callers have kept raise from now on."""
    for record in records:
        record.arrived = record.worked = False
        record.shown = record.pending = None
        record.p.grad = record.p32.grad = None
    retire_handles(records)


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
    held = object()


_ALONE = getrefcount(_Slot.held)  # references of what one attribute holds


# ---- gradients that wait in ``p.grad``, and those of frozen slices ----


def unreduced(record: ShardedParameter) -> Tensor | None:
    """Return the gradient that a backward, or the caller, has left to be reduced, or None."""
    gradient = record.p.grad
    return gradient if gradient is not record.shown else record.pending


def note_waiting(record: ShardedParameter) -> None:
    """Remember the gradient in ``p.grad``, which waits for a later sync."""
    record.waiting = None if record.p.grad is None else ref(record.p.grad)


def drop_unreduced(record: ShardedParameter, earlier: bool = False) -> None:
    """Drop the gradient that a backward has just left; raise if it may have been added to an ``earlier`` one.

    Where it isn't in the sharded one, the caller has set that to None before, and will be found to have done so.
    """
    gradient, waits = record.p.grad, record.waiting
    # With a graph a sum is a new tensor.
    is_sum = gradient is None or waits is None or gradient.requires_grad or waits() is gradient
    if gradient is not record.shown:
        if record.shown is None and record.p32.grad is not None:  # a sum with a graph has taken the sharded one's place
            show([record])
        else:
            record.p.grad = None
    record.pending = None
    record.arrived = False
    if earlier and is_sum:
        raise RuntimeError(
            f"{record.name}: expected no earlier gradient in p.grad (of no_sync, or of another optimizer's backward) "
            "while requires_grad of its slice in param_groups is False, found one, which can't be told any more "
            "from what has come now: call optimizer.zero_grad() or step before setting requires_grad"
        )


# ---- what callers have assigned ----


def is_slice_edited(record: ShardedParameter) -> bool:
    """Return whether the caller has assigned to ``p32.grad`` since the handle was shown there."""
    return record.shown is not None and record.p32.grad is not record.slice_handle


def check_before_step(record: ShardedParameter) -> None:
    """Raise ``RuntimeError`` if ``p.grad`` is sparse, another parameter's handle, or assigned while there is a sum."""
    gradient = record.p.grad
    if gradient is None or gradient is record.shown:
        return
    if gradient.layout is not torch.strided:
        refuse_sparse(record, gradient)
    if isinstance(gradient, Handle) or (record.worked and not record.arrived):
        refuse_assigned(record)


def check_before_backward(record: ShardedParameter) -> None:
    """Raise ``RuntimeError`` if ``p.grad`` is another parameter's handle, or the caller has assigned ``p32.grad``."""
    if isinstance(record.p.grad, Handle) and record.p.grad is not record.shown:
        refuse_assigned(record)
    if record.p32.grad is not None:
        check_slice(record)


def check_slice(record: ShardedParameter) -> None:
    """Raise ``RuntimeError`` if the caller has assigned ``p32.grad``, or set it to None, before this backward."""
    if is_slice_edited(record):
        how = "set to None" if record.p32.grad is None else "assigned"
        raise RuntimeError(
            f"{record.name}: expected .grad of its slice in param_groups as the last backward has left it, got one "
            f"that was {how} before this backward: assign to slices behind the last backward of a step, and clear "
            "gradients by optimizer.zero_grad()"
        )


def refuse_assigned(record: ShardedParameter) -> NoReturn:
    """Raise ``RuntimeError`` for a ``p.grad`` that was assigned while there is a ``g``."""
    raise RuntimeError(
        f"{record.name}: expected p.grad as the backward has left it, got another tensor that was assigned to it: "
        "write the values by p.grad.copy_(tensor) on every rank"
    )


def refuse_sparse(record: ShardedParameter, gradient: Tensor) -> NoReturn:
    """Raise ``RuntimeError`` for a gradient that isn't dense."""
    raise RuntimeError(
        f"{record.name}: expected a dense gradient, got a {gradient.layout} one: "
        "build its layer with sparse=False (a slice of a sparse gradient can't be reduced)"
    )


def check_grad_dtype(p: Tensor, name: str) -> None:
    """Raise ``TypeError`` if autograd is to leave gradients in another dtype than the parameter's."""
    wanted = getattr(p, "grad_dtype", None)  # which torch has since 2.10
    if wanted not in (None, p.dtype):
        raise TypeError(
            f"{name}: expected gradients in the parameter's {p.dtype}, got grad_dtype={wanted}: leave it as it was; "
            "sums of micro-batches are kept in fp32"
        )
