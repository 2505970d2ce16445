"""Flat shards: 1-D DTensors over the elements of a parameter, of which each rank holds its slice without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .collectives import ShardGroup
from .partition import EvenSplit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A ``DTensor`` to load into."""
        start, stop = self.span(numel)
        return self.wrap(torch.empty(stop - start, dtype=dtype, device=device), numel)

    def _mesh(self, device_type: str) -> DeviceMesh:
        if device_type not in self._meshes:
            from torch.distributed.device_mesh import DeviceMesh

            self._meshes[device_type] = DeviceMesh.from_group(self._group.group, device_type)
        return self._meshes[device_type]


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
