"""Writing a checkpoint: each rank writes its share and sums it, and the first rank renames the folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

import torch.distributed as dist

from ..communication.failed_ranks import lost_rank_error
from ..communication.process_groups import side_group
from ..communication.shard_group import ShardGroup
from .checksum import FileSum, SummedFile
from .folders import NotSynced, claim, clear_remains, prune, publish
from .manifest import MANIFEST, METADATA, Manifest
from .plan import TENSORS, Share, metadata_of
from .tensor_bytes import memory_of

_AGAIN = ": mend that, and save again; earlier checkpoints are untouched"
_Told: TypeAlias = tuple[dict[str, FileSum], str | None]  # a rank's files, and its failure in words


class CheckpointWriter:
    """Writes a checkpoint beside ``path``; the first rank of ``group`` renames it when all ranks have written.

    Each rank writes its ``share``. The first rank writes its ``manifest``, with the files' sizes and checksums; then it
    starts a thread that removes all but the ``keep`` newest of the run's checkpoints, unless ``keep`` is None.
    """

    def __init__(self, path: Path, group: ShardGroup, manifest: Manifest, share: Share, keep: int | None) -> None:
        token = hashlib.sha256(f"{manifest.runs[0]} ".encode() + os.fsencode(path)).hexdigest()[:16]
        self._path, self._written, self._keep = path, path.with_name(f"{path.name}.{token}.tmp"), keep
        self._group = side_group(group.group)
        self._rank, self._ranks = group.group_rank, group.ranks if group.has_others else 1
        self._manifest, self._share = manifest, share

    def write(self) -> Path:
        """Write this rank's share and return ``path`` when the checkpoint is there. Communicates: every rank calls it.

        Raises:
            RuntimeError: a rank could not write; raised on all ranks.
        """
        sums: dict[str, FileSum] = {}
        failed: Exception | None = None
        with ExitStack() as claimed:
            try:
                sums = self.write_share(claimed)
            except Exception as error:  # of whatever type, from the disk or torch: the others wait to learn of it
                failed = error
            try:
                failure = self._outcome((sums, None if failed is None else self._told(failed)))
            except Exception as lost:  # of whatever type: a peer has gone, or the process group has
                told = lost_rank_error(lost, self._group, "writing") or f"{type(lost).__name__}: {lost}"
                ended = " (destroy_process_group was called before all was written: call wait() first)"
                hint = "" if dist.is_initialized() else ended
                raise RuntimeError(f"{self._path}: the checkpoint could not be written. {told}{hint}{_AGAIN}") from lost
            if failure is not None:
                raise RuntimeError(f"{self._path}: the checkpoint {failure}{_AGAIN}") from failed
        if self._rank == 0 and self._keep is not None:
            older = self._path, self._keep, self._manifest.runs
            Thread(target=prune, args=older, name="lowlevel_zero pruning").start()
        return self._path

    def write_share(self, claimed: ExitStack) -> dict[str, FileSum]:
        """Lock the folder, write this rank's files, and return their checksums.

        ``claimed``, when it is closed, unlocks the folder, and removes it first if the save has failed.
        """
        name, files = TENSORS.format(self._rank), self._share.files.items()
        claimed.enter_context(claim(self._written, name))
        claimed.push(self._clear)
        if self._rank == 0:
            clear_remains(self._written)
        sums = {name: self._write_tensors(self._written / name)}
        return sums | {name: write_through(self._written / name, content) for name, content in files}

    def _clear(self, failed: object, *_: object) -> None:
        if failed is not None:
            shutil.rmtree(self._written, ignore_errors=True)

    def _write_tensors(self, path: Path) -> FileSum:
        """Write this rank's parts of all tensors to ``path`` in the plan's order, and pickles; return its checksum."""
        with SummedFile(path) as file:
            for tensor in self._share.plan:
                for part in (part for part, writer in enumerate(tensor.writers) if writer == self._rank):
                    host, at = self._share.values[tensor.path].cpu(), 0
                    for _, layout in tensor.boxes(part):
                        stop = at + layout.nbytes // layout.dtype.itemsize
                        file.write(layout.head())
                        file.write(memory_of(host[at:stop]))
                        at = stop
            for content in self._share.pickles.values():
                file.write(content)
            return file.sync()

    def _outcome(self, own: _Told) -> str | None:
        """Let the first rank publish the checkpoint if all have written; return a failure or None. Communicates."""
        if self._ranks == 1:
            return self._publish([own])
        told: list[Any] = [None] * self._ranks if self._rank == 0 else []
        first = dist.get_global_rank(self._group, 0)
        dist.gather_object(own, told or None, first, self._group)
        outcome = [self._publish(told) if told else None]
        dist.broadcast_object_list(outcome, first, self._group)
        return outcome[0]

    def _publish(self, told: Sequence[_Told]) -> str | None:
        """Write metadata and manifest, and rename the folder, unless a rank has failed; return any failure as text."""
        for _, failure in told:
            if failure is not None:
                return failure
        try:
            files = {name: each for sums, _ in told for name, each in sums.items()}
            files[METADATA] = write_through(self._written / METADATA, metadata_of(self._share, self._ranks))
            manifest = replace(self._manifest, files=files)
            try:
                manifest.check_files(self._written, verify=False)
            except ValueError as error:
                raise RuntimeError(
                    f"rank 0 doesn't find in {self._written} what all ranks have written: save to a file system that "
                    "all ranks share"
                ) from error
            write_through(self._written / MANIFEST, manifest.to_text().encode())
            publish(self._written, self._path)
        except Exception as error:  # of whatever type, as in write
            return self._told(error)
        return None

    def _told(self, error: Exception) -> str:
        in_place = isinstance(error, NotSynced)
        how = "is in its place, but a crash of the machine may lose it" if in_place else "could not be written"
        return f"{how}. rank {self._rank}: {type(error).__name__}: {error}"


def write_through(path: Path, content: bytes) -> FileSum:
    """Write a file to the disk, and return its length and checksum."""
    with SummedFile(path) as file:
        file.write(content)
        return file.sync()
