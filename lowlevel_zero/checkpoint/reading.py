"""A checkpoint's tensors in one process, without a process group: each is read when it is asked for, in pieces."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from .stored import StoredTensor


class TensorReader:
    """The tensors that ``torch.distributed.checkpoint`` wrote into the directory ``path``, by key of ``metadata``.

    Raises:
        ValueError: from every method, where a file is damaged or not what it should be.
        OSError: a file can't be read.
    """

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self._path = path
        self._metadata = metadata
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._files = FileSystemReader(path)
        self._files.set_up_storage_reader(self._metadata, is_coordinator=True)

    def tensor(self, key: str) -> StoredTensor:
        """A tensor as it was saved, row-major, not read yet.

        A piece of it is good until the next piece of any tensor is read, into the same memory.
        """
        described = self._metadata.state_dict_metadata.get(key)
        if not isinstance(described, TensorStorageMetadata):
            raise ValueError(f"{self._path}: expected a tensor {key}, found none")
        chunks = _in_order(described)
        if chunks is None:
            raise ValueError(f"{self._path}: {key}: expected pieces that make it whole, found {described.chunks}")
        dtype, shape = described.properties.dtype, tuple(described.size)
        stride = torch.empty(shape, device="meta").stride()
        return StoredTensor(dtype, shape, stride, lambda: self._pieces(key, dtype, chunks))

    def _pieces(self, key: str, dtype: torch.dtype, chunks: Sequence[ChunkStorageMetadata]) -> Iterator[Tensor]:
        for chunk in chunks:
            place = MetadataIndex(key, chunk.offsets)
            nothing = torch.Size([0] * len(chunk.sizes))
            item = ReadItem(LoadItemType.TENSOR, place, nothing, place, nothing, chunk.sizes)
            piece = self._room_for(chunk.sizes.numel(), dtype)
            self._read(item, _OneTensor(piece.view(chunk.sizes)))
            yield piece

    def _room_for(self, numel: int, dtype: torch.dtype) -> Tensor:
        size = numel * dtype.itemsize
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._buffer[:size].view(dtype)

    def _read(self, item: ReadItem, planner: _OneTensor) -> None:
        try:
            self._files.read_data(LoadPlan([item]), planner).wait()
        except OSError:
            raise
        except Exception as error:  # of whatever kind torch's reader raises for bytes that are no tensor's
            raise ValueError(f"{self._path}: {item.storage_index.fqn} can't be read: {error!r}") from error


class _OneTensor(DefaultLoadPlanner):
    """Where the engine puts the one piece that is read."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError("expected a tensor, found a pickle, which is not loaded")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _in_order(described: TensorStorageMetadata) -> list[ChunkStorageMetadata] | None:
    """The chunks from the tensor's start to its end, without empty ones; None where they don't fit together.

    What is flat may be in several; all else, which every rank had, is in one.
    """
    if len(described.size) != 1:
        return described.chunks if [chunk.sizes for chunk in described.chunks] == [described.size] else None
    chunks = sorted((chunk for chunk in described.chunks if chunk.sizes[0]), key=lambda chunk: chunk.offsets[0])
    ends = [0, *(chunk.offsets[0] + chunk.sizes[0] for chunk in chunks)]
    starts = [*(chunk.offsets[0] for chunk in chunks), described.size[0]]
    return chunks if starts == ends else None
