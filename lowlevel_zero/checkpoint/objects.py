"""What isn't a tensor of the model or an optimizer: one file of data, which is never run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..state.sharded_dict import packed, unpacked
from .manifest import OBJECTS
from .optimizers import Name, called

Settings: TypeAlias = dict[str, Any]

_SETTINGS = {"param_groups", "loss_scale", "plan", "states", "scheduler"}


@dataclass(frozen=True)
class Objects:
    """What is saved beside tensors.

    Attributes:
        optimizers: of each its settings (see ``ShardedState``), its ``scheduler``'s state, and what its layout
            depends on: ``options``, ``stage`` and ``slices``. (In format 1 the only one's are on the first level.)
        model: extra states of modules, by name.
        extra: the caller's.
    """

    optimizers: dict[Name, Settings]
    model: dict[str, Any]
    extra: Any

    def packed(self) -> bytes:
        """The file's bytes.

        Raises:
            TypeError: a part that could not be read back, by its name.
        """
        try:
            return packed(vars(self), "the checkpoint's objects")
        except TypeError:
            for name, settings in self.optimizers.items():
                for key, value in settings.items():
                    packed(value, key if name is None else f"{key} of {called(name)}")
            packed(self.model, "extra states of the model")
            packed(self.extra, "extra")
            raise


def read_objects(folder: Path) -> Objects:
    """Those of the checkpoint ``folder``; nothing in them is run.

    Raises:
        ValueError: they are damaged, or something else.
        OSError: they can't be read.
    """
    path = folder / OBJECTS
    found = read_data(path)
    settings = found.get("optimizers", {None: found}) if isinstance(found, dict) else {}
    whole = all(isinstance(each, dict) and each.keys() >= _SETTINGS for each in settings.values())
    if not (settings and whole and found.keys() >= {"model", "extra"}):
        raise ValueError(f"{path}: expected {sorted(_SETTINGS)}, model and extra in it, got something else")
    return Objects(settings, found["model"], found["extra"])


def read_data(path: Path) -> Any:
    """What ``packed`` has made of it.

    Raises:
        ValueError: it is damaged, or more than data.
        OSError: it can't be read.
    """
    data = path.read_bytes()
    try:
        return unpacked(data)
    except Exception as error:  # a damaged or hostile pickle may raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"{path}: refused, it is damaged or not data alone: {reason:.300}") from error
