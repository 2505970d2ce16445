"""A sharded checkpoint as one process sees it: the model's tensors by name, the optimizer's state dict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bookkeeping.module_names import matched, without_wrappers
from ..bookkeeping.sharding import SCALARS
from ..state.sharded import Stored
from ..state.whole import EXTRAS, FP8
from .manifest import TRAINABLE
from .objects import Settings
from .saved import SavedCheckpoint


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor that lies in files.

    Attributes:
        name: the model's.
        key: that of the state of it that it is, or nothing.
        stride: of the tensor that was saved.
    """

    name: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WholeCheckpoint(SavedCheckpoint):
    """One checkpoint, in tensors of the parameters' shapes, of which none is read before it is asked for.

    Raises:
        ValueError: ``path`` isn't a checkpoint, or not a whole one.
        OSError: it can't be read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.manifest.check_files(path, self.manifest.files, verify=False)
        # By name as it was saved, maybe with wrappers' attributes in it, the likeliest one of the model's own.
        self._own = matched(self.names, {without_wrappers(name) for name in self.names})

    def check_files(self, done: Callable[[int], object] = lambda count: None) -> None:
        """Read every file whole; ``ValueError`` if one isn't what was written.

        Args:
            done: called with the bytes of each file that is.
        """
        for name, file in self.manifest.files.items():
            self.manifest.check_files(self.path, [name])
            done(file.bytes)

    def check_one_model(self) -> None:
        """Raise ``ValueError`` unless its tensors have the names of one model that has them all."""
        for name, expert in self.manifest.experts.items():
            if name != expert.name:
                raise ValueError(
                    f"{self.path}: expected experts with the names of a model that has them all, but several groups of "
                    f"ranks have a {expert.name} of their own: give experts their numbers in the whole model, and save "
                    "anew"
                )

    def read_whole(self, stored: StoredTensor, into: Tensor) -> None:
        """Fill a dense tensor of its shape with what is stored.

        Raises:
            ValueError, OSError: it is damaged, or can't be read.
        """
        if stored.key:
            self.read({}, {stored.name: {stored.key: into}})
        else:
            self.read({stored.name: into}, {})

    def model(self) -> dict[str, StoredTensor]:
        """Parameters and persistent buffers by the model's own names, tied ones under each of theirs."""
        manifest = self.manifest
        names = {name: name for name in manifest.tensors}
        names |= {alias: name for alias, name in manifest.tied.items() if name in manifest.tensors}
        stored = {name: self._tensor(name, "", self.of_model(name)) for name in manifest.tensors}
        return {self._own[each]: stored[name] for each, name in names.items()}

    def tensors_beside(self) -> dict[str, Tensor]:
        """Extra states of modules that are tensors."""
        return {self._own[name]: value for name, value in self.objects.model.items() if isinstance(value, Tensor)}

    def not_tensors(self) -> list[str]:
        """Names in the model's state dict of what isn't a tensor: extra states of modules."""
        return [self._own[name] for name, value in self.objects.model.items() if not isinstance(value, Tensor)]

    def optimizers(self) -> Any:
        """Each optimizer's ``state_dict``, in a list or a dict as they were saved; the only one's itself."""
        found = {name: self._state_dict(settings) for name, settings in self.objects.optimizers.items()}
        if set(found) == {None}:
            return found[None]
        return list(found.values()) if all(isinstance(name, int) for name in found) else found

    def _state_dict(self, settings: Settings) -> dict[str, Any]:
        """``LowLevelZeroOptimizer.state_dict()``, with a ``StoredTensor`` for each tensor that is stored.

        Parameters are counted as the param groups have them, frozen ones included.
        """
        groups = settings["param_groups"]
        places = {name: place for place, name in enumerate(name for group in groups for name in group["params"])}
        states = {places[name]: self.state(name) for name in self.trained(settings)}
        return {
            "state": {place: state for place, state in states.items() if state},
            "param_groups": [{**group, "params": [places[name] for name in group["params"]]} for group in groups],
            EXTRAS: {
                "loss_scale": settings["loss_scale"],
                "plan": self._plan(settings),
                FP8: settings.get("options", {}).get("fp8_communication", False),
            },
        }

    def trained(self, settings: Settings) -> list[str]:
        """The parameters that an optimizer trains, in order of registration."""
        named = (name for group in settings["param_groups"] for name in group["params"])
        return [name for name in named if name in self.manifest.tensors and self._trains(name, settings)]

    def _trains(self, name: str, settings: Settings) -> bool:
        entry = self.manifest.tensors[name]
        return entry.kind == TRAINABLE and self.objects.optimizers[entry.optimizer] is settings

    def _plan(self, settings: Settings) -> dict[str, Any] | None:
        """The bucket plan, which counts trainable parameters alone; of experts' groups each has another."""
        plan = settings["plan"]
        if plan is None or self.manifest.experts:
            return None
        indices = {name: index for index, name in enumerate(self.trained(settings))}
        by_index = {key: [indices[name] for name in plan[key]] for key in ("order", "repeats")}
        return {**plan, **by_index}

    def state(self, name: str) -> dict[str, Any]:
        """A parameter's optimizer state: tensors that are stored, and plain values."""
        found = self.states.get(name, {})
        keys = sorted(found, key=lambda key: (key not in SCALARS, key))
        stored: dict[str, Any] = {key: self._tensor(name, key, found[key]) for key in keys}
        others = [settings["states"].get(name, {}) for settings in self.objects.optimizers.values()]
        return {**stored, **{key: value for other in others for key, value in other.items()}}

    def _tensor(self, name: str, key: str, stored: Stored) -> StoredTensor:
        """The model's ``name``, or its state ``key``."""
        entry = self.manifest.tensors[name]
        sliced = key not in SCALARS and stored.shape == entry.shape
        stride = entry.stride if sliced else torch.empty(stored.shape, device="meta").stride()
        return StoredTensor(name, key, stored.dtype, stored.shape, stride)
