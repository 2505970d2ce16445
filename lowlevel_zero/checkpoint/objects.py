"""The values of a checkpoint that are no tensors: pickles of data alone. Nothing in one is ever run.

They are one file. Settings of param groups, states that are numbers and extra states of modules are there once more
under names by which ``torch.distributed.checkpoint`` finds them, behind the first rank's tensors.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils._pytree import keystr, tree_leaves_with_path

from .manifest import METADATA, TAKE_ANOTHER
from .optimizers import Name, called
from .plan import Keys, name_of

Settings: TypeAlias = dict[str, Any]
Extra: TypeAlias = Any  # whatever the caller has given to be saved, as it comes back


@dataclass(frozen=True)
class Objects:
    """The values of a checkpoint that are no tensors of parameters, buffers or states.

    Attributes:
        optimizers: each optimizer's settings (see ``ShardedState``), its ``scheduler``'s state, and the options that
            its layout depends on: ``options``, ``stage`` and ``slices``.
        model: extra states of modules, by name.
        extra: the caller's ``extra``.
    """

    optimizers: dict[Name, Settings]
    model: dict[str, Any]
    extra: Any

    def by_keys(self) -> dict[Keys, object]:
        """Return extra states, states and all param groups as one list, flattened by the keys of torch's tools."""
        found: dict[Keys, object] = {("model", name): value for name, value in self.model.items()}
        groups = [group for settings in self.optimizers.values() for group in settings["param_groups"]]
        states = {name: own for each in self.optimizers.values() for name, own in each["states"].items()}
        found |= {("optim", "state", name, key): value for name, own in states.items() for key, value in own.items()}
        for at, group in enumerate(groups):
            found |= {("optim", "param_groups", at, key): value for key, value in group.items()}
        return {keys: each for path, value in found.items() for keys, each in _leaves(path, value)}

    def to_bytes(self) -> bytes:
        """Return the content of the file, after a check that all values can be read back.

        Raises:
            TypeError: ``torch.load(weights_only=True)`` could not read a part, which is named.
            ValueError: two values have one name.
        """
        names = Counter(map(name_of, self.by_keys()))
        if (twice := next((name for name, count in names.items() if count > 1), None)) is not None:
            raise ValueError(
                f"{twice}: expected one value of this name, got two, as of {{'a.b': 1, 'a': {{'b': 2}}}}: rename one"
            )
        try:
            return packed(vars(self), "the checkpoint's objects")
        except TypeError:
            for name, settings in self.optimizers.items():
                for key, value in settings.items():
                    packed(value, key if name is None else f"{key} of {called(name)}")
            packed(self.model, "extra states of the model")
            packed(self.extra, "extra")
            raise


def _leaves(keys: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    """Yield each leaf with its keys; dicts with text keys, and lists of tensors, dicts or lists, are gone through."""
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for key, each in value.items():
            yield from _leaves((*keys, key), each)
    elif isinstance(value, list) and any(isinstance(each, (Mapping, list, Tensor)) for each in value):
        for at, each in enumerate(value):
            yield from _leaves((*keys, at), each)
    else:
        yield keys, value


def packed(value: object, what: str) -> bytes:
    """Return ``value`` as ``torch.save`` writes it; ``TypeError`` if ``torch.load(weights_only=True)`` refuses it."""
    try:
        content = saved_bytes(value)
        unpacked(content)
        return content
    except Exception as error:  # pickling calls whatever the object brings along
        for place, part in tree_leaves_with_path(value):
            if place:
                packed(part, f"{what}{keystr(place)}")  # raises for the first part that isn't taken back
        raise TypeError(
            f"{what}: expected what torch.load(weights_only=True) takes back (numbers, strings, tensors, lists, "
            f"dicts), got a {type(value).__module__}.{type(value).__qualname__}: convert it to one of them"
        ) from error


def saved_bytes(value: object) -> bytes:
    """Return ``value`` as the bytes that ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes | memoryview) -> Settings:
    """Return the value that ``packed`` has turned into ``data``. Nothing in ``data`` is run."""
    value: Settings = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return value


def read_data(path: Path) -> Settings:
    """Read a pickle that may hold data alone, no code or classes, and return its value.

    Raises:
        ValueError: the file is damaged, or more than data.
        OSError: it can't be read.
    """
    data = path.read_bytes()
    try:
        return unpacked(data)
    except Exception as error:  # a damaged or hostile pickle may raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"{path}: refused, it is damaged or not data alone: {reason:.300}") from error


# All classes of torch.distributed.checkpoint's ``.metadata``. None of them does anything when it is made.
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(("torch.distributed.checkpoint.metadata", f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes of torch.distributed.checkpoint's ``.metadata``."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that a checkpoint's metadata may name; raise ``UnpicklingError`` for any other."""
        if module in ("pathlib", "pathlib._local") and name.removeprefix("Pure") in ("PosixPath", "WindowsPath"):
            # A checkpoint of another system may hold paths that can't be made here; they aren't used.
            return getattr(pathlib, "Pure" + name.removeprefix("Pure"))
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata does")


def read_metadata(folder: str | Path) -> Metadata:
    """Read ``torch.distributed.checkpoint``'s metadata of the checkpoint ``folder``: its tensors' sizes and places.

    Raises:
        ValueError: the file is damaged, or a pickle of something else, which has not been run.
        OSError: it can't be read.
    """
    path = Path(folder) / METADATA
    with path.open("rb") as file:
        try:
            metadata = _Unpickler(file).load()
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(f"{path}: damaged, or not a checkpoint's metadata ({error}): {TAKE_ANOTHER}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path}: expected a checkpoint's metadata, got a {type(metadata).__name__}: {TAKE_ANOTHER}")
    return metadata
