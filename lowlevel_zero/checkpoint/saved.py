"""A checkpoint as it lies on the disk: all of it but the tensors' values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ..bookkeeping.sharding import SCALARS
from .manifest import METADATA, OBJECTS, TRAINABLE, Manifest, SavedTensor, read_manifest
from .objects import Objects, Settings, read_metadata, read_objects

# What a tensor of the model, and one of the optimizer's state, is called: model.<name>, optim.state.<name>.<key>. So
# are torch's own state dicts, put together as {"model": ..., "optim": ...}.
MODEL, STATE = "model.", "optim.state."


class _TensorPlanner(DefaultLoadPlanner):
    """Loads tensors alone: torch's own unpickles all else, whatever it is."""

    def create_local_plan(self) -> LoadPlan:
        """Plan to read what is asked for; torch's own looks at all names of the checkpoint first."""
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise ValueError(f"{read_item.dest_index.fqn}: expected a tensor, got a pickle")


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

    @cached_property
    def model(self) -> dict[str, Tensor]:
        """The model's tensors without their values, on the meta device, in the memory order of what was saved."""
        return {name: _like(entry, entry.torch_dtype) for name, entry in self.manifest.tensors.items()}

    @cached_property
    def states(self) -> dict[str, dict[str, Tensor]]:
        """By parameter and key, first the step, the optimizers' states that are tensors, without their values."""
        found: dict[str, dict[str, Tensor]] = {}
        for full, described in self.metadata.state_dict_metadata.items():
            if full.startswith(STATE) and isinstance(described, TensorStorageMetadata):
                name, _, key = full.removeprefix(STATE).rpartition(".")
                found.setdefault(name, {})[key] = self._state(described, name, key)
        order = {name: sorted(state, key=lambda key: (key not in SCALARS, key)) for name, state in found.items()}
        return {name: {key: state[key] for key in order[name]} for name, state in found.items()}

    def _state(self, described: TensorStorageMetadata, name: str, key: str) -> Tensor:
        """Return a state without its values, in the parameter's memory order where it has its shape."""
        entry, size, dtype = self.manifest.tensors.get(name), tuple(described.size), described.properties.dtype
        if entry is None or key in SCALARS or size != entry.shape:
            return torch.empty(size, dtype=dtype, device="meta")
        return _like(entry, dtype)

    def trained(self, settings: Settings) -> list[str]:
        """The parameters that the optimizer of these settings trains, in order of registration."""
        named = (name for group in settings["param_groups"] for name in group["params"])
        entries = ((name, self.manifest.tensors.get(name)) for name in named)
        return [
            name
            for name, entry in entries
            if entry is not None and entry.kind == TRAINABLE and self.objects.optimizers[entry.optimizer] is settings
        ]

    def read(self, model: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Fill tensors, or boxes of them, by this process alone; of the model's by name, of states by key too.

        Raises:
            ValueError: a file is damaged.
            OSError: it can't be read.
        """
        planner, reader = _TensorPlanner(), FileSystemReader(self.path)
        try:
            planner.set_up_planner({"model": model, "optim": {"state": states}}, self.metadata, is_coordinator=False)
            reader.set_up_storage_reader(self.metadata, is_coordinator=False)
            reader.read_data(planner.create_local_plan(), planner).wait()
        except OSError:
            raise
        except Exception as error:  # of whatever kind torch's reader raises for bytes that are no tensor's
            names = ", ".join([*model, *states][:3])
            raise ValueError(f"{self.path}: {names}, ... can't be read: {error!r}") from error


def _like(entry: SavedTensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device="meta")
