"""Checkpoint folders: finding, publishing and pruning them, so that a crash leaves each of them whole or gone.

A save writes to a directory beside its target and renames that at the end, to where nothing is. Pruning removes the
files that a checkpoint's manifest lists, and no others. So what users keep there, links included, stays as it is.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..communication.agreement import agree
from ..communication.shard_group import ShardGroup
from ..diagnostics.stall_report import watch
from .manifest import MANIFEST, METADATA, OBJECTS, Head, manifest_in, read_head, read_manifest

try:
    import fcntl
except ImportError:  # Windows, where files have no such locks
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

_log = logging.getLogger("lowlevel_zero")

# A checkpoint is written beside its place: step-100.0123456789abcdef.tmp, with files of these names.
_BESIDE = re.compile(r".+\.[0-9a-f]{16}\.tmp", re.DOTALL)
_OWN_FILES = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|objects\.pt|rank_\d+\.pt|lowlevel_zero\.json")
# Where a checkpoint's manifest goes, beside the checkpoint, while its files are removed.
_REMOVED = ".lowlevel_zero.removed"
# How file systems refuse to sync a directory that they can't sync.
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM}


class NotSynced(OSError):
    """A checkpoint is in its place, but the disk may not know it yet."""


class Found(NamedTuple):
    """A directory that is a checkpoint, or was one; ``damage`` tells why there is no ``head`` of its manifest."""

    path: Path
    head: Head | None
    damage: str = ""


def latest(directory: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None) -> Path | None:
    """Return ``directory`` if it is a whole checkpoint, else its newest whole one, or None. Communicates if ``group``.

    Looks at manifests and file sizes alone, and not at symbolic links. Warns of a newer one that is damaged.

    Args:
        group: ranks that all call this. The first one looks and tells the others, so that they go on alike even while
            checkpoints come and go. None: the caller looks by itself.

    Raises:
        RuntimeError: another rank of ``group`` makes another call.
        OSError, TypeError: the first rank can't look there; all ranks raise.
    """
    if group is not None:
        ranks = ShardGroup(group)
        watch(ranks)
        agree(ranks, None, None, "look for the newest checkpoint")
        return on_first_rank(ranks, lambda: latest(directory))
    folder = Path(directory)
    newest, damaged = None, []
    for path, damage in chain(_newest_first(_found_at([str(folder)])), _newest_first(_found_in(folder))):
        if not damage:
            newest = path
            break
        damaged.append(damage)
    instead = "no whole checkpoint was found" if newest is None else f"the newest whole one is {newest}"
    for damage in damaged:
        _log.warning("%s; %s", damage, instead)
    return newest


def _newest_first(found: Iterable[Found]) -> Iterator[tuple[Path, str]]:
    """Yield paths with their damage in words, or empty: those without a readable manifest, then newest first."""
    for path, head, damage in sorted(found, key=lambda each: each.head.serial if each.head else math.inf, reverse=True):
        if head is not None:
            try:
                read_manifest(path).check_files(path, verify=False)
            except (ValueError, OSError) as error:
                damage = str(error)
        yield path, damage


def on_first_rank(group: ShardGroup, look: Callable[[], T]) -> T:
    """Call ``look`` on the first rank, and return its result on all, or raise its error on all. Communicates."""
    seen: Any = None
    if group.group_rank == 0:
        try:
            seen = look()
        except (OSError, ValueError, TypeError) as error:
            seen = error
        except Exception as error:  # of whatever type, which might not travel: the others wait
            seen = RuntimeError(f"{type(error).__name__}: {error}")
    answer: T | Exception = group.all_gather_object(seen)[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


def locate(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint, else the newest checkpoint in that directory.

    Raises:
        NotADirectoryError: it is a file.
        FileNotFoundError: there is nothing.
        ValueError: it is a directory, but not a checkpoint of this package.
    """
    if path.is_file():
        raise NotADirectoryError(f"{path}: expected a checkpoint, which is a directory, got a file: name the directory")
    if (path / MANIFEST).exists():
        return path
    newest = latest(path)
    if newest is not None:
        return newest
    if path.is_dir():
        dcp = "torch.distributed.checkpoint's own: use dcp.load, with Sharded(optimizer)"
        got = dcp if (path / METADATA).exists() else "none"
        raise ValueError(f"{path}: expected a checkpoint of lowlevel_zero, with a {MANIFEST}, got {got}: name one")
    newest = latest(path.parent)
    remedy = "finds none either" if newest is None else f"finds {newest}"
    raise FileNotFoundError(f"{path}: expected a checkpoint, found nothing; latest({str(path.parent)!r}) {remedy}")


def check_target(path: Path) -> None:
    """Raise unless ``path`` is free for a checkpoint: nothing is there, or an empty directory.

    Raises:
        NotADirectoryError: a file is there, or above it.
        FileExistsError: a checkpoint, a symbolic link, or a directory with files in it.
    """
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(f"{path}: expected a directory to write a checkpoint to, got a file: {place}")
    if path.is_symlink() or (path.is_dir() and any(path.iterdir())):
        there = "a symbolic link" if path.is_symlink() else "a directory with files in it"
        got = "a checkpoint" if (path / MANIFEST).exists() and not path.is_symlink() else there
        raise FileExistsError(
            f"{path}: expected nothing there, or an empty directory, got {got}, which a save never replaces: give each "
            "checkpoint a name of its own, as in run/step-100, and pass keep=1 to keep only the newest; or remove "
            "what is there first"
        )


