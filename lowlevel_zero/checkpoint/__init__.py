"""Checkpoints in files: sharded, atomic, for any number of ranks."""

from .manifest import Manifest, read_manifest
from .metadata import read_metadata

__all__ = ["Manifest", "read_manifest", "read_metadata"]
