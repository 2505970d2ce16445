"""A checkpoint as it lies on the disk, by the names that it was saved with: all of it but the tensors' values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..bookkeeping.sharding import SCALARS
from ..state.sharded import Stored
from . import format_1
from .manifest import METADATA, OBJECTS, Manifest, read_manifest
from .metadata import read_metadata
from .objects import Objects, read_objects
from .planners import LoadPlanner

# What a tensor of the model, and one of the optimizer's state, is called: model.<name>, optim.state.<name>.<key>. So
# are torch's own state dicts, put together as {"model": ..., "optim": ...}.
MODEL, STATE = "model.", "optim.state."


class SavedCheckpoint:
    """What was saved; nothing in it is run.

    Attributes:
        path: the folder.
        metadata: torch.distributed.checkpoint's.

    Raises:
        ValueError: it is damaged, or something else.
        OSError: it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self.manifest.check_files(path, [METADATA, OBJECTS])
        self.objects: Objects = read_objects(path)
        self.metadata: Metadata = read_metadata(path)
        for info in (self.metadata.storage_data or {}).values():
            if info.relative_path not in self.manifest.files:
                raise ValueError(f"{path / METADATA}: names {info.relative_path}, which isn't the checkpoint's")

    @property
    def names(self) -> list[str]:
        """All names in it that are the model's."""
        manifest = self.manifest
        return [*manifest.tensors, *manifest.excluded, *manifest.tied, *self.objects.model]

    @cached_property
    def states(self) -> dict[str, dict[str, Stored]]:
        """By parameter and key, the optimizers' states that are tensors."""
        found: dict[str, dict[str, Stored]] = {}
        prefix = STATE if self.manifest.format > 1 else format_1.STATE
        for full, described in self.metadata.state_dict_metadata.items():
            if full.startswith(prefix) and isinstance(described, TensorStorageMetadata):
                name, _, key = full.removeprefix(prefix).rpartition(".")
                found.setdefault(name, {})[key] = self._stored(described, name, key)
        return found

    def of_model(self, name: str) -> Stored:
        """A tensor of the model; ``ValueError`` unless it has the shape that the manifest tells."""
        described = self.metadata.state_dict_metadata.get(f"{MODEL}{name}")
        expected = self.manifest.tensors[name].shape
        if not isinstance(described, TensorStorageMetadata) or self._stored(described, name).shape != expected:
            raise ValueError(f"{self.path / METADATA}: damaged: expected {MODEL}{name} of {expected} in it")
        return self._stored(described, name)

    def _stored(self, described: TensorStorageMetadata, name: str, key: str = "") -> Stored:
        """The model's ``name``, or its state ``key``, by its own shape also where it lies flat, in format 1."""
        entry, shape = self.manifest.tensors.get(name), tuple(described.size)
        if self.manifest.format == 1 and entry is not None and key not in SCALARS and shape == (entry.numel,):
            shape = entry.shape
        return Stored(shape, described.properties.dtype)

    def read(self, model: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Fill tensors, or boxes of them, by this process alone; of the model's by name, of states by key too.

        Raises:
            ValueError: a file is damaged.
            OSError: it can't be read.
        """
        try:
            if self.manifest.format == 1:
                format_1.read_flat(self._read, self.manifest.tensors, model, states)
            else:
                self._read({"model": model, "optim": {"state": states}})
        except OSError:
            raise
        except Exception as error:  # of whatever kind torch's reader raises for bytes that are no tensor's
            names = ", ".join([*model, *states][:3])
            raise ValueError(f"{self.path}: {names}, ... can't be read: {error!r}") from error

    def _read(self, into: dict[str, Any]) -> None:
        planner, reader = LoadPlanner(), FileSystemReader(self.path)
        planner.set_up_planner(into, self.metadata, is_coordinator=False)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        reader.read_data(planner.create_local_plan(), planner).wait()
