"""Where checkpoints are: found, put in place of a former one, and pruned, so that a crash leaves one whole."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..communication.shard_group import ShardGroup
from .manifest import MANIFEST, METADATA, OBJECTS, Manifest, whole_manifest

try:
    import fcntl
except ImportError:  # Windows, where files have no such locks
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

# What is being written, or was replaced, stands beside the checkpoint: step-100.0123456789abcdef.tmp
_ASIDE = re.compile(r"(?P<name>.+)\.[0-9a-f]{16}\.(?P<kind>tmp|old)")


class CheckpointFolder(NamedTuple):
    """A directory among checkpoints: one, or what stands beside one.

    Attributes:
        name: the checkpoint's.
        kind: ``"tmp"``, what was to become it; ``"old"``, what it was to replace; or, the checkpoint itself, nothing.
        manifest: of a whole checkpoint, moved aside only where nothing has replaced it; else None.
    """

    path: Path
    name: str
    kind: str
    manifest: Manifest | None

    @property
    def serial(self) -> int:
        """Higher in what was saved later; 0: nothing whole."""
        return 0 if self.manifest is None else self.manifest.serial


def latest(directory: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None) -> Path | None:
    """The newest whole checkpoint in ``directory``, or ``directory`` itself if it is one; None: there is none.

    Looks at manifests and file sizes alone. A checkpoint that a crash has left moved aside is found there.

    Args:
        group: ranks that all call this, of which the first one looks and tells the others: so they go on alike, even
            while checkpoints come and go. None: who calls this looks by itself.
    """
    if group is not None:
        return on_first_rank(ShardGroup(group), lambda: latest(directory))
    folder = Path(directory)
    if whole_manifest(folder) is not None:
        return folder
    found = [*_folders_in(folder), *_folders_in(folder.parent, folder.name)]
    newest = max(found, key=lambda each: each.serial, default=None)
    return newest.path if newest is not None and newest.manifest is not None else None


def on_first_rank(group: ShardGroup, look: Callable[[], T]) -> T:
    """What the first rank's ``look`` returns, or raises of what files and their content may raise, on every rank."""
    seen: Any = None
    if group.group_rank == 0:
        try:
            seen = look()
        except (OSError, ValueError) as error:
            seen = error
    answer: T | OSError | ValueError = group.all_gather_object(seen)[0]
    if isinstance(answer, (OSError, ValueError)):
        raise answer
    return answer


def locate(path: Path) -> Path:
    """Where the checkpoint ``path`` is: there, or the newest in it, or, after a crash while it was replaced, aside.

    Raises:
        NotADirectoryError: it is a file.
        FileNotFoundError: there is nothing.
        ValueError: it is a directory, but not a checkpoint of this package.
    """
    if path.is_file():
        raise NotADirectoryError(f"{path}: expected a checkpoint, which is a directory, got a file")
    if (path / MANIFEST).exists():
        return path
    newest = latest(path)
    if newest is not None:
        return newest
    if path.is_dir():
        dcp = "torch.distributed.checkpoint's own: use dcp.load, with Sharded(optimizer)"
        got = dcp if (path / METADATA).exists() else "none"
        raise ValueError(f"{path}: expected a checkpoint of lowlevel_zero, with a {MANIFEST}, got {got}")
    newest = latest(path.parent)
    remedy = "finds none either" if newest is None else f"finds {newest}"
    raise FileNotFoundError(f"{path}: expected a checkpoint, found nothing; latest({str(path.parent)!r}) {remedy}")


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


def aside_path(path: Path, token: str, kind: str = "tmp") -> Path:
    """Where ``path`` is written before it is whole, or where it goes; ``token``: 16 hexadecimal digits."""
    return path.with_name(f"{path.name}.{token}.{kind}")


def publish(written: Path, path: Path) -> None:
    """Put the whole checkpoint ``written``, an ``aside_path``, at ``path``; what was there goes once it is.

    So do remains of broken-off saves. Between the two renames the former one is to be found aside.
    """
    sync(written)
    old = written.with_suffix(".old")
    if path.exists():
        os.rename(path, old)
    try:
        os.rename(written, path)
    except OSError:
        if old.exists():
            os.rename(old, path)
        raise
    sync(path.parent)
    _clear_remains(_folders_in(path.parent, path.name))


def prune(path: Path, keep: int, runs: Collection[str]) -> None:
    """Leave the ``keep`` newest whole checkpoints of these runs beside and including ``path``, and no remains."""
    folders = _folders_in(path.parent)
    found = [each for each in folders if each.manifest is not None and set(each.manifest.runs[:1]) & set(runs)]
    _clear_remains(folders)
    for each in sorted(found, key=lambda each: each.serial)[:-keep]:
        # Moved first: a crash in the midst of removing it must not leave half a checkpoint under its name.
        moved = aside_path(each.path, "0" * 16)
        os.rename(each.path, moved)
        shutil.rmtree(moved, ignore_errors=True)


def claim(written: Path) -> IO[bytes]:
    """Make the folder ``written``, which isn't taken for remains as long as the file that is returned is open.

    The system lets go of it when the process ends, however it does.
    """
    written.mkdir(parents=True, exist_ok=True)  # another rank may be here already
    file = (written / OBJECTS).open("xb")
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
    return file


def next_serial(path: Path) -> int:
    """A number above those of all checkpoints beside ``path``: the time, unless a clock was wrong."""
    return max([time.time_ns(), *(each.serial + 1 for each in _folders_in(path.parent))])


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, written through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _folders_in(folder: Path, name: str | None = None) -> list[CheckpointFolder]:
    """The directories in ``folder``, and (only) what stands beside the checkpoint of this ``name``."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        aside = _ASIDE.fullmatch(path.name)
        of, kind = (path.name, "") if aside is None else (aside["name"], aside["kind"])
        if path.is_dir() and (name is None or (kind and name == of)):
            whole = not kind or (kind == "old" and not (folder / of / MANIFEST).exists())
            found.append(CheckpointFolder(path, of, kind, whole_manifest(path) if whole else None))
    return found


def _clear_remains(folders: Iterable[CheckpointFolder]) -> None:
    """Remove what saves that were broken off have left, and nobody needs any more."""
    for path, _, kind, manifest in folders:
        if manifest is None and (kind == "old" or (kind == "tmp" and _is_abandoned(path))):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(written: Path) -> bool:
    """Whether who claimed it has gone; what has files in it that nobody ever claimed is somebody else's."""
    try:
        with (written / OBJECTS).open("rb+") as file:
            if fcntl is None:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # it is locked, or can't be, or isn't there
        return not any(written.glob("*"))
