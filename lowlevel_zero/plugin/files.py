"""Files that are replaced whole, and errors that are raised on every rank."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoint.folders import sync
from ..communication.agreement import together
from ..communication.shard_group import ShardGroup

# The key of the file of an optimizer's param groups in an index's metadata.
_GROUPS = "param_groups"


@contextmanager
def all_or_none(doing: str) -> Iterator[None]:
    """Run the body on every rank; if it raises on one, all ranks raise. Communicates.

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
    """Yield a path to write to instead of ``path``; at the end its file replaces ``path``."""
    with files_beside(path, into=Path(path).parent) as folder:
        yield os.path.join(folder, Path(path).name)


@contextmanager
def files_beside(path: str, last: str | None = None, into: Path | None = None) -> Iterator[str]:
    """Yield a directory to write files to; at the end they replace the files of the same names in ``path``.

    No file is ever half there. The index of a sharded checkpoint, ``last``, goes before the first of its files is
    replaced, and comes back last: a crash meanwhile leaves no index, and nothing loads. Former files that the new
    index doesn't name are removed. A save that breaks off leaves one directory, which the next one removes. For one
    process.

    Args:
        path: the directory.
        last: the name of the index; None: there is none.
        into: the directory to put the files into, if it isn't ``path``.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=into is None)
    try:
        yield str(beside)
        former = set() if last is None else shards_in(target, last)
        if last is not None and (target / last).exists():
            (target / last).unlink()
            sync(target.absolute())
        files = (file for file in beside.rglob("*") if file.is_file())
        for file in sorted(files, key=lambda file: (file.name == last, file)):
            place = (into or target) / file.relative_to(beside)
            place.parent.mkdir(parents=True, exist_ok=True)
            sync(file)
            os.replace(file, place)
            sync(place.absolute().parent)
        for name in former - (set() if last is None else shards_in(target, last)):
            (target / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def shards_in(path: Path, index_name: str) -> set[str]:
    """Return the names of the files that a sharded checkpoint's index lists; none if it can't be read."""
    try:
        index: dict[str, Any] = json.loads((path / index_name).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return set()
    groups = index.get("metadata", {}).get(_GROUPS)
    return {*index.get("weight_map", {}).values(), *([groups] if groups else [])}
