"""Files that are never half there, and errors that every rank hears of."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoint.folders import sync_folder as sync
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
    """A path to write to instead of ``path``, of the same suffix, renamed to it when the body has ended.

    For one process. What a crash leaves beside has always the same name: the next save writes over it.
    """
    target = Path(path)
    beside = target.with_name(f".{target.stem}.writing{target.suffix}")
    try:
        yield str(beside)
        _replace(beside, target)
        sync(target.absolute().parent)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def folder_beside(path: str, index_name: str) -> Iterator[str]:
    """A directory to write shards and their index to, whose files move to the directory ``path`` at the end.

    For one process. Until the new index replaces the old one, in one rename, the old checkpoint is whole; from then
    on the new one is. So the new shards get names that the old index doesn't name. Shards that the new index
    doesn't name are removed, other files stay. What a crash leaves is removed by the next save.
    """
    with _beside(Path(path)) as beside:
        yield str(beside)
        _publish(beside, Path(path), index_name)


@contextmanager
def files_beside(path: str) -> Iterator[str]:
    """A directory to write files to, each of which replaces its namesake in the directory ``path`` at the end.

    For one process. None is ever half there; a crash may leave some of the old ones beside new ones.
    """
    with _beside(Path(path)) as beside:
        yield str(beside)
        for file in sorted(file for file in beside.rglob("*") if file.is_file()):
            target = Path(path) / file.relative_to(beside)
            target.parent.mkdir(parents=True, exist_ok=True)
            _replace(file, target)
            sync(target.absolute().parent)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """An empty directory beside ``target``, gone at the end."""
    beside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _publish(beside: Path, target: Path, index_name: str) -> None:
    target.mkdir(exist_ok=True)
    old = _shards(_read_index(target / index_name))
    index = _read_index(beside / index_name)
    names = _free_names(_shards(index), old)
    for place in sorted(beside.iterdir()):
        if place.name != index_name:
            _replace(place, target / names.get(place.name, place.name))
    (beside / index_name).write_text(json.dumps(_renamed(index, names), indent=2) + "\n", encoding="utf-8")
    sync(target)
    _replace(beside / index_name, target / index_name)
    sync(target)
    _remove_others(target, set(names.values()), old)


def _replace(source: Path, target: Path) -> None:
    """Rename a file that is on the disk by then."""
    sync(source)
    os.replace(source, target)


def _read_index(path: Path) -> dict[str, Any]:
    """A sharded checkpoint's index; an empty one where there is none, or half of one."""
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return index


def _shards(index: dict[str, Any]) -> set[str]:
    """The names of all files of a checkpoint."""
    groups = index.get("metadata", {}).get(_GROUPS)
    return {*index.get("weight_map", {}).values(), *([groups] if groups else [])}


def _free_names(shards: set[str], taken: set[str]) -> dict[str, str]:
    """For all ``shards`` their own names, or, where one is taken, all with one more number."""
    tags = itertools.chain([""], (f"-{number:05d}" for number in itertools.count(2)))
    tried = ({name: f"{Path(name).stem}{tag}{Path(name).suffix}" for name in shards} for tag in tags)
    return next(names for names in tried if taken.isdisjoint(names.values()))


def _renamed(index: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """``index`` with its files' names replaced."""
    metadata = {key: names[value] if key == _GROUPS else value for key, value in index["metadata"].items()}
    return {"metadata": metadata, "weight_map": {key: names[name] for key, name in index["weight_map"].items()}}


def _remove_others(folder: Path, kept: set[str], old: set[str]) -> None:
    """Remove the ``old`` shards but for those ``kept``, and what broken-off saves have left of such."""
    kinds = {_NUMBERS.sub("", name) for name in kept}
    for place in folder.iterdir():
        left = _NUMBERS.search(place.name) and _NUMBERS.sub("", place.name) in kinds
        if place.name not in kept and (left or place.name in old):
            place.unlink()
