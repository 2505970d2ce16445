"""Whole masters, gradients and states of many parameters, gathered in few large messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ..bookkeeping.gradient_store import at_least_fp32
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..bookkeeping.storages import flat_in_memory_order
from ..communication.shard_group import ShardGroup
from ..partition import END_TO_END
from ..sharded_group import ShardedGroup
from .nested import State

# The state that is one number a parameter where it is 0-d, also beside a 0-d parameter: it is never cut.
STEP = "step"

# Bytes of a message that carries many slices, which are held in addition.
MESSAGE_BYTES = 64 * 2**20


class Slice(NamedTuple):
    """A part of a tensor that the ranks hold together: ``[s]`` elements, or, on an owner, all of one of its tensors.

    On ranks that own nothing of the parameter it is on the meta device.
    """

    record: ShardedParameter
    own: Tensor

    @classmethod
    def of_row(cls, record: ShardedParameter, row: Tensor) -> Slice:
        """Return a slice over the memory of ``row``, ``[s]``; on a rank that owns nothing, one on the meta device."""
        own = record.shaped(row) if record.owns_some else torch.empty_like(record.view, dtype=row.dtype, device="meta")
        return cls(record, own)

    @property
    def kind(self) -> tuple[torch.device, torch.dtype, int | None]:
        """Return the device, dtype and owner, which slices in one message have in common."""
        return self.record.padded.device, self.own.dtype, self.record.split.owner

    @property
    def like(self) -> Tensor:
        """Return a dense tensor of the whole one's shape and strides; its values have no meaning."""
        return (
            self.record.view if self.record.split.owner is None else torch.empty_like(self.own.detach(), device="meta")
        )

    def row(self) -> Tensor:
        """Return this rank's elements, 1-D, in memory order, on the parameters' device."""
        record = self.record
        flat = record.flat_slice(self.own) if record.split.owner is None else flat_in_memory_order(self.own, self.like)
        return flat.to(record.padded.device)

    def whole(self, rows: Tensor) -> Tensor:
        """Return the whole tensor, as a view of all ranks' ``rows`` without padding."""
        return torch.as_strided(rows, self.like.shape, self.like.stride())


def is_slice(key: str, value: Any, record: ShardedParameter, of_elements: Sequence[int] | None = None) -> bool:
    """Return whether a state is sliced over the ranks, or held by one owner, instead of being alike on all.

    ``of_elements``: the shape of a state with one number for each element; None: it is a slice's.
    """
    if not isinstance(value, Tensor):
        return False
    if record.split.owner is not None:
        return value.dim() > 0 or (record.p.dim() == 0 and key != STEP)
    is_number = key == STEP and value.dim() == 0
    return not is_number and value.shape == (record.p32.shape if of_elements is None else of_elements)


def unshard(rows: Tensor, record: ShardedParameter) -> Tensor:
    """Return ``rows``, ``[world_size, s]``, as a view of ``p``'s shape and strides, without padding."""
    flat = rows.reshape(-1)[: record.split.numel]
    return torch.as_strided(flat, record.view.shape, record.view.stride(), flat.storage_offset())


# ---- what owners tell the other ranks of ----


def told_by_owner(own: Mapping[ShardedParameter, State], rank: int) -> dict[int, State] | None:
    """Return the states of ``rank``'s whole parameters, by index, with meta tensors; None if no rank has whole ones."""
    if all(record.split.owner is None for record in own):
        return None
    return {record.index: told_state(own[record]) for record in own if record.split.owner == rank}


def told_states(
    own: Mapping[ShardedParameter, State], told: dict[int, State] | None, group: ShardGroup
) -> dict[ShardedParameter, State]:
    """Return each record's state, taken from its owner if another rank owns it.

    This rank sends ``told`` to the others. Communicates unless that is None.
    """
    states = dict(own)
    for of_rank in [] if told is None else group.all_gather_object(told):
        states.update(
            (record, of_rank[record.index]) for record in own if record.index in of_rank and not record.owns_some
        )
    return states


