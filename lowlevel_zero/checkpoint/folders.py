"""Where checkpoints are: found, put in place of a former one, and pruned, so that a crash leaves one whole."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .manifest import MANIFEST, METADATA, Manifest, whole_manifest

# What is being written, or was replaced, stands beside the checkpoint: step-100.0123456789abcdef.tmp
_ASIDE = re.compile(r"(?P<name>.+)\.[0-9a-f]{16}\.(?P<kind>tmp|old)")


class Found(NamedTuple):
    """A whole checkpoint."""

    path: Path
    manifest: Manifest


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint in ``directory``, or ``directory`` itself if it is one; None: there is none.

    Looks at manifests and file sizes alone. A checkpoint that a crash has left moved aside is found there.
    """
    folder = Path(directory)
    if whole_manifest(folder) is not None:
        return folder
    found = [*_whole_in(folder), *_whole_aside(folder.parent, folder.name)]
    return max(found, key=lambda each: each.manifest.serial).path if found else None


def locate(path: Path) -> Path:
    """Where the checkpoint ``path`` is: there, or, after a crash while it was replaced, aside.

    Raises:
        NotADirectoryError: it is a file.
        FileNotFoundError: there is nothing.
        ValueError: it is a directory, but not a checkpoint of this package.
    """
    if path.is_file():
        raise NotADirectoryError(f"{path}: expected a checkpoint, which is a directory, got a file")
    if (path / MANIFEST).exists():
        return path
    aside = _whole_aside(path.parent, path.name)
    if aside:
        return max(aside, key=lambda each: each.manifest.serial).path
    if path.is_dir():
        raise ValueError(f"{path}: {_instead(path)}")
    newest = latest(path.parent)
    told = "finds none either" if newest is None else f"finds {newest}"
    raise FileNotFoundError(f"{path}: expected a checkpoint, found nothing; latest({str(path.parent)!r}) {told}")


def check_target(path: Path) -> None:
    """Raise unless a checkpoint can be put at ``path``: where nothing is, or another checkpoint.

    Raises:
        NotADirectoryError: a file is there, or above it.
        FileExistsError: a directory with something else in it.
    """
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(f"{path}: expected a directory to write a checkpoint to, got a file: {place}")
    if path.is_dir() and not (path / MANIFEST).exists() and any(path.iterdir()):
        raise FileExistsError(
            f"{path}: expected nothing there, or a checkpoint to replace, got a directory with other files: "
            "name a directory in it"
        )


def beside(path: Path, token: str, kind: str = "tmp") -> Path:
    """Where ``path`` is written before it is whole, or where the one that it replaces goes."""
    return path.with_name(f"{path.name}.{token}.{kind}")


def publish(written: Path, path: Path, token: str) -> None:
    """Put the whole checkpoint ``written`` at ``path``; what was there goes once it is.

    Between the two renames the former one is to be found aside.
    """
    sync_folder(written)
    old = beside(path, token, "old")
    if path.exists():
        os.rename(path, old)
    try:
        os.rename(written, path)
    except OSError:
        if old.exists():
            os.rename(old, path)
        raise
    sync_folder(path.parent)
    for place in _aside(path.parent, path.name):
        shutil.rmtree(place, ignore_errors=True)


def prune(path: Path, keep: int) -> None:
    """Leave the ``keep`` newest whole checkpoints beside and including ``path``, and nothing of broken-off saves."""
    found = sorted(_whole_in(path.parent), key=lambda each: each.manifest.serial)
    kept = {each.path for each in found[-keep:]}
    for each in found[:-keep]:
        # Moved first: a crash in the midst of removing it must not leave half a checkpoint under its name.
        os.rename(each.path, beside(each.path, "0" * 16))
    for place in _aside(path.parent):
        if place not in kept:
            shutil.rmtree(place, ignore_errors=True)


def next_serial(path: Path) -> int:
    """A number above those of all checkpoints beside ``path``: the time, unless a clock was wrong."""
    return max([time.time_ns(), *(each.manifest.serial + 1 for each in _whole_in(path.parent))])


def sync_folder(folder: Path) -> None:
    """Have the names in ``folder`` written through to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _whole_in(folder: Path) -> Iterator[Found]:
    """The whole checkpoints among a directory's children, and those moved aside that nothing has replaced."""
    for place in _folders(folder):
        manifest = None if _ASIDE.fullmatch(place.name) else whole_manifest(place)
        if manifest is not None:
            yield Found(place, manifest)
    yield from _whole_aside(folder)


def _whole_aside(folder: Path, name: str | None = None) -> list[Found]:
    """Those (of the checkpoint ``name``) that a crash has left moved aside, with nothing in their place."""
    found = []
    for place in _aside(folder, name):
        match = _ASIDE.fullmatch(place.name)
        if match and match["kind"] == "old" and not (folder / match["name"] / MANIFEST).exists():
            manifest = whole_manifest(place)
            if manifest is not None:
                found.append(Found(place, manifest))
    return found


def _aside(folder: Path, name: str | None = None) -> list[Path]:
    """What stands beside checkpoints (beside the one called ``name``), whole or not."""
    matches = [(place, _ASIDE.fullmatch(place.name)) for place in _folders(folder)]
    return [place for place, match in matches if match and name in (None, match["name"])]


def _folders(folder: Path) -> list[Path]:
    return [place for place in sorted(folder.iterdir()) if place.is_dir()] if folder.is_dir() else []


def _instead(path: Path) -> str:
    """What a directory without a manifest is."""
    newest = latest(path)
    if newest is not None:
        return f"expected one checkpoint, got a directory of them: load {newest}, which latest() finds"
    if (path / METADATA).exists():
        return f"expected a checkpoint with a {MANIFEST}, got torch.distributed.checkpoint's own: use dcp.load"
    return f"expected a checkpoint of lowlevel_zero, with a {MANIFEST}, found none"
