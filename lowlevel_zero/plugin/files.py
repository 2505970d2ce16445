"""Files that are never half there, and errors that every rank hears of."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..communication.collectives import ShardGroup
from ..construction import together


@contextmanager
def all_or_none(doing: str) -> Iterator[None]:
    """Every rank enters; if the body raises on one of them, all raise: their own error, or who could not do what.

    The body communicates on all ranks alike, whatever it raises, or not at all.
    """
    with together(ShardGroup(), doing):
        yield


def check_file_target(path: str) -> None:
    """Raise unless a file can be written at ``path``."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(
            f"{path}: expected the path of a file to write, got a directory: name a file in it, or pass shard=True"
        )
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path}: expected a path in an existing directory: create {target.parent} first")


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
def file_beside(path: str) -> Iterator[str]:
    """A path to write to instead of ``path``, of the same suffix, renamed to it when the body has ended."""
    target = Path(path)
    beside = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        yield str(beside)
        if beside.exists():
            os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def folder_beside(path: str, index_name: str) -> Iterator[str]:
    """A directory to write to instead of ``path``, whose files move there when the body has ended.

    The index goes first and comes last: a directory with an index is complete. Shards of an older checkpoint
    that the new one doesn't have are removed, other files stay.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        yield str(beside)
        _publish(beside, target, index_name)
    finally:
        shutil.rmtree(beside)


def _publish(beside: Path, target: Path, index_name: str) -> None:
    target.mkdir(exist_ok=True)
    old = target / index_name
    stale = set(json.loads(old.read_text())["weight_map"].values()) if old.exists() else set()
    old.unlink(missing_ok=True)
    new = sorted(path.name for path in beside.iterdir())
    for name in [*(name for name in new if name != index_name), index_name]:
        os.replace(beside / name, target / name)
    for name in stale - set(new):
        (target / name).unlink(missing_ok=True)
