"""Files that are replaced whole, and errors that are raised on every rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.folders import sync
from ..communication.agreement import together
from ..communication.shard_group import ShardGroup


@contextmanager
def all_or_none(doing: str) -> Iterator[None]:
    """Run the body on every rank; if it raises on one, all ranks raise. Communicates.

    The body communicates on all ranks alike, whatever it raises, or not at all.
    """
    with together(ShardGroup(), doing):
        yield


def check_file_target(path: str, use_safetensors: bool = False) -> None:
    """Raise unless a file can be written at ``path``, whose name ends in ``.safetensors`` if it is one."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(
            f"{path}: expected the path of a file to write, got a directory: name a file in it, or pass shard=True"
        )
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path}: expected a path in an existing directory: create {target.parent} first")
    if use_safetensors and target.suffix != ".safetensors":
        raise ValueError(
            f"{path}: expected a file name that ends in .safetensors, with use_safetensors=True or use_async=True, got "
            "another: name the file so"
        )


def check_folder_target(path: str, index_name: str) -> None:
    """Raise unless a sharded checkpoint with that index can be written into the directory ``path``."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(
            f"{path}: expected a directory for a sharded checkpoint, got a file: name another, or pass shard=False"
        )
    others = [index.name for index in target.glob("*.index.*json") if index.name != index_name]
    if others:
        raise FileExistsError(
            f"{path}: expected no other checkpoint there, found {others[0]}: name another directory for {index_name}"
        )


@contextmanager
def file_beside(path: str | Path) -> Iterator[str]:
    """Yield a path to write to in place of ``path``; at the end flush that file to disk, and rename it to ``path``.

    A save that breaks off leaves one file, which the next one replaces. For one process.
    """
    target = Path(path).absolute()
    beside = target.with_name(f".writing.{target.name}")
    try:
        yield str(beside)
        sync(beside)
        os.replace(beside, target)
        sync(target.parent)
    finally:
        beside.unlink(missing_ok=True)
