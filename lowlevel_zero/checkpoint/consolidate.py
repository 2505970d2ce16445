"""Leaving: a sharded checkpoint becomes model.safetensors and optimizer.pt, which load without this package."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from . import safetensors_file, torch_file
from .folders import beside, publish
from .stored import StoredTensor
from .whole import WholeCheckpoint

MODEL, OPTIMIZER = "model.safetensors", "optimizer.pt"


def consolidate(
    checkpoint: WholeCheckpoint, out: Path, *, force: bool = False, done: Callable[[int], object] = lambda count: None
) -> None:
    """Write ``checkpoint`` as ``out/model.safetensors`` and ``out/optimizer.pt``, in one process.

    The model's file has parameters and persistent buffers under all their names, tied ones under each, so that
    ``model.load_state_dict(safetensors.torch.load_file(...))`` finds what it expects (of a compiled model, what
    ``state_dict_for`` makes of it). The optimizer's file is a plain torch optimizer's state dict of whole tensors, as
    ``LowLevelZeroOptimizer.state_dict`` gives it; of several optimizers a list or a dict of them, as they were saved.
    One rank's piece of one tensor is in memory at a time, twice, and a whole one whose memory isn't row-major.

    Experts of all ranks are in both files, if they have the names of one model; in the optimizer's groups they come
    between the shared parameters that they came between, those of the first ranks first.

    Args:
        force: replace an earlier ``out``, if it holds nothing but these two files.
        done: called with a number of bytes whenever so many more of ``bytes_to_do`` are done.

    Raises:
        ValueError: the checkpoint is damaged, or has a dtype that the formats don't have, or experts of the same name.
        FileExistsError: ``out`` exists.
        OSError: something can't be read or written. In every case ``out`` is what it was.
    """
    refuse_existing(out, force)
    checkpoint.check_one_model()
    checkpoint.check_files(done)
    out.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(8)
    written = beside(out, token)
    written.mkdir()
    try:
        safetensors_file.save(checkpoint.model(), written / MODEL, done)
        torch_file.save(checkpoint.optimizers(), written / OPTIMIZER, done)
        publish(written, out, token)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def bytes_to_do(checkpoint: WholeCheckpoint) -> int:
    """All that is read to check it, and all tensors that are written."""
    states = map(checkpoint.state, checkpoint.manifest.tensors)
    stored = [value for state in states for value in state.values() if isinstance(value, StoredTensor)]
    written = sum(tensor.nbytes for tensor in [*checkpoint.model().values(), *stored])
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