def publish(written: Path, path: Path) -> None:
    """Sync the directory ``written``, rename it to ``path`` (missing, or an empty directory), and sync the parent.

    Raises:
        FileExistsError, NotADirectoryError: something is there.
        NotSynced: it is at ``path``, but the directory above could not be synced.
    """
    sync(written)
    try:
        os.rename(written, path)
    except OSError:
        check_target(path)  # something has come there since the save began
        raise
    try:
        sync(path.parent)
    except OSError as error:
        raise NotSynced(error.errno, f"{error.strerror}: the directory {path.parent} could not be synced") from error


def prune(path: Path, keep: int, runs: Collection[str]) -> None:
    """Remove the whole checkpoints beside ``path`` that one of ``runs`` has saved, but for the ``keep`` newest.

    Warns of what can't be removed, and goes on with the others.
    """
    with _warning_of_what_stays():
        own = [each for each in _found_in(path.parent) if each.head is not None and set(each.head.runs[:1]) & set(runs)]
        whole = (path for path, damage in _newest_first(own) if not damage) if len(own) > keep else iter(())
        for older in islice(whole, keep, None):
            with _warning_of_what_stays():
                remove(older)


def remove(path: Path) -> None:
    """Remove the files of the checkpoint ``path``, and the directory unless something else is in it.

    The manifest is moved away first, and removed last: after a crash it is no checkpoint, and pruning goes on there.
    """
    os.rename(path / MANIFEST, path.with_name(path.name + _REMOVED))
    finish_removal(path)


def finish_removal(path: Path) -> None:
    """Finish a begun removal of the checkpoint ``path``, if any: delete listed files of unchanged size."""
    removed = path.with_name(path.name + _REMOVED)
    if not removed.exists():
        return
    if not (path / MANIFEST).exists():  # else another one has been put there since
        for name, known in manifest_in(removed).files.items():
            with suppress(FileNotFoundError, NotADirectoryError):
                if (path / name).stat().st_size == known.bytes:  # else something else has been put there since
                    (path / name).unlink()
        with suppress(OSError):  # it holds something else
            path.rmdir()
    removed.unlink(missing_ok=True)


def claim(written: Path, name: str) -> IO[bytes]:
    """Create, lock and return this rank's file ``name`` in the folder ``written``, which stays till that is closed.

    The system lets go of it when the process ends, however it does.
    """
    while True:
        written.mkdir(parents=True, exist_ok=True)  # another rank may be here already
        with suppress(FileNotFoundError):  # the folder was taken for remains while it was empty
            file = (written / name).open("xb")
            if fcntl is not None:
                with suppress(OSError):  # its file system has no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            if (written / name).exists():
                return file
            file.close()


def clear_remains(written: Path) -> None:
    """Remove the remains of interrupted saves and removals beside ``written``; spare running saves; warn of errors."""
    beside = os.listdir(written.parent)
    for path in (written.with_name(name) for name in beside if name.endswith(_REMOVED) or _BESIDE.fullmatch(name)):
        with _warning_of_what_stays(), suppress(FileNotFoundError):  # a pruning thread is at it, too
            if path.name.endswith(_REMOVED):
                finish_removal(path.with_name(path.name.removesuffix(_REMOVED)))
            elif path != written and _is_abandoned(path):
                shutil.rmtree(path)


def sync(path: Path) -> None:
    """Write a file, or a directory's names, through to the disk, unless it is a directory that can't be synced."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC or not path.is_dir():
            raise


# ---- the contents of a directory ----


def _found_in(folder: Path) -> Iterator[Found]:
    """Yield the checkpoints in ``folder``, damaged ones included. Symbolic links are skipped."""
    if folder.is_dir():
        with os.scandir(folder) as entries:
            names = sorted(each.path for each in entries if not (each.is_symlink() or _BESIDE.fullmatch(each.name)))
        yield from _found_at(names)


def _found_at(places: Iterable[str]) -> Iterator[Found]:
    """Yield each of ``places`` that is a checkpoint, with its manifest's head, or with its damage in words."""
    for path in map(Path, places):
        try:
            yield Found(path, read_head(path))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            if os.path.exists(path / OBJECTS) and not path.with_name(path.name + _REMOVED).exists():
                yield Found(path, None, f"{path}: expected a checkpoint with a {MANIFEST}, found none to read")
        except (ValueError, OSError) as error:
            yield Found(path, None, str(error))


@contextmanager
def _warning_of_what_stays() -> Iterator[None]:
    """Log the body's ``OSError`` or ``ValueError`` as a warning, and raise nothing: a checkpoint was saved anyway."""
    try:
        yield
    except (OSError, ValueError) as error:
        _log.warning("keep: an older checkpoint, or what a crash has left of one, could not be removed: %s", error)


def _is_abandoned(written: Path) -> bool:
    """Return whether the folder ``written`` holds only files of a save, and all processes of that save have ended."""
    if written.is_symlink() or not written.is_dir():
        return False
    files = list(written.iterdir())
    return all(_OWN_FILES.fullmatch(each.name) for each in files) and not any(map(_is_locked, files))


def _is_locked(path: Path) -> bool:
    """Return whether a process has locked the file; True also where that can't be found out."""
    if fcntl is None:
        return True
    try:
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:  # it is held, or can't be
        return True
