"""Leaving: a sharded checkpoint becomes model.safetensors and optimizer.pt, which load without this package."""

from __future__ import annotations

import importlib
import math
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from .folders import beside, publish
from .whole import StoredTensor, WholeCheckpoint

MODEL, OPTIMIZER = "model.safetensors", "optimizer.pt"
_SCRATCH = "scratch"
_MAPPED_FROM = 2**20  # bytes of a tensor that is read into a file, of which the system keeps in memory what fits


def consolidate(
    checkpoint: WholeCheckpoint, out: Path, *, force: bool = False, done: Callable[[int], object] = lambda count: None
) -> None:
    """Write ``checkpoint`` as ``out/model.safetensors`` and ``out/optimizer.pt``, in one process.

    The model's file has parameters and persistent buffers under all their names, tied ones under each, so that
    ``model.load_state_dict(safetensors.torch.load_file(...))`` finds what it expects (of a compiled model, what
    ``state_dict_for`` makes of it). The optimizer's file is a plain torch optimizer's state dict of whole tensors, as
    ``LowLevelZeroOptimizer.state_dict`` gives it; of several optimizers a list or a dict of them, as they were saved.
    Tensors are read into files beside ``out``, which are mapped, and go again: so it needs their size on the disk
    once more, and no more memory than there is.

    Experts of all ranks are in both files, if they have the names of one model; in the optimizer's groups they come
    between the shared parameters that they came between, those of the first ranks first.

    Args:
        force: replace an earlier ``out``, if it holds nothing but these two files.
        done: called with a number of bytes whenever so many more of ``bytes_to_do`` are done.

    Raises:
        ImportError: safetensors isn't installed.
        ValueError: the checkpoint is damaged, or has a dtype that safetensors doesn't have, or experts of the same
            name.
        FileExistsError: ``out`` exists.
        OSError: something can't be read or written. In every case ``out`` is what it was.
    """
    refuse_existing(out, force)
    _safetensors()
    checkpoint.check_one_model()
    checkpoint.check_files(done)
    out.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(8)
    written = beside(out, token)
    written.mkdir()
    try:
        files = ((MODEL, _model(checkpoint), _save_model), (OPTIMIZER, checkpoint.optimizers(), _save))
        for name, stored, save in files:
            (written / _SCRATCH).mkdir()
            save(_read(checkpoint, stored, written / _SCRATCH, done), written / name)
            _sync(written / name)
            shutil.rmtree(written / _SCRATCH)
        publish(written, out, token)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def bytes_to_do(checkpoint: WholeCheckpoint) -> int:
    """All that is read to check it, and all tensors that are written."""
    values = tree_iter([checkpoint.model(), checkpoint.optimizers()])
    written = sum(each.nbytes for each in values if isinstance(each, StoredTensor))
    return written + sum(file.bytes for file in checkpoint.manifest.files.values())


def refuse_existing(out: Path, force: bool) -> None:
    """Raise ``FileExistsError`` where ``out`` is taken: nothing that this module didn't write is ever replaced."""
    if not os.path.lexists(out):
        return
    if not force:
        raise FileExistsError(f"{out}: expected nothing there: name another directory, or use --force to replace it")
    held = [file.name for file in out.iterdir()] if out.is_dir() and not out.is_symlink() else [out.name]
    others = sorted({*held} - {MODEL, OPTIMIZER})
    if others:
        raise FileExistsError(
            f"{out}: expected a directory with {MODEL} and {OPTIMIZER} alone to replace, found {others[0]}: "
            "name another directory"
        )


def _model(checkpoint: WholeCheckpoint) -> dict[str, Any]:
    """Row-major: the format has no strides."""
    stored = {
        name: replace(each, stride=torch.empty(each.shape, device="meta").stride())
        for name, each in checkpoint.model().items()
    }
    return {**stored, **checkpoint.tensors_beside()}


def _read(checkpoint: WholeCheckpoint, value: Any, scratch: Path, done: Callable[[int], object]) -> Any:
    """``value`` with what is stored in it read, one tensor at a time."""

    def read(each: Any) -> Any:
        if not isinstance(each, StoredTensor):
            return each
        tensor = _room_for(each, scratch / str(secrets.randbits(62)))
        checkpoint.read_whole(each, tensor)
        done(each.nbytes)
        return tensor

    return tree_map(read, value)


def _room_for(stored: StoredTensor, file: Path) -> Tensor:
    numel = math.prod(stored.shape)
    if stored.nbytes < _MAPPED_FROM:
        flat = torch.empty(numel, dtype=stored.dtype, device="cpu")
    else:
        _reserve(file, stored.nbytes)
        flat = torch.from_file(str(file), shared=True, size=numel, dtype=stored.dtype)
    return flat.as_strided(stored.shape, stored.stride)


def _reserve(file: Path, size: int) -> None:
    """Make a file that the disk has room for: who writes into a mapped one can't be told that there is none."""
    with file.open("xb") as made:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(made.fileno(), 0, size)
        else:
            made.truncate(size)


def _safetensors() -> Any:
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise ImportError("consolidate writes a safetensors file: pip install safetensors") from error


def _save_model(tensors: dict[str, Tensor], path: Path) -> None:
    library = _safetensors()
    try:
        library.torch.save_file(tensors, path, metadata={"format": "pt"})
    except KeyError as error:
        raise ValueError(f"safetensors has no {error.args[0]}") from error
    except library.SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def _save(value: Any, path: Path) -> None:
    torch.save(value, path)


def _sync(path: Path) -> None:
    """Have a file written through to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
