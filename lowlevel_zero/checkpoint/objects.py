"""What isn't a tensor: pickles of data alone. Nothing in one is ever run, whoever has written it."""

from __future__ import annotations

import io
import pathlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata

from .manifest import METADATA, OBJECTS
from .optimizers import Name, called

Settings: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Objects:
    """What is saved beside tensors.

    Attributes:
        optimizers: of each its settings (see ``ShardedState``), its ``scheduler``'s state, and what its layout
            depends on: ``options``, ``stage`` and ``slices``.
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
    """Those of the checkpoint ``folder``, whose errors are ``read_data``'s."""
    found = read_data(folder / OBJECTS)
    return Objects(**found)


def packed(value: object, what: str) -> bytes:
    """``value`` as ``torch.save`` writes it.

    Raises:
        TypeError: ``torch.load(weights_only=True)`` would not take it back.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpacked(buffer.getvalue())
    except Exception as error:  # pickling calls whatever the object brings along
        reason = str(error).strip().splitlines() or [""]
        raise TypeError(
            f"{what}: expected what torch.load(weights_only=True) takes back (numbers, strings, tensors, lists, "
            f"dicts), got a {type(value).__name__} that it doesn't: {reason[0]:.300}"
        ) from error
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """The inverse of ``packed``."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


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


# All that torch.distributed.checkpoint writes of a state dict of tensors. None of them does anything when it is made.
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(("torch.distributed.checkpoint.metadata", f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
}


class _Unpickler(pickle.Unpickler):
    """Knows the classes of torch.distributed.checkpoint's ``.metadata`` and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name.removeprefix("Pure") in ("PosixPath", "WindowsPath"):
            # A checkpoint of another system has paths that can't be made here; nobody looks at them.
            return getattr(pathlib, "Pure" + name.removeprefix("Pure"))
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata does")


def read_metadata(folder: str | Path) -> Metadata:
    """``torch.distributed.checkpoint``'s metadata of the checkpoint ``folder``: its tensors' sizes and places.

    Raises:
        ValueError: damaged, or a pickle of something else, which has not been run.
        OSError: it can't be read.
    """
    path = Path(folder) / METADATA
    with path.open("rb") as file:
        try:
            metadata = _Unpickler(file).load()
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(f"{path}: damaged, or not a checkpoint's metadata: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path}: expected a checkpoint's metadata, got a {type(metadata).__name__}")
    return metadata
