"""Writing a checkpoint: each rank writes its share and sums it, and the first rank renames the folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist

from ..communication.failed_ranks import lost_rank_error
from .checksum import Checksum, FileSum
from .folders import NotSynced, claim, clear_remains, path_beside, publish
from .manifest import MANIFEST, METADATA, Manifest
from .plan import TENSORS, Share, metadata_of
from .tensor_bytes import memory_of

# Why an asynchronous save may find its ranks gone.
ALONE = "destroy_process_group was called before all was written: call wait() first"
_PIECE = 2**20  # bytes

T = TypeVar("T")


class SummedFile:
    """A file that is written from beginning to end, while its checksum is computed."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")
        self._checksum = Checksum()

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data`` and add it to the checksum, a piece at a time so that it stays in the cache."""
        view = memoryview(bytearray(data)) if isinstance(data, bytes) else data
        for at in range(0, len(view), _PIECE):
            piece = view[at : at + _PIECE]
            self._checksum.add(piece)
            self._file.write(piece)

    def sync(self) -> FileSum:
        """Flush the file to the disk, and return its length and checksum."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._checksum.sum()


class CheckpointWriter:
    """Writes a checkpoint beside ``path``; the first rank renames it when all ranks have written.

    Args:
        path: where the checkpoint will be.
        token: 16 hexadecimal digits that the ranks have in common.
        group: the process group over which the ranks exchange checksums and errors.
        rank: this rank's number in it.
        ranks: the number of ranks that write.
        manifest: describes the checkpoint, but for ``files``.
        share: the part of this rank.
    """

    def __init__(
        self, path: Path, token: str, group: dist.ProcessGroup, rank: int, ranks: int, manifest: Manifest, share: Share
    ) -> None:
        self._path, self._written = path, path_beside(path, token)
        self._group, self._rank, self._ranks = group, rank, ranks
        self._manifest, self._share = manifest, share

    def write(self) -> Path:
        """Write this rank's share and return ``path`` when the checkpoint is there. Communicates: every rank calls it.

        Raises:
            RuntimeError: a rank could not write; raised on all ranks.
        """
        claimed: list[IO[bytes]] = []
        try:
            sums, error = _attempt(lambda: self.write_share(claimed))
            self._settle(sums or {}, error)
        finally:
            for each in claimed:
                if self._rank == 0:
                    shutil.rmtree(self._written, ignore_errors=True)  # unless it has been put in its place
                each.close()
        return self._path

    def write_share(self, claimed: list[IO[bytes]]) -> dict[str, FileSum]:
        """Lock the folder, write this rank's files, and return their checksums; the lock is added to ``claimed``."""
        name, files = TENSORS.format(self._rank), self._share.files.items()
        claimed.append(claim(self._written, name))
        if self._rank == 0:
            clear_remains(self._written)
        sums = {name: self._write_tensors(self._written / name)}
        return sums | {name: write_through(self._written / name, content) for name, content in files}

    def _write_tensors(self, path: Path) -> FileSum:
        """Write this rank's parts of all tensors to ``path`` in the plan's order, and pickles; return its checksum."""
        with SummedFile(path) as file:
            for tensor in self._share.plan:
                for part in tensor.parts_of(self._rank):
                    host, at = self._share.values[tensor.path].cpu(), 0
                    for _, layout in tensor.boxes(part):
                        stop = at + layout.nbytes // layout.dtype.itemsize
                        file.write(layout.head())
                        file.write(memory_of(host[at:stop]))
                        at = stop
            for content in self._share.pickles.values():
                file.write(content)
            return file.sync()

    def _settle(self, sums: dict[str, FileSum], error: Exception | None) -> None:
        """Publish the checkpoint on the first rank if all ranks have written; else raise on all. Communicates."""
        try:
            reasons = self._outcome(sums, error)
        except Exception as lost:  # of whatever type: a peer has gone, or the process group has
            told = lost_rank_error(lost, self._group, "writing") or f"{type(lost).__name__}: {lost}"
            hint = "" if dist.is_initialized() else f" ({ALONE})"
            raise RuntimeError(f"{self._path}: the checkpoint could not be written. {told}{hint}") from lost
        for rank, reason in enumerate(reasons):
            if reason is not None:
                in_place = reason.startswith(NotSynced.__name__)
                how = "is in its place, but a crash of the machine may lose it" if in_place else "could not be written"
                raise RuntimeError(f"{self._path}: the checkpoint {how}. rank {rank}: {reason}") from error

    def _outcome(self, sums: dict[str, FileSum], error: Exception | None) -> list[str | None]:
        """Return each rank's reason for its failure, or None for it. Ranks exchange little unless one has failed."""
        told = self._gather((sums, error is not None))
        if told and not any(failed for _, failed in told):
            files = {name: each for of_rank, _ in told for name, each in of_rank.items()}
            _, error = _attempt(lambda: self._commit(files))
        own = None if error is None else f"{type(error).__name__}: {error}"
        if self._ranks == 1:
            return [own]
        failed = torch.tensor([int(error is not None)], device="cpu")
        dist.all_reduce(failed, group=self._group)
        reasons: list[str | None] = [None] * self._ranks
        if failed.item():
            dist.all_gather_object(reasons, own, group=self._group)
        return reasons

    def _gather(self, own: T) -> list[T]:
        """Gather each rank's ``own`` on the first rank, and return them; return nothing on the others. Communicates."""
        if self._ranks == 1:
            return [own]
        told: list[Any] = [None] * (self._ranks if self._rank == 0 else 0)
        dist.gather_object(own, told or None, dist.get_global_rank(self._group, 0), self._group)
        return told

    def _commit(self, sums: dict[str, FileSum]) -> None:
        """Write the metadata and the manifest, and rename the folder to its place; the first rank calls it."""
        share = self._share
        content = metadata_of(share, self._ranks)
        files = {**sums, METADATA: write_through(self._written / METADATA, content)}
        manifest = replace(self._manifest, files=files)
        try:
            manifest.check_files(self._written, verify=False)
        except ValueError as error:
            raise RuntimeError(f"{error}; seen from rank 0: all ranks must see the same file system") from error
        write_through(self._written / MANIFEST, manifest.to_text().encode())
        publish(self._written, self._path)


def write_through(path: Path, content: bytes) -> FileSum:
    """Write a file to the disk, and return its length and checksum."""
    with SummedFile(path) as file:
        file.write(content)
        return file.sync()


def _attempt(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call ``do``, and return its result and None, or None and its exception."""
    try:
        return do(), None
    except Exception as error:  # of whatever type, from the disk or torch: the other ranks wait to learn how it went
        return None, error