def told_state(state: State) -> State:
    """Return a state to tell other ranks: tensors without values on the meta device, 0-d ones on the host."""

    def told(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_like(value.detach(), device="meta") if value.dim() else value.detach().cpu()

    whole: State = tree_map(told, state)
    return whole


def whole_slices(slices: Iterable[Slice], group: ShardGroup) -> Iterator[Tensor]:
    """Gather each slice, and yield the whole tensor, on ``p``'s device. Communicates: all ranks iterate to the end.

    They travel in few messages of at most ``MESSAGE_BYTES`` (or one larger tensor), each when its first tensor is due.
    """
    for batch in _batches(slices, group.size):
        yield from _gathered(batch, group)


def _batches(slices: Iterable[Slice], world_size: int) -> Iterator[list[Slice]]:
    """Group neighbouring slices of one device, dtype and owner, as many as fit into ``MESSAGE_BYTES``."""
    batch: list[Slice] = []
    room = MESSAGE_BYTES
    for each in slices:
        size = world_size * each.own.numel() * each.own.element_size()
        if batch and (size > room or each.kind != batch[0].kind):
            yield batch
            batch, room = [], MESSAGE_BYTES
        batch.append(each)
        room -= size
    if batch:
        yield batch


def _gathered(batch: Sequence[Slice], group: ShardGroup) -> list[Tensor]:
    """Gather the slices of one batch together, and return the whole tensors. Communicates."""
    lead = batch[0].record
    shapes = [(lead.split.rows, each.own.numel()) for each in batch]
    rows = [torch.empty(shape, dtype=batch[0].own.dtype, device=lead.padded.device) for shape in shapes]
    filled = [row for row in rows if row.numel()]
    if filled:
        own = [each.row() for each in batch if each.own.numel()] if lead.owns_some else []
        lead.split.gather(group, own, filled, False, END_TO_END, None).wait()
    return [each.whole(row) for row, each in zip(rows, batch, strict=True)]


def whole_masters(records: Iterable[ShardedParameter], group: ShardGroup) -> Iterator[Tensor]:
    """Gather each ``p32``, and yield it whole, in fp32 at least. Communicates: all ranks iterate to the end."""
    masters = (Slice.of_row(record, record.master_row.detach()) for record in records)
    return map(at_least_fp32, whole_slices(masters, group))


def whole_gradients(records: Sequence[ShardedParameter], group: ShardedGroup) -> Iterator[Tensor | None]:
    """Yield each whole gradient, reduced and unscaled as for a step, in fp32 at least, or None if no rank has one.

    Communicates unless every rank has all rows anyway (stage 1, before the step): all ranks iterate to the end.
    """
    gradients = group.gradients
    buckets = [gradients.bucket_of(record) for record in records]
    apart = (r for r, bucket in zip(records, buckets, strict=True) if bucket is not None and bucket.rows is None)
    slices = ((record, gradients.averaged(record)) for record in apart)
    gathered = whole_slices((Slice.of_row(record, own) for record, own in slices if own is not None), group.group)
    for record in records:
        rows = gradients.averaged_rows(record)
        if rows is not None:
            yield unshard(rows, record)
        else:
            yield next(gathered) if record.worked else None


def whole_states(
    records: Sequence[ShardedParameter], optim: Optimizer, key: str, group: ShardGroup
) -> Iterator[Tensor | None]:
    """Gather each parameter's state ``key``, and yield it whole, in fp32 at least, or None. Communicates.

    All ranks iterate to the end.
    """
    own = {record: optim.state.get(record.p32, {}) for record in records}
    told = told_states(own, told_by_owner(own, group.rank), group)
    states: list[tuple[ShardedParameter, Any]] = [(record, told[record].get(key)) for record in records]
    gathered = whole_slices([Slice(record, value) for record, value in states if is_slice(key, value, record)], group)
    for record, value in states:
        if value is None:
            yield None
        elif is_slice(key, value, record):
            yield at_least_fp32(next(gathered))
        else:  # a copy, and a number as a 0-d tensor
            tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), device="cpu")
            yield at_least_fp32(tensor.detach().to(record.padded.device, copy=True))


def slice_state(state: Mapping[str, Any], record: ShardedParameter) -> State:
    """Return a whole parameter's state cut to this rank's slice; values of other shapes are unchanged.

    Tensors in lists and dicts are cut as those beside them.
    """
    return {key: tree_map(partial(_sliced, key, record=record), value) for key, value in state.items()}


def _sliced(key: str, value: Any, record: ShardedParameter) -> Any:
    """Return a copy of ``value``, cut to this rank's slice if it has ``p``'s shape, and on the host if ``p32`` is."""
    if isinstance(value, Tensor) and record.p32.device.type == "cpu":
        value = value.cpu()  # all of it: a step count, say, of an optimizer that was on a device
    if not isinstance(value, Tensor):
        return value
    if value.shape != record.p.shape or (key == STEP and value.dim() == 0):
        return value.clone()  # which the next step counts up in place
    own = record.shaped(record.slice_of(value))
    # State in a 16-bit model's dtype was made for p; p32 wants its own.
    return own.to(record.p32.dtype) if value.dtype == record.p.dtype else own
