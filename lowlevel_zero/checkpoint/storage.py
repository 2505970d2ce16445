"""torch.distributed.checkpoint's files, written with checksums, committed at the end, and read as data alone."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from .manifest import FileSum

Sums = dict[str, FileSum]

# Why an asynchronous save may find its ranks gone.
ALONE = "destroy_process_group was called before all was written: call wait() first"


class _Summing(io.FileIO):
    """A file that adds up what is written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.sum = FileSum(0, 0)

    def write(self, data: Any, /) -> int:
        written = super().write(data) or 0
        crc32 = zlib.crc32(memoryview(data).cast("B")[:written], self.sum.crc32)
        self.sum = FileSum(self.sum.bytes + written, crc32)
        return written


@contextmanager
def summed(path: Path, sums: Sums) -> Iterator[IO[bytes]]:
    """A new file to write, which is on the disk, and in ``sums`` by its name, when the body has ended."""
    raw = _Summing(path)
    with io.BufferedWriter(raw) as stream:
        yield cast("IO[bytes]", stream)
    handle = os.open(path, os.O_RDONLY)  # the body may have closed the stream
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    sums[path.name] = raw.sum


class _SummedFiles(FileSystem):
    """The file system, as a writer sees it."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb"
        with summed(Path(path), self.sums) as stream:
            yield stream

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


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
    """

    def __init__(
        self, folder: Path, rank: int, size: int, commit: Callable[[Sums], None], own: Mapping[str, bytes]
    ) -> None:
        super().__init__(folder, sync_files=False)  # they are, by ``summed``
        self.fs = self._files = _SummedFiles()
        self._folder = folder
        self._rank = rank
        self._size = size
        self._commit = commit
        self._own = own

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator and self._rank != 0:
            raise RuntimeError(f"rank {self._rank} is alone")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        results = super().write_data(plan, planner)
        for name, data in self._own.items():
            with summed(self._folder / name, self._files.sums) as file:
                file.write(data)
        told: Future[Any] = Future()
        told.set_result(_Written(results.wait(), self._files.sums))
        return told

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        if len(results) != self._size:
            raise RuntimeError(f"expected what {self._size} ranks wrote, got what {len(results)} did")
        super().finish(metadata, results)
        sums = dict(self._files.sums)
        for written in results:
            sums.update(written.sums)
        self._commit(sums)

    def stage(self, state_dict: Any) -> Any:
        """What ``async_save`` is given has been copied already."""
        return state_dict


class PlainReader(FileSystemReader):
    """Reads with metadata that was read, and checked, before.

    Args:
        folder: the checkpoint.
        metadata: its metadata.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata
