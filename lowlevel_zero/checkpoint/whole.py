"""A sharded checkpoint as one process sees it: the model's tensors by name, the optimizer's state dict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ..state import SCALARS
from ..state_methods import EXTRAS, FP8
from .loading import read_objects
from .manifest import METADATA, OBJECTS, read_manifest
from .reading import TensorReader
from .stored import StoredTensor


class WholeCheckpoint:
    """One checkpoint, in tensors of the parameters' shapes, of which none is read before it is asked for.

    Raises:
        ValueError: ``path`` isn't a checkpoint, or not a whole one.
        OSError: it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._refuse(self.manifest.first_missing(path) or self.manifest.first_damaged(path, [METADATA, OBJECTS]))
        self.objects = read_objects(path)
        self._tensors = TensorReader(path, self.manifest.files)

    def check_files(self, done: Callable[[int], object] = lambda count: None) -> None:
        """Read every file whole; ``ValueError`` if one isn't what was written.

        Args:
            done: called with the bytes of each file that is.
        """
        for name, file in self.manifest.files.items():
            self._refuse(self.manifest.first_damaged(self.path, [name]))
            done(file.bytes)

    def _refuse(self, wrong: str | None) -> None:
        if wrong is not None:
            raise ValueError(f"{self.path}: not a whole checkpoint: {wrong}")

    def check_one_model(self) -> None:
        """Raise ``ValueError`` unless its tensors have the names of one model that has them all."""
        for name, expert in self.manifest.experts.items():
            if name != expert.name:
                raise ValueError(
                    f"{self.path}: expected experts with the names of a model that has them all, but several groups of "
                    f"ranks have a {expert.name} of their own: give experts their numbers in the whole model, and save "
                    "anew"
                )

    def model(self) -> dict[str, StoredTensor]:
        """Parameters and persistent buffers, tied ones under each of their names; tensors among extra states too."""
        named = {name: self._shaped(name, f"model.{name}") for name in self.manifest.tensors}
        named |= {alias: named[name] for alias, name in self.manifest.tied.items()}
        return named | {name: StoredTensor.of(v) for name, v in self.objects["model"].items() if isinstance(v, Tensor)}

    def not_tensors(self) -> list[str]:
        """Names in the model's state dict of what isn't a tensor: extra states of modules."""
        return [name for name, value in self.objects["model"].items() if not isinstance(value, Tensor)]

    def optimizer(self) -> dict[str, Any]:
        """``LowLevelZeroOptimizer.state_dict()``, with a ``StoredTensor`` for each tensor that is stored.

        Parameters are counted as the param groups have them, frozen ones included.
        """
        groups = self.objects["param_groups"]
        places = {name: place for place, name in enumerate(name for group in groups for name in group["params"])}
        states = {place: self.state(name) for name, place in places.items()}
        return {
            "state": {place: state for place, state in states.items() if state},
            "param_groups": [{**group, "params": [places[name] for name in group["params"]]} for group in groups],
            EXTRAS: {
                "loss_scale": self.objects["loss_scale"],
                "plan": self._plan(list(places)),
                FP8: self.objects.get("options", {}).get("fp8_communication", True),
            },
        }

    def _plan(self, names: list[str]) -> dict[str, Any] | None:
        """The bucket plan, which counts trainable parameters alone; of experts' groups each has another."""
        plan = self.objects["plan"]
        if plan is None or self.manifest.experts:
            return None
        trainable = [name for name in names if self.manifest.tensors[name].kind == "trainable"]
        indices = {name: index for index, name in enumerate(trainable)}
        by_index = {key: [indices[name] for name in plan[key]] for key in ("order", "repeats")}
        return {**plan, **by_index}

    def state(self, name: str) -> dict[str, Any]:
        """A parameter's optimizer state: tensors that are stored, and plain values."""
        stored: dict[str, Any] = {key: self._state(name, key) for key in self.manifest.states.get(name, ())}
        return {**stored, **self.objects["states"].get(name, {})}

    def _state(self, name: str, key: str) -> StoredTensor:
        stored = self._tensors.tensor(f"optimizer.{name}.{key}")
        sliced = key not in SCALARS and stored.shape == (self.manifest.tensors[name].numel,)
        return self._shaped(name, f"optimizer.{name}.{key}") if sliced else stored

    def _shaped(self, name: str, key: str) -> StoredTensor:
        """What is stored flat, in memory order, in the parameter's shape and strides."""
        entry, flat = self.manifest.tensors[name], self._tensors.tensor(key)
        if flat.shape != (entry.numel,):
            raise ValueError(f"{self.path}: {key}: expected {entry.numel:,} elements, found {list(flat.shape)}")
        return StoredTensor(flat.dtype, entry.shape, entry.stride, flat.pieces)
