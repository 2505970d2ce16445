"""A checkpoint as it lies on the disk: all of it but the tensors' values, by the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..bookkeeping.module_names import matched, without_wrappers
from ..bookkeeping.sharding import SCALARS
from .format_1 import Reader1, in_boxes
from .manifest import METADATA, Manifest
from .metadata import read_metadata
from .objects import Objects, read_objects

# What a tensor of the model, and one of the optimizer's state, is called: model.<name>, optim.state.<name>.<key>. So
# are torch's own state dicts, put together as {"model": ..., "optim": ...}.
MODEL, STATE = "model.", "optim.state."


@dataclass(frozen=True)
class Saved:
    """What was saved.

    Attributes:
        folder: where.
        metadata: torch.distributed.checkpoint's.
        reader: opens the folder with it.
    """

    folder: Path
    manifest: Manifest
    objects: Objects
    metadata: Metadata
    opened_by: Callable[[Path, Metadata], FileSystemReader]

    def matching(self, own: Collection[str]) -> Saved:
        """The same with a model's ``own`` names, where those it was saved with have wrappers' attributes in them."""
        names = matched(self._names(), own)
        renamed = any(name != found for name, found in names.items())
        return self._renamed(lambda name: names.get(name, name)) if renamed else self

    def without_wrappers(self) -> Saved:
        """The same with the likeliest names of its own, where there is no model."""
        return self.matching({without_wrappers(name) for name in self._names()})

    @cached_property
    def states(self) -> dict[str, list[str]]:
        """By parameter the keys of its states that are tensors."""
        found: dict[str, list[str]] = {}
        for full, described in self.metadata.state_dict_metadata.items():
            if full.startswith(STATE) and isinstance(described, TensorStorageMetadata):
                found.setdefault(name_in(full), []).append(full.rpartition(".")[2])
        return {name: sorted(keys, key=lambda key: (key not in SCALARS, key)) for name, keys in found.items()}

    def reader(self) -> FileSystemReader:
        """Reads its tensors."""
        return self.opened_by(self.folder, self.metadata)

    def _names(self) -> list[str]:
        manifest = self.manifest
        return [*manifest.tensors, *manifest.excluded, *manifest.tied, *self.objects.model]

    def _renamed(self, own: Callable[[str], str]) -> Saved:
        return replace(
            self,
            manifest=self.manifest.renamed(own),
            objects=self.objects.renamed(own),
            metadata=_renamed(self.metadata, own),
        )


class PlainReader(FileSystemReader):
    """Reads with metadata that was read, and checked, before.

    Args:
        folder: the checkpoint.
        metadata: its metadata.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return self._metadata


def read_saved(folder: Path, manifest: Manifest) -> Saved:
    """The checkpoint ``folder``; nothing in it is run.

    Raises:
        ValueError: it is damaged, or something else.
        OSError: it can't be read.
    """
    metadata = read_metadata(folder)
    for info in (metadata.storage_data or {}).values():
        if info.relative_path not in manifest.files:
            raise ValueError(f"{folder / METADATA}: names {info.relative_path}, which isn't the checkpoint's")
    if manifest.format == 1:
        return Saved(folder, manifest, read_objects(folder), in_boxes(metadata, manifest), Reader1)
    return Saved(folder, manifest, read_objects(folder), metadata, PlainReader)


def name_in(full: str) -> str:
    """The parameter or buffer that a tensor of a checkpoint belongs to."""
    if full.startswith(STATE):
        return full.removeprefix(STATE).rpartition(".")[0]
    return full.removeprefix(MODEL)


def _renamed(metadata: Metadata, own: Callable[[str], str]) -> Metadata:
    def renamed(full: str) -> str:
        name = name_in(full)
        prefix = next((prefix for prefix in (STATE, MODEL) if full.startswith(prefix)), None)
        return full if prefix is None else f"{prefix}{own(name)}{full.removeprefix(prefix).removeprefix(name)}"

    tensors = {renamed(full): entry for full, entry in metadata.state_dict_metadata.items()}
    places = {replace(at, fqn=renamed(at.fqn)): info for at, info in (metadata.storage_data or {}).items()}
    return replace(metadata, state_dict_metadata=tensors, storage_data=places)
