"""torch.distributed.checkpoint's files, written through to the disk with their checksums, and committed at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from ..communication.shard_group import ShardGroup
from .folders import claim, next_serial, path_beside, prune, publish
from .manifest import MANIFEST, METADATA, FileSum, Manifest
from .saved import MODEL

# Why an asynchronous save may find its ranks gone.
ALONE = "destroy_process_group was called before all was written: call wait() first"


class CommittingWriter(FileSystemWriter):
    """Writes a file a rank beside ``path``, and the first rank puts them in place when all have.

    An error of any rank is raised on all. The first rank makes the folder, and claims it.

    Args:
        path: where the checkpoint will be.
        token: 16 hexadecimal digits that the ranks agree on.
        group: the ranks.
        manifest: what they write, but for ``files`` and ``serial``.
        own: further files of this rank's, by name.
        keep: how many checkpoints of these runs to leave then; None: all.
    """

    def __init__(
        self,
        path: Path,
        token: str,
        group: ShardGroup,
        manifest: Manifest,
        own: Mapping[str, bytes],
        keep: int | None,
    ) -> None:
        self._written = path_beside(path, token)
        super().__init__(self._written)
        self._path = path
        self._size = group.ranks
        self._manifest = manifest
        self._own = own
        self._keep = keep
        self._claim: IO[bytes] | None = None

    def release(self) -> None:
        """Remove the folder, unless it has been put in its place, and let go of it."""
        if self._claim is not None:
            shutil.rmtree(self._written, ignore_errors=True)
            self._claim.close()

    # ---- what torch.distributed.checkpoint calls ----

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._claim = claim(self._written)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        sums = {name: FileSum.of(self._written / name) for name in sorted(names)}
        sums |= {name: _write_through(self._written / name, data) for name, data in self._own.items()}
        written: Future[Any] = Future()
        written.set_result((results, sums))
        return written

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        if len(results) != self._size:  # after destroy_process_group torch takes each rank for the only one
            raise RuntimeError(f"expected what {self._size} ranks wrote, got what {len(results)} did")
        sums = {name: each for _, sums_of_rank in results for name, each in sums_of_rank.items()}
        results = [results_of_rank for results_of_rank, _ in results]
        super().finish(metadata, [*results, *self._aliases(metadata, results)])
        self._commit({**sums, METADATA: FileSum.of(self._written / METADATA)})

    def _aliases(self, metadata: Metadata, results: list[Any]) -> list[Any]:
        """Let torch's tools find tied tensors of the model under each of their names."""
        aliases = []
        for alias, name in self._manifest.tied.items():
            if name in self._manifest.tensors:
                of_name = [each for written in results for each in written if each.index.fqn == f"{MODEL}{name}"]
                full = f"{MODEL}{alias}"
                metadata.state_dict_metadata[full] = metadata.state_dict_metadata[f"{MODEL}{name}"]
                metadata.planner_data[full] = ("model", alias)
                aliases.append([replace(each, index=replace(each.index, fqn=full)) for each in of_name])
        return aliases

    def _commit(self, sums: dict[str, FileSum]) -> None:
        """Write the rest of the files, put all in place, and prune."""
        manifest = replace(self._manifest, files=sums, serial=next_serial(self._path))
        try:
            manifest.check_files(self._written, verify=False)
        except ValueError as error:
            raise RuntimeError(f"{error}; seen from rank 0: all ranks must see the same file system") from error
        _write_through(self._written / MANIFEST, manifest.to_text().encode())
        publish(self._written, self._path)
        prune(self._path, self._keep, manifest.runs)


def _write_through(path: Path, data: bytes) -> FileSum:
    """Write a file, and return when it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileSum.of(path)
