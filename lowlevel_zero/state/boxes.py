"""Boxes: a rank's range of a flat tensor as rectangles of the N-D one, as torch.distributed.checkpoint saves them.

The range ``[start, stop)`` of a tensor of ``n`` dimensions, flat in memory order, is at most ``2n - 1`` boxes. Of a
matrix three: the rest of a row, whole rows, the beginning of a row. So what is saved has the tensor's own shape, and
torch's tools read it, whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint.planner
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..partition import EvenSplit

Shape = tuple[int, ...]
# What torch 2.4 asks for what later versions ask every tensor for.
_Asked: Any = getattr(torch.distributed.checkpoint.planner, "_Checkpointable", object)


class Box(NamedTuple):
    """A rectangle in a tensor."""

    offsets: Shape
    sizes: Shape


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements ``[start, stop)`` of a row-major tensor are, in their order."""
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
    at, first = divmod(start, math.prod(shape[1:]))
    for box in boxes_of(shape[1:], first, first + stop - start):
        yield Box((at, *box.offsets), (1, *box.sizes))


class BoxedTensor(Tensor, _Asked):  # type: ignore[misc]
    """A tensor of which this rank has some boxes; torch.distributed.checkpoint saves these, and loads others.

    Attributes:
        local: the rank's elements, 1-D, in memory order.
        start: the place of the first one.
        strides: the tensor's.
    """

    local: Tensor
    start: int
    strides: Shape

    @staticmethod
    def __new__(cls, local: Tensor, start: int, shape: Sequence[int], stride: Sequence[int]) -> BoxedTensor:
        made: BoxedTensor = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        made.local, made.start, made.strides = local, start, tuple(stride)
        return made

    def to_local(self) -> Tensor:
        """The rank's elements, as of a ``DTensor``."""
        return self.local

    def with_local(self, local: Tensor) -> BoxedTensor:
        """The same boxes with other values."""
        return BoxedTensor(local, self.start, self.shape, self.strides)

    def parts(self) -> dict[Shape, Tensor]:
        """Return each box as a view of ``local``, by its offsets."""
        if not self.numel():
            return {(0,) * self.dim(): self.local[:0].view(self.shape)}
        outermost_first = sorted(range(self.dim()), key=lambda dim: -self.strides[dim])
        back = [outermost_first.index(dim) for dim in range(self.dim())]
        parts, at = {}, 0
        for box in boxes_of([self.shape[dim] for dim in outermost_first], self.start, self.start + len(self.local)):
            part = self.local[at : at + math.prod(box.sizes)].view(box.sizes).permute(back)
            parts[tuple(box.offsets[dim] for dim in back)] = part
            at += part.numel()
        return parts

    # ---- what torch.distributed.checkpoint asks a tensor for ----

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        found = []
        for chunk in self._chunks():
            data = TensorWriteData(chunk, TensorProperties(self.dtype), self.size())
            found.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return found

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the chunks for a loader, which reads into new memory, since the values may be refused."""
        self.local = torch.empty_like(self.local)
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.size()) for offsets, part in self.parts().items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return _with_storage_of_its_own(self.parts()[tuple(index.offset)])

    def _create_write_items(self, name: str, _: object) -> list[WriteItem]:  # as torch 2.4 calls them
        return self.__create_write_items__(name, _)

    def _create_chunk_list(self, _: object) -> list[ChunkStorageMetadata]:
        return self.__create_chunk_list__()

    def _get_tensor_shard(self, _: object, index: MetadataIndex) -> Tensor:
        return self.__get_tensor_shard__(index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the operations that copying a state dict needs; there are no others."""
        boxed = next(each for each in args if isinstance(each, BoxedTensor))
        if func is torch.ops.aten.new_empty.default:
            return boxed.with_local(torch.empty_like(boxed.local, **(kwargs or {})))
        if func.overloadpacket not in _COPYING:
            raise NotImplementedError(f"expected a copy of a checkpoint's tensor, got {func}: use its to_local()")
        args = [each.local if isinstance(each, BoxedTensor) else each for each in args]
        result = func(*args, **(kwargs or {}))
        return boxed if func is torch.ops.aten.copy_.default else boxed.with_local(result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BoxedTensor({self.local!r}, start={self.start}, shape={tuple(self.shape)})"


_COPYING = {
    getattr(torch.ops.aten, name)
    for name in ("detach", "alias", "clone", "_to_copy", "copy_", "empty_like", "zeros_like", "_pin_memory")
}


def boxed(own: Tensor, split: EvenSplit, rank: int, shape: Sequence[int], stride: Sequence[int]) -> BoxedTensor:
    """The tensor of which ``own`` is row ``rank`` of this split, with its padding or without."""
    start, stop = split.span(rank)
    return BoxedTensor(own.detach()[: stop - start].contiguous(), start, shape, stride)


def _with_storage_of_its_own(part: Tensor) -> Tensor:
    """The same memory behind a storage that ends where ``part`` does.

    torch.distributed.checkpoint copies parts of larger storages before it writes them, and some versions keep all
    copies to the end.
    """
    size = part.element_size()
    start = part.storage_offset() * size
    storage = part.untyped_storage()[start : start + part.numel() * size]
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(storage, 0, part.shape, part.stride())
