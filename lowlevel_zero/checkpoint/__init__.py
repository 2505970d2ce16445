"""Checkpoints in files: sharded, atomic, for any number of ranks."""

from ..bookkeeping.module_names import state_dict_for
from .folders import latest
from .loading import load_checkpoint, read_rank_state
from .manifest import Manifest, read_manifest
from .metadata import read_metadata
from .saving import Saving, save_checkpoint

__all__ = [
    "Manifest",
    "Saving",
    "latest",
    "load_checkpoint",
    "read_manifest",
    "read_metadata",
    "read_rank_state",
    "save_checkpoint",
    "state_dict_for",
]
