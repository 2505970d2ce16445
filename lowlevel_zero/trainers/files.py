"""Optimizers in trainers' checkpoints: a folder to which every rank writes its slices, or one file for all.

Trainers write anew what they have written before. Other files, which their users keep there, stay.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..checkpoint import Sharded, read_manifest
from ..checkpoint.folders import finish_removal, on_first_rank, publish, remove
from ..checkpoint.manifest import MANIFEST, METADATA
from ..communication.agreement import Alike, together
from ..optimizer import LowLevelZeroOptimizer

_FOUND = Alike("the optimizer of the same checkpoint", "let all hosts see the files that were saved")


def save_sharded(optimizer: LowLevelZeroOptimizer, folder: Path, file: Path) -> None:
    """Write an optimizer's slices to ``folder``, replacing a former save there or to ``file``. Communicates.

    Else an unsharded run, or any run after a crash of this one, would load the former state.
    """
    on_first_rank(optimizer.shard_group, lambda: remove_sharded(folder, file))
    save({"optimizer": Sharded(optimizer)}, checkpoint_id=folder)


def load_optimizer(optimizer: LowLevelZeroOptimizer, folder: Path, file: Path) -> None:
    """Load an optimizer from a folder of ``save_sharded``, or else from a whole state dict's file. Communicates.

    Each rank reads its own slices. If a rank finds neither, or another one than the others do, all raise.
    """
    state = None
    with together(optimizer.shard_group, "load its optimizer", _FOUND) as lines:
        if not (folder / METADATA).is_file():
            if not file.is_file():
                raise FileNotFoundError(
                    f"{folder}: expected an optimizer's slices there, or a file {file.name} beside it, found neither: "
                    "load a checkpoint whose save was completed, from a file system that all hosts share"
                )
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        lines.append("a folder of slices" if state is None else "a whole state's file")
    if state is None:
        load({"optimizer": Sharded(optimizer)}, checkpoint_id=folder)
    else:
        optimizer.load_state_dict(state)


def remove_sharded(folder: Path, *files: Path) -> None:
    """Delete ``files``, and a former ``save_sharded``'s, metadata first, so that a crash leaves nothing that loads."""
    for file in (*files, folder / METADATA, *folder.glob("__*_*.distcp")):
        file.unlink(missing_ok=True)


def place_for(path: Path) -> Path:
    """Finish an interrupted replacement, and return ``path``, or ``<path>.new`` if a checkpoint or a link is there.

    The checkpoint beside, which an interrupted one has left, may be the only one. What a link points to stays as it is.

    Raises:
        FileExistsError: something else is in the former one's directory.
    """
    beside = path.with_name(f"{path.name}.new")
    if (path / MANIFEST).exists() and not path.is_symlink():  # a link as Lightning's last.ckpt, to the newest one
        others = {file.name for file in path.iterdir()} - {MANIFEST, *read_manifest(path).files}
        if others:
            raise FileExistsError(
                f"{path}: expected a checkpoint's files alone to replace, found {min(others)}: move it"
            )
    if (beside / MANIFEST).exists():  # a crash has left it; the former one may have gone, or begun to go, for it
        put_in_place(beside, path)
    return beside if (path / MANIFEST).exists() or path.is_symlink() else path


def put_in_place(written: Path, path: Path) -> None:
    """Replace the checkpoint or link ``path`` by the checkpoint ``written``, unless both are the same path."""
    if written == path:
        return
    if path.is_symlink():
        path.unlink()
    elif (path / MANIFEST).exists():
        remove(path)
    else:
        finish_removal(path)
    publish(written, path)
