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


def load_sharded(optimizer: LowLevelZeroOptimizer, folder: Path) -> None:
    """Load what ``save_sharded`` has written; every rank calls it."""
    load({"optimizer": Sharded(optimizer)}, checkpoint_id=folder)


def load_whole(optimizer: LowLevelZeroOptimizer, file: Path) -> None:
    """Load a plain optimizer's state dict, of which each rank reads what it has; every rank calls it."""
    optimizer.load_state_dict(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
