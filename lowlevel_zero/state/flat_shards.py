"""Flat shards: 1-D DTensors over the elements of a parameter, of which each rank holds its slice without padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from ..communication.shard_group import ShardGroup
from ..partition import EvenSplit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..bookkeeping.parameter_store import ShardedParameter


class Shards(Protocol):
    """Makes tensors of a parameter's state, of which each rank has its slice."""

    def of(self, record: ShardedParameter, own: Tensor) -> Tensor:
        """The tensor of which this rank holds the slice ``own``."""

    def empty_of(self, record: ShardedParameter, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor to load into."""

    def shape_of(self, record: ShardedParameter) -> tuple[int, ...]:
        """Such a tensor's shape in a checkpoint."""


class FlatShards:
    """Makes flat shards over the ranks of a group; the even split is ``DTensor``'s own with ``Shard(0)``.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._meshes: dict[str, DeviceMesh] = {}

    def span(self, numel: int) -> tuple[int, int]:
        """First and one-past-last element that this rank holds."""
        return EvenSplit(numel, self._group.size).span(self._group.rank)

    def wrap(self, own: Tensor, numel: int) -> Tensor:
        """The ``DTensor`` of ``numel`` elements of which this rank holds the first of ``own``, a slice or a row."""
        # torch.distributed.tensor takes a while to import: only who saves needs it.
        try:
            from torch.distributed.tensor import DTensor, Shard
        except ImportError:  # torch 2.4
            from torch.distributed._tensor import DTensor, Shard  # type: ignore[attr-defined]
        start, stop = self.span(numel)
        mesh = self._mesh(own.device.type)
        local = _with_storage_of_its_own(own.detach()[: stop - start])
        shape = torch.Size([numel])
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))
        chunk = partial(_chunk, start, stop)
        # torch.distributed.checkpoint asks tensors for these. DTensor's own (torch 2.13) makes an index of 8 bytes for
        # each element to find where its part starts, and leaves it to the garbage collector.
        vars(tensor)["__create_chunk_list__"] = chunk
        vars(tensor)["__create_write_items__"] = partial(_write_items, chunk, local.dtype, numel)
        return tensor

    def of(self, record: ShardedParameter, own: Tensor) -> Tensor:
        """The state of which this rank holds the slice ``own``."""
        return self.wrap(own, record.split.numel)

    def empty_of(self, record: ShardedParameter, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A ``DTensor`` to load into."""
        return self.wrap(torch.empty(record.split.slice_size, dtype=dtype, device=device), record.split.numel)

    def shape_of(self, record: ShardedParameter) -> tuple[int, ...]:
        """Flat."""
        return (record.split.numel,)

    def _mesh(self, device_type: str) -> DeviceMesh:
        if device_type not in self._meshes:
            from torch.distributed.device_mesh import DeviceMesh

            slices = self._group.slices
            if slices is not None:
                self._meshes[device_type] = DeviceMesh.from_group(slices, device_type)
            else:  # one that says who has which, and can't communicate
                ranks = torch.tensor(self._group.slice_ranks, device="cpu")
                self._meshes[device_type] = DeviceMesh(device_type, ranks, _init_backend=False)
        return self._meshes[device_type]


def _chunk(start: int, stop: int) -> list[Any]:
    """This rank's part, as torch.distributed.checkpoint describes it."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size([start]), torch.Size([stop - start]))]


def _write_items(chunk: Callable[[], list[Any]], dtype: torch.dtype, numel: int, name: str, _: object) -> list[Any]:
    """What torch.distributed.checkpoint is to write of this rank's part."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    (part,) = chunk()
    data = TensorWriteData(part, TensorProperties(dtype), torch.Size([numel]))
    return [WriteItem(MetadataIndex(name, part.offsets), WriteItemType.SHARD, tensor_data=data)]


def _with_storage_of_its_own(part: Tensor) -> Tensor:
    """The same memory behind a storage that ends where ``part`` does.

    torch.distributed.checkpoint copies parts of larger storages before it writes them, and some versions keep all
    copies to the end.
    """
    part = part.contiguous()  # it is, unless it shows one number many times
    size = part.element_size()
    start = part.storage_offset() * size
    storage = part.untyped_storage()[start : start + part.numel() * size]
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(storage, 0, part.shape, (1,))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a ``DTensor``; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast(Tensor, to_local()).detach()
