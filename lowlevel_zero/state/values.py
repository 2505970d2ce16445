"""Whole masters, gradients and states of many parameters, gathered in few large messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..bookkeeping.sharded_parameter import ShardedParameter
from ..bookkeeping.sharding import SCALARS
from ..communication.shard_group import ShardGroup
from ..sharded_group import ShardedGroup

# Bytes of a message that brings many slices: what is held beside them.
MESSAGE_BYTES = 64 * 2**20


class Slice(NamedTuple):
    """A tensor of which each rank holds a slice, ``[s]`` elements of one parameter."""

    record: ShardedParameter
    own: Tensor

    @property
    def kind(self) -> tuple[torch.device, torch.dtype]:
        """Return the device and dtype, which slices in one message have in common."""
        return self.record.padded.device, self.own.dtype


def is_slice(key: str, value: Any, record: ShardedParameter) -> bool:
    """Return whether a state has one number for each element of this rank's slice."""
    return isinstance(value, Tensor) and key not in SCALARS and value.shape == record.p32.shape


def unshard(rows: Tensor, record: ShardedParameter) -> Tensor:
    """Return ``[world_size, s]`` without its padding, as a tensor of ``p``'s shape and strides."""
    return record.restore(rows.reshape(-1)[: record.split.numel])


def whole_slices(slices: Iterable[Slice], group: ShardGroup) -> Iterator[Tensor]:
    """Yield the whole tensor of each slice: of ``p``'s shape and strides and on its device, of the slice's dtype.

    They travel in few messages of at most ``MESSAGE_BYTES`` (or one larger tensor), each when its first tensor is asked
    for. Communicates: all ranks iterate to the end.
    """
    for batch in _batches(slices, group.size):
        yield from _gathered(batch, group)


def _batches(slices: Iterable[Slice], world_size: int) -> Iterator[list[Slice]]:
    """Yield neighbouring slices of one device and dtype, as many as fit into a message."""
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
    device = batch[0].record.padded.device
    rows = [torch.empty(group.size, len(own), dtype=own.dtype, device=device) for _, own in batch]
    filled = [row for row in rows if row.numel()]
    if filled:
        group.gather([own.to(device) for _, own in batch if own.numel()], filled).wait()
    return [unshard(each, record) for each, (record, _) in zip(rows, batch, strict=True)]


def whole_masters(records: Iterable[ShardedParameter], group: ShardGroup) -> Iterator[Tensor]:
    """Return the whole of each ``p32``, fp32 at least. Communicates: all ranks iterate to the end."""
    return map(at_least_fp32, whole_slices((Slice(record, record.p32.detach()) for record in records), group))


def whole_gradients(records: Sequence[ShardedParameter], group: ShardedGroup) -> Iterator[Tensor | None]:
    """Yield whole averaged, unscaled gradients, fp32 at least; None where no rank has one.

    Communicates unless every rank has all rows anyway (stage 1, before the step): all ranks iterate to the end.
    """
    gradients = group.gradients
    buckets = [gradients.bucket_of(record) for record in records]
    apart = (r for r, bucket in zip(records, buckets, strict=True) if bucket is not None and bucket.rows is None)
    slices = ((record, gradients.averaged(record)) for record in apart)
    gathered = whole_slices((Slice(record, own) for record, own in slices if own is not None), group.group)
    for record in records:
        rows = gradients.averaged_rows(record)
        if rows is not None:
            yield unshard(rows, record)
        else:
            yield next(gathered) if record.worked else None


def whole_states(
    records: Sequence[ShardedParameter], optim: Optimizer, key: str, group: ShardGroup
) -> Iterator[Tensor | None]:
    """Yield the state ``key`` of each parameter: whole, fp32 at least if floating-point; a number 0-d; None for none.

    Communicates: all ranks iterate to the end.
    """
    values = [optim.state.get(record.p32, {}).get(key) for record in records]
    sliced = [
        Slice(record, value) for record, value in zip(records, values, strict=True) if is_slice(key, value, record)
    ]
    gathered = whole_slices(sliced, group)
    for record, value in zip(records, values, strict=True):
        yield at_least_fp32(next(gathered)) if is_slice(key, value, record) else copied_state(value, record)


def copied_state(value: Any, record: ShardedParameter) -> Tensor | None:
    """Return a copy of a state on ``p``'s device, a number as a 0-d tensor; None: there is none."""
    if value is None:
        return None
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), device="cpu")
    return at_least_fp32(tensor.detach().to(record.padded.device, copy=True))


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return ``tensor``, as fp32 if it is bf16 or fp16."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def fill_slice(own: Tensor, value: Tensor, record: ShardedParameter) -> None:
    """Let ``own`` hold ``value``, another slice ``[s]`` of any dtype, with zeros for padding."""
    start, stop = record.split.span(record.rank)
    own[: stop - start].copy_(value[: stop - start])
    own[stop - start :].zero_()
