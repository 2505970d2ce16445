"""A checkpoint on disk: its index and objects are loaded; tensors' values are read straight into place."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from ..bookkeeping.storages import flat_in_memory_order
from ..state.boxes import BoxedTensor, Shape, boxes_in_memory
from ..state.values import STEP
from .manifest import METADATA, OBJECTS, TAKE_ANOTHER, TRAINABLE, Manifest, SavedTensor, read_manifest
from .objects import Objects, read_data, read_metadata
from .optimizers import Name
from .plan import name_of
from .tensor_bytes import TensorBytes, memory_of

_STATE = ("optim", "state")  # the first keys of an optimizer's states


class SavedCheckpoint:
    """A checkpoint on disk. Nothing in it is run.

    Attributes:
        path: the folder.
        metadata: torch.distributed.checkpoint's.

    Raises:
        ValueError: it is damaged, or no checkpoint.
        OSError: it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self.manifest.check_files(path, [METADATA, OBJECTS])
        self.metadata: Metadata = read_metadata(path)
        for full in (name_of(("model", name)) for name in self.manifest.tensors):
            if not isinstance(self.metadata.state_dict_metadata.get(full), TensorStorageMetadata):
                raise ValueError(f"{path}: {full}: expected a tensor, got a pickle: {TAKE_ANOTHER}")

    @cached_property
    def objects(self) -> Objects:
        """Return the values that are no tensors of parameters, buffers or states; the file is read once."""
        return Objects(**read_data(self.path / OBJECTS))

    @cached_property
    def model(self) -> dict[str, Tensor]:
        """Return the model's tensors without values, on the meta device, with their saved memory order."""
        return {name: _like(entry, entry.torch_dtype) for name, entry in self.manifest.tensors.items()}

    @cached_property
    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizers' states that are tensors, without values, by parameter and key; the step comes first.

        A state is in the parameter's memory order where it has its shape.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for full, described in self.metadata.state_dict_metadata.items():
            keys = self.metadata.planner_data[full]
            if keys[:2] == _STATE and isinstance(described, TensorStorageMetadata):
                entry, dtype = self.manifest.tensors.get(keys[2]), described.properties.dtype
                plain = torch.empty(described.size, dtype=dtype, device="meta")
                like = plain if entry is None or described.size != entry.shape else _like(entry, dtype)
                found.setdefault(keys[2], {})[keys[3]] = like
        step_first = {name: sorted(state, key=lambda key: (key != STEP, key)) for name, state in found.items()}
        return {name: {key: found[name][key] for key in keys} for name, keys in step_first.items()}

    def trained(self, optimizer: Name) -> list[str]:
        """Return the parameters that the optimizer of this name trains, in the order of its param groups."""
        own = {n for n, each in self.manifest.tensors.items() if (each.kind, each.optimizer) == (TRAINABLE, optimizer)}
        groups = self.objects.optimizers[optimizer]["param_groups"]
        return [name for group in groups for name in group["params"] if name in own]

    # ---- values ----

    def read(self, tensor: Tensor, name: str, key: str | None = None) -> None:
        """Read tensor ``name`` of the model, or its state ``key``, into ``tensor`` or its boxes. Doesn't communicate.

        Each byte is read once, straight into place, if the tensor has the memory order in which it was saved and is on
        the host.

        Raises:
            ValueError: a file is damaged.
            OSError: it can't be read.
        """
        like = self.model[name] if key is None else self.states[name][key]
        full, saved = name_of(("model", name) if key is None else (*_STATE, name, key)), like.stride()
        if isinstance(tensor, BoxedTensor):
            flat, start, strides = tensor.local, tensor.start, tensor.strides
        else:
            flat, start, strides = flat_in_memory_order(tensor, tensor), 0, tensor.stride()
        if _same_order(tensor.shape, strides, saved):
            self._read_range(full, flat, start, saved)
        elif flat.numel():  # it is read whole, and reordered
            whole = torch.empty_strided(tensor.shape, saved, dtype=flat.dtype, device="cpu")
            self._read_range(full, whole.as_strided((whole.numel(),), (1,)), 0, saved)
            like = torch.empty_strided(tensor.shape, strides, device="meta")
            flat.copy_(flat_in_memory_order(whole, like)[start : start + len(flat)])

    def _read_range(self, full: str, flat: Tensor, start: int, saved: Shape) -> None:
        """Fill 1-D ``flat`` with a tensor's elements from ``start`` on in memory order; ``ValueError`` if any lack."""
        described = self.metadata.state_dict_metadata[full]
        assert isinstance(described, TensorStorageMetadata), "others aren't among the model's tensors and the states"
        missing = len(flat)
        for chunk in described.chunks if missing else ():
            begin = sum(offset * stride for offset, stride in zip(chunk.offsets, saved, strict=True))
            first, last = max(start, begin), min(start + len(flat), begin + chunk.sizes.numel())
            if first < last:
                self._read_chunk(full, chunk, saved, first - begin, flat[first - start : last - start])
                missing -= last - first
        if missing:
            raise ValueError(f"{self.path}: damaged, {full} lacks {missing:,} elements: {TAKE_ANOTHER}")

    def _read_chunk(self, full: str, chunk: ChunkStorageMetadata, saved: Shape, first: int, flat: Tensor) -> None:
        """Fill ``flat`` with a chunk's elements from ``first`` on in memory order; ``ValueError`` if it is damaged."""
        ((_, strides),) = boxes_in_memory(chunk.sizes, saved, 0, chunk.sizes.numel())
        head = TensorBytes(flat.dtype, chunk.sizes, strides).head()
        place = self.metadata.storage_data[MetadataIndex(full, chunk.offsets)]
        name, offset = place.relative_path, place.offset
        host = flat if flat.device.type == "cpu" else torch.empty_like(flat, device="cpu")
        memory = memory_of(host)
        with (self.path / name).open("rb", buffering=0) as file:
            file.seek(offset)
            if file.read(len(head)) != head:
                raise ValueError(
                    f"{self.path}: {full} can't be read, {name} is damaged at byte {offset:,}, where a {flat.dtype} "
                    f"tensor was expected: {TAKE_ANOTHER}"
                )
            file.seek(first * flat.element_size(), 1)
            while memory:
                count = file.readinto(memory)
                if not count:
                    raise ValueError(f"{self.path}: {full} can't be read, {name} ends too early: {TAKE_ANOTHER}")
                memory = memory[count:]
        if host is not flat:
            flat.copy_(host)


def _like(entry: SavedTensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device="meta")


def _same_order(shape: Shape, one: Shape, other: Shape) -> bool:
    """Return whether two dense tensors of this shape have their elements in the same order in memory."""
    return not math.prod(shape) or all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))
