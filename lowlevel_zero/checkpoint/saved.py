"""A checkpoint as it lies on the disk: all of it but the tensors' values, by the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from ..bookkeeping.module_names import matched, without_wrappers
from .manifest import METADATA, Manifest
from .metadata import read_metadata
from .objects import Objects, read_objects


@dataclass(frozen=True)
class Saved:
    """What was saved.

    Attributes:
        folder: where.
        metadata: torch.distributed.checkpoint's, of ``model.<name>`` and ``optimizer.<name>.<state>``.
    """

    folder: Path
    manifest: Manifest
    objects: Objects
    metadata: Metadata

    def matching(self, own: Collection[str]) -> Saved:
        """The same with a model's ``own`` names, where those it was saved with have wrappers' attributes in them."""
        names = matched(self._names(), own)
        renamed = any(name != found for name, found in names.items())
        return self._renamed(lambda name: names.get(name, name)) if renamed else self

    def without_wrappers(self) -> Saved:
        """The same with the likeliest names of its own, where there is no model."""
        return self.matching({without_wrappers(name) for name in self._names()})

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
    return Saved(folder, manifest, read_objects(folder), metadata)


def name_in(full: str) -> str:
    """The parameter or buffer that a tensor of a checkpoint belongs to."""
    kind, _, rest = full.partition(".")
    return rest if kind == "model" else rest.rpartition(".")[0]


def _renamed(metadata: Metadata, own: Callable[[str], str]) -> Metadata:
    def renamed(full: str) -> str:
        kind, _, rest = full.partition(".")
        name = name_in(full)
        return f"{kind}.{own(name)}{rest.removeprefix(name)}"

    tensors = {renamed(full): entry for full, entry in metadata.state_dict_metadata.items()}
    places = {replace(at, fqn=renamed(at.fqn)): info for at, info in (metadata.storage_data or {}).items()}
    return replace(metadata, state_dict_metadata=tensors, storage_data=places)
