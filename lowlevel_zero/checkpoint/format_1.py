"""Format 1, of versions before this one: tensors were stored flat, in memory order; here they get their shapes.

``model.<name>`` and ``optimizer.<name>.<key>`` had ``numel`` elements, whose shape and strides are in the manifest.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from ..bookkeeping.sharding import SCALARS
from .boxes import Shape, parts_of
from .manifest import Manifest, SavedTensor


class Piece(NamedTuple):
    """One box, in a tensor that is stored flat.

    Attributes:
        place: torch.distributed.checkpoint's description of where that is.
        start: its first element's place in the whole one.
        entry: what the whole one is; None: it was stored as it is, and ``box`` is all of it.
        box: the box's offsets.
    """

    place: Any
    start: int
    entry: SavedTensor | None
    box: Shape

    def of(self, stored: Tensor) -> Tensor:
        """The box."""
        if self.entry is None:
            return stored
        return parts_of(stored, self.start, self.entry.shape, self.entry.stride)[self.box]


def in_boxes(metadata: Metadata, manifest: Manifest) -> Metadata:
    """The metadata of a checkpoint of format 1 as a later one has them, with a ``Piece`` for each place."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for full, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            tensors[full] = described
            continue
        kind, _, rest = full.partition(".")
        name, _, key = (rest, "", "") if kind == "model" else rest.rpartition(".")
        entry = manifest.tensors.get(name)
        if entry is None or key in SCALARS or tuple(described.size) != (entry.numel,):
            entry = None
        names = [name, *(alias for alias, of in manifest.tied.items() if of == name)] if kind == "model" else [name]
        for each in names:
            new = f"model.{each}" if kind == "model" else f"optim.state.{each}.{key}"
            pieces = list(_pieces(full, described, metadata, entry))
            chunks = [ChunkStorageMetadata(torch.Size(piece.box), sizes) for piece, sizes in pieces]
            size = described.size if entry is None else torch.Size(entry.shape)
            tensors[new] = TensorStorageMetadata(described.properties, size, chunks)
            places.update({MetadataIndex(new, torch.Size(piece.box)): piece for piece, _ in pieces})
    return Metadata(tensors, storage_data=places)


def _pieces(
    full: str, described: TensorStorageMetadata, metadata: Metadata, entry: SavedTensor | None
) -> Iterator[tuple[Piece, torch.Size]]:
    """The boxes of what is stored, with their sizes."""
    for chunk in described.chunks:
        place = metadata.storage_data[MetadataIndex(full, chunk.offsets)]
        if entry is None:
            yield Piece(place, 0, None, tuple(chunk.offsets)), chunk.sizes
        elif chunk.sizes[0] or not entry.numel:
            start = chunk.offsets[0]
            parts = parts_of(torch.empty(chunk.sizes, device="meta"), start, entry.shape, entry.stride)
            for box, part in parts.items():
                yield Piece(place, start, entry, box), part.size()


class Reader1(FileSystemReader):
    """Reads what ``in_boxes`` describes."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder = folder
        self._pieces: dict[MetadataIndex, Piece] = metadata.storage_data
        self._metadata = metadata

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        last: Any = None
        for item in plan.items:
            piece = self._pieces[item.storage_index]
            if last is None or last[0] != piece.place:
                last = piece.place, self._stored(piece.place)
            part = narrow_tensor_by_index(piece.of(last[1]), item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _stored(self, place: Any) -> Tensor:
        with (self._folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            stored: Tensor = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        return stored
