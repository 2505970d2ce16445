"""Files that are never half there, and errors that every rank hears of."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoint.folders import sync
from ..communication.agreement import together
from ..communication.shard_group import ShardGroup

# The name, in an index's metadata, of the file of an optimizer's param groups.
_GROUPS = "param_groups"
# What tells shards of one checkpoint, and shards of two saves, apart: pytorch_optim-00001.bin
_NUMBERS = re.compile(r"(-\d{5})+(?=\.[^.]*$)")


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
    """A path to write to instead of ``path``, of the same name, put in its place when the body has ended."""
    with files_beside(path, into=Path(path).parent) as folder:
        yield os.path.join(folder, Path(path).name)


@contextmanager
def files_beside(path: str, last: str | None = None, into: Path | None = None) -> Iterator[str]:
    """A directory to write files to, each of which replaces its namesake in the directory ``path`` at the end.

    For one process. None is ever half there; a crash may leave some of the old ones beside new ones. An index of
    them is the ``last`` one: if it names files of new names, the old checkpoint is whole until the new one is. What a
    crash leaves beside has always the same name: the next save removes it. ``into``: where they go, if not to ``path``.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=into is None)
    try:
        yield str(beside)
        files = (file for file in beside.rglob("*") if file.is_file())
        for file in sorted(files, key=lambda file: (file.name == last, file)):
            place = (into or target) / file.relative_to(beside)
            place.parent.mkdir(parents=True, exist_ok=True)
            sync(file)
            os.replace(file, place)
            sync(place.absolute().parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


# ---- shards and their index ----


def shards_in(path: str, index_name: str) -> set[str]:
    """The names of a sharded checkpoint's files; none where there is no index, or half of one."""
    try:
        index: dict[str, Any] = json.loads(Path(path, index_name).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return set()
    groups = index.get("metadata", {}).get(_GROUPS)
    return {*index.get("weight_map", {}).values(), *([groups] if groups else [])}


def tagged(name: str, tag: str) -> str:
    """The name of a shard with one more number, ``tag``."""
    stem, suffix = os.path.splitext(name)
    return f"{stem}{tag}{suffix}"


def free_tag(names: Iterable[str], taken: set[str]) -> str:
    """A tag, or none, with which no one of ``names`` is ``taken``: by files that have all the other one."""
    return "" if taken.isdisjoint(names) else "-00002"


def remove_shards(path: str, kept: set[str], old: set[str]) -> None:
    """Remove the ``old`` shards but for those ``kept``, and what broken-off saves have left of such; no other file."""
    kinds = {_NUMBERS.sub("", name) for name in kept}
    for place in Path(path).iterdir():
        left = _NUMBERS.search(place.name) and _NUMBERS.sub("", place.name) in kinds
        if place.name not in kept and (left or place.name in old):
            place.unlink()
