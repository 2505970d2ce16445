"""torch.distributed.checkpoint's files, written through to the disk with their checksums, and committed at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from .manifest import METADATA, FileSum

Sums = dict[str, FileSum]

# Why an asynchronous save may find its ranks gone.
ALONE = "destroy_process_group was called before all was written: call wait() first"


def write_through(path: Path, data: bytes) -> FileSum:
    """Write a file, and return when it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileSum.of(path)


class _Written(list[Any]):
    """What a rank has written, for the coordinator."""

    def __init__(self, results: list[Any], sums: Sums) -> None:
        super().__init__(results)
        self.sums = sums


class CommittingWriter(FileSystemWriter):
    """Writes one file a rank, and commits when all ranks have.

    What ``commit`` raises on the first rank all ranks hear of, as of any rank's own error.

    Args:
        folder: where to write; it exists.
        rank: this one, and ``size``: how many there are. Once ``destroy_process_group`` has been called, torch
            takes each rank for the only one, whose slices alone would be a checkpoint.
        commit: called on the first rank with the sums of all files.
        own: further files of this rank's, by name.
        tied: further names of the model's tensors, for those who read it with them: alias to name.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        commit: Callable[[Sums], None],
        own: Mapping[str, bytes],
        tied: Mapping[str, str],
    ) -> None:
        super().__init__(folder)
        self._folder = folder
        self._rank = rank
        self._size = size
        self._commit = commit
        self._own = own
        self._tied = tied

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator and self._rank != 0:
            raise RuntimeError(f"rank {self._rank} is alone")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        sums = {name: FileSum.of(self._folder / name) for name in sorted(names)}
        sums |= {name: write_through(self._folder / name, data) for name, data in self._own.items()}
        told: Future[Any] = Future()
        told.set_result(_Written(results, sums))
        return told

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        if len(results) != self._size:
            raise RuntimeError(f"expected what {self._size} ranks wrote, got what {len(results)} did")
        sums = {name: each for written in results for name, each in written.sums.items()}
        aliases = [_alias(metadata, results, alias, name) for alias, name in self._tied.items()]
        super().finish(metadata, [*results, *aliases])
        self._commit({**sums, METADATA: FileSum.of(self._folder / METADATA)})


def _alias(metadata: Metadata, results: list[Any], alias: str, name: str) -> list[Any]:
    """Let the model's tensor ``alias`` be where ``name`` is."""
    full = f"model.{alias}"
    metadata.state_dict_metadata[full] = metadata.state_dict_metadata[f"model.{name}"]
    metadata.planner_data[full] = ("model", alias)
    of_name = [result for written in results for result in written if result.index.fqn == f"model.{name}"]
    return [replace(result, index=replace(result.index, fqn=full)) for result in of_name]
