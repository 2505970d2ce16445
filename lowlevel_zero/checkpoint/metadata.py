"""Reading torch.distributed.checkpoint's ``.metadata``, a pickle, without running what is in it."""

from __future__ import annotations

import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from .manifest import METADATA

# All that torch.distributed.checkpoint writes of a state dict of tensors. None of them does anything when it is made.
_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class _Unpickler(pickle.Unpickler):
    """Knows the classes of a checkpoint's metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            # A checkpoint of another system has paths that can't be made here; nobody looks at them.
            return getattr(pathlib, "Pure" + name.removeprefix("Pure"))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _ALLOWED.get(module, ()):
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
