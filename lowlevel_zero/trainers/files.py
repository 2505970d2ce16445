"""An optimizer in a trainer's checkpoint: a folder to which every rank writes its slices, or one file for all."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..checkpoint import Sharded
from ..optimizer import LowLevelZeroOptimizer


def save_sharded(optimizer: LowLevelZeroOptimizer, folder: Path) -> None:
    """Write ``folder``, or write it anew; it loads at any number of ranks. Every rank calls it."""
    ranks = optimizer.shard_group
    if ranks.group_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    ranks.all_reduce_max([0])  # it has gone
    save({"optimizer": Sharded(optimizer)}, checkpoint_id=folder)


def load_optimizer(optimizer: LowLevelZeroOptimizer, folder: Path, file: Path) -> None:
    """Load what ``save_sharded`` has written, or where it hasn't a plain optimizer's state dict; every rank calls it.

    Each rank reads what it has.
    """
    if folder.is_dir():
        load({"optimizer": Sharded(optimizer)}, checkpoint_id=folder)
    else:
        optimizer.load_state_dict(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
