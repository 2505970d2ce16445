"""Boxes: a rank's range of a flat tensor as rectangles of the N-D one, as torch.distributed.checkpoint saves them.

The range ``[start, stop)`` of a tensor of ``n`` dimensions, flat in memory order, is at most ``2n - 1`` boxes. For a
matrix they are three: the rest of a row, whole rows, the beginning of a row. A checkpoint therefore has tensors of
their own shape, which torch's tools read whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed.checkpoint.planner
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..bookkeeping.storages import flat_in_memory_order
from ..partition import EvenSplit, Split

Shape = tuple[int, ...]
# The base class by which torch 2.4 recognises a tensor that describes itself; later versions ask every tensor.
_Asked: Any = getattr(torch.distributed.checkpoint.planner, "_Checkpointable", object)


class Blocks(NamedTuple):
    """The division among ranks of a tensor with one element for each block, of ``size`` elements, of another tensor.

    ``split`` divides the other tensor. Ranks share no block where its spans begin at blocks.
    """

    split: Split
    size: int

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.split.world_size

    def span(self, rank: int) -> tuple[int, int]:
        """Return the first and one-past-last of the blocks that ``rank`` has elements of."""
        start, stop = self.split.span(rank)
        end = -(-stop // self.size)
        return (start // self.size if start < stop else end), end


Spans: TypeAlias = Split | Blocks  # a division of a flat tensor among ranks


class Box(NamedTuple):
    """A rectangle in a tensor: its first index and its extent in each dimension."""

    offsets: Shape
    sizes: Shape


def boxes_in_memory(shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, Shape]]:
    """Yield each box of elements ``[start, stop)`` of a dense tensor in memory order, with the strides of its elements.

    A tensor without elements is one box.
    """
    outermost_first = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    back = [outermost_first.index(dim) for dim in range(len(shape))]
    ordered = [shape[dim] for dim in outermost_first]
    boxes = boxes_of(ordered, start, stop) if math.prod(shape) else [Box((0,) * len(shape), tuple(ordered))]
    for offsets, sizes in boxes:
        inner = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(shape)))
        box = Box(tuple(offsets[dim] for dim in back), tuple(sizes[dim] for dim in back))
        yield box, tuple(inner[dim] for dim in back)


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements ``[start, stop)`` of a row-major tensor, in their order."""
    if start == stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    head = min(stop, -(-start // row) * row)
    tail = max(head, stop // row * row)
    yield from _in_row(shape, start, head)
    if head < tail:
        yield Box((head // row, *(0 for _ in shape[1:])), ((tail - head) // row, *shape[1:]))
    yield from _in_row(shape, tail, stop)


def _in_row(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements ``[start, stop)`` that have one index of the first dimension."""
    at, first = divmod(start, math.prod(shape[1:]))
    for box in boxes_of(shape[1:], first, first + stop - start):
        yield Box((at, *box.offsets), (1, *box.sizes))


class BoxedTensor(Tensor, _Asked):  # type: ignore[misc]
    """A tensor of which this rank holds some boxes, for torch.distributed.checkpoint to save or to load.

    Attributes:
        local: the rank's elements, 1-D, in memory order.
        start: the place of the first one.
        strides: the strides of the whole tensor.
        split_by: divides the elements among ranks.
    """

    local: Tensor
    start: int
    strides: Shape
    split_by: Spans

    @staticmethod
    def __new__(
        cls, local: Tensor, start: int, shape: Sequence[int], stride: Sequence[int], split: Spans
    ) -> BoxedTensor:
        made: BoxedTensor = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        made.local, made.start, made.strides, made.split_by = local, start, tuple(stride), split
        return made

    def to_local(self) -> Tensor:
        """Return ``local``, this rank's elements, 1-D, not copied."""
        return self.local

    def with_local(self, local: Tensor) -> BoxedTensor:
        """Return a new ``BoxedTensor`` of the same boxes over ``local``."""
        return BoxedTensor(local, self.start, self.shape, self.strides, self.split_by)

    def parts(self) -> dict[Shape, Tensor]:
        """Return each box as a view of ``local``, by its offsets."""
        parts, at = {}, 0
        for box, strides in boxes_in_memory(self.shape, self.strides, self.start, self.start + len(self.local)):
            part = self.local.as_strided(box.sizes, strides, self.local.storage_offset() + at)
            parts[box.offsets] = part
            at += part.numel()
        return parts

    # ---- what torch.distributed.checkpoint asks a tensor for ----

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """Return an item for each box of this rank, as ``torch.distributed.checkpoint`` writes it."""
        found = []
        for chunk in self._chunks():
            data = TensorWriteData(chunk, TensorProperties(self.dtype), self.size())
            found.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return found

    def __create_chunk_list__(self, *_: object) -> list[ChunkStorageMetadata]:
        """Return this rank's boxes for a loader, and replace ``local`` by new memory, so that values may be refused."""
        self.local = torch.empty_like(self.local)
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.size()) for offsets, part in self.parts().items()]

    def __get_tensor_shard__(self, *of: Any) -> Tensor:
        return _with_storage_of_its_own(self.parts()[tuple(of[-1].offset)])

    # As torch 2.4 calls them, with the tensor beside this one, or its name before the index.
    _create_write_items, _create_chunk_list = __create_write_items__, __create_chunk_list__
    _get_tensor_shard = __get_tensor_shard__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation that copies or allocates on ``local``; raise ``NotImplementedError`` for any other."""
        boxed = next(each for each in args if isinstance(each, BoxedTensor))
        if func is torch.ops.aten.new_empty.default:
            return boxed.with_local(torch.empty_like(boxed.local, **(kwargs or {})))
        if func.overloadpacket not in _COPYING:
            raise NotImplementedError(
                f"expected no arithmetic on a tensor of Sharded.state_dict(), got {func}: compute with this rank's "
                "slice, which its to_local() returns"
            )
        args = [each.local if isinstance(each, BoxedTensor) else each for each in args]
        result = func(*args, **(kwargs or {}))
        return boxed if func is torch.ops.aten.copy_.default else boxed.with_local(result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BoxedTensor({self.local!r}, start={self.start}, shape={tuple(self.shape)})"


_COPYING = {
    getattr(torch.ops.aten, name)
    for name in ("detach", "alias", "clone", "_to_copy", "copy_", "empty_like", "zeros_like", "_pin_memory")
}


def boxed(own: Tensor, split: Spans, rank: int, shape: Sequence[int], stride: Sequence[int]) -> BoxedTensor:
    """Return ``own``, part ``rank`` of a split tensor, as a ``BoxedTensor`` over its memory, without padding."""
    start, stop = split.span(rank)
    return BoxedTensor(own.detach()[: stop - start].contiguous(), start, shape, stride, split)


def one_box(tensor: Tensor) -> BoxedTensor:
    """Return a whole tensor as a ``BoxedTensor`` of one box, over the same memory unless its strides leave gaps.

    torch conjugates and negates some tensors when they are read: the box has the values.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    like = torch.empty_like(values, device="meta")  # dense strides stay, and others become dense
    flat = flat_in_memory_order(values, like).contiguous()
    return BoxedTensor(flat, 0, tensor.shape, like.stride(), EvenSplit(len(flat), 1))


def _with_storage_of_its_own(part: Tensor) -> Tensor:
    """Return ``part`` over the same memory in a storage of just its size, which torch needn't copy to write it."""
    size = part.element_size()
    start = part.storage_offset() * size
    storage = part.untyped_storage()[start : start + part.numel() * size]
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(storage, 0, part.shape, part.stride())
