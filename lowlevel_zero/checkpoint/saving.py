"""Saving a checkpoint: all ranks agree, write their slices beside, and the first puts it in its place when all have."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save as async_dcp_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ..communication.collectives import ShardGroup
from ..communication.lost_ranks import explained
from ..communication.roll_call import call_roll
from ..construction import together
from ..optimizer import LowLevelZeroOptimizer
from ..options import ZeroOptions
from ..sharded_state import packed
from ..version import __version__
from .contents import Contents, check_pair
from .folders import beside, check_target, next_serial, prune, publish
from .manifest import MANIFEST, OBJECTS, FileSum, Manifest
from .storage import ALONE, CommittingWriter, Sums, summed

_log = logging.getLogger("lowlevel_zero")

# By group: the asynchronous save that is under way, or was the last.
_last: WeakKeyDictionary[dist.ProcessGroup, Saving] = WeakKeyDictionary()


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: LowLevelZeroOptimizer,
    *,
    scheduler: Any = None,
    extra: Any = None,
    async_save: bool = False,
    keep: int | None = None,
    timeout: float = 20.0,
) -> Saving:
    """Save model, optimizer, scheduler and ``extra`` to the directory ``path``; every rank calls it, between steps.

    Each rank writes its own slices, by ``torch.distributed.checkpoint``. It is written beside ``path`` and renamed
    when all of it is on the disk: until then, and if anything fails, a former checkpoint stays as it was. All ranks
    must see the same file system.

    Args:
        path: the checkpoint, as in ``"run/step-100"``; one that is there is replaced.
        model: the module; its parameters and persistent buffers are saved.
        optimizer: trains parameters of ``model`` and no others.
        scheduler: anything with ``state_dict`` and ``load_state_dict``.
        extra: numbers, strings, tensors, lists, dicts: what else the run needs to go on. Rank 0's is saved.
        async_save: copy what is to be saved to the host and return; a thread writes it while training goes on. A
            further save or load waits for it, and so does the interpreter's end; wait yourself before
            ``destroy_process_group``, or it may be broken off, with an error.
        keep: then remove all but the ``keep`` newest checkpoints in ``path``'s directory, which must be this
            run's alone, and remains of saves that were broken off.
        timeout: seconds to wait for the other ranks to call this.

    Returns:
        The save, with ``wait()``; it is over unless ``async_save``.

    Raises (on every rank alike; asynchronous writing raises in ``wait()``):
        TimeoutError: not every rank called it; the message says which did.
        TypeError: what isn't a model or optimizer, or what ``torch.load(weights_only=True)`` would not take back.
        ValueError: a bad ``keep``, parameters that aren't the model's, ranks that differ in their arguments.
        FileExistsError, NotADirectoryError: something else is at ``path``.
        RuntimeError: another rank's error, or files could not be written; the message has the reason.
    """
    check_pair(model, optimizer)
    group = optimizer._group
    wait_for_last(group)
    call_roll(group.group, "save_checkpoint", timeout)
    target = Path(os.path.abspath(path))
    token = _token(group)
    written = beside(target, token)
    optimizer._force_wait_all_gather()
    doing = f"save a checkpoint to {path}"
    with together(group, doing) as lines:
        _check_arguments(target, keep)
        for record in optimizer._parameters:
            record.follow_edits()
        contents = Contents(model, optimizer)
        lines += [f"path {path}", f"async_save={async_save}, keep={keep}"]
        lines += contents.lines(0)
    contents.meet(doing)
    with together(group, doing) as lines:
        objects = _pack_objects(contents, scheduler, extra, optimizer._options)
        tensors = contents.tensors()
        lines += [full for full in tensors if contents.family_of(full) == 0]
        if async_save:
            tensors = contents.copied(tensors)
    with together(group, f"write beside {path}"):
        if group.place == 0:
            written.mkdir(parents=True)
    commit = _Commit(target, written, token, objects, _describe(contents, optimizer, tensors), keep)
    saving = Saving(target, written if group.place == 0 else None)
    writer = CommittingWriter(written, group.place, group.ranks, commit)
    saving.start(tensors, writer, group.apart(), async_save)
    if async_save:
        _last[group.group] = saving
    else:
        saving.wait()
    return saving


class Saving:
    """A checkpoint that is being written.

    Attributes:
        path: where it will be.
    """

    def __init__(self, path: Path, written: Path | None) -> None:
        self.path = path
        self._written = written
        self._future: Future[Any] = Future()
        self._hint = ""
        self._group: dist.ProcessGroup | None = None

    def start(
        self, tensors: dict[str, Tensor], writer: CommittingWriter, group: dist.ProcessGroup, in_background: bool
    ) -> None:
        """Have the tensors written, by a thread or before returning."""
        self._group = group
        if in_background:
            started = async_dcp_save(tensors, storage_writer=writer, process_group=group)
            cast("Future[Any]", started).add_done_callback(self._tell)
            return
        try:
            self._future.set_result(dcp_save(tensors, storage_writer=writer, process_group=group))
        except (CheckpointException, Exception) as error:
            self._future.set_exception(error)

    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._future.done()

    def wait(self) -> Path:
        """The checkpoint's path, when it is there.

        Raises:
            RuntimeError: it could not be written, on whichever rank; raised on all. A former checkpoint is as it was.
        """
        error = self._future.exception()
        if error is None:
            return self.path
        self._clean()
        raise RuntimeError(self._reason(error)) from error

    result = wait

    def _tell(self, written: Future[Any]) -> None:
        """Nobody may ever wait: an error of a thread goes to the log too."""
        error = written.exception()
        if error is None:
            self._future.set_result(None)
            return
        self._hint = "" if dist.is_initialized() else f" ({ALONE})"
        _log.error("%s", self._reason(error))
        self._clean()
        self._future.set_exception(error)

    def _clean(self) -> None:
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)

    def _reason(self, error: BaseException) -> str:
        failures = getattr(error, "failures", None)
        if failures:
            rank, (cause, _) = min(failures.items())
            told = f"rank {rank}: {type(cause).__name__}: {cause}"
        else:
            lost = None if self._group is None else explained(error, self._group, "writing")
            told = str(lost or f"{type(error).__name__}: {error}")
        return f"{self.path}: the checkpoint could not be written, a former one is as it was. {told}{self._hint}"


@dataclass(frozen=True)
class _Commit:
    """What the first rank does when all have written: the rest of the files, the renames, the pruning."""

    path: Path
    written: Path
    token: str
    objects: bytes
    describe: partial[Manifest]
    keep: int | None

    def __call__(self, sums: Sums) -> None:
        with summed(self.written / OBJECTS, sums) as file:
            file.write(self.objects)
        manifest = self.describe(files=sums, serial=next_serial(self.path))
        missing = manifest.first_missing(self.written)
        if missing is not None:
            raise RuntimeError(f"{missing}, seen from rank 0: all ranks must see the same file system")
        own: dict[str, FileSum] = {}
        with summed(self.written / MANIFEST, own) as file:
            file.write(manifest.to_text().encode())
        publish(self.written, self.path, self.token)
        if self.keep is not None:
            try:
                prune(self.path, self.keep)
            except OSError as error:
                _log.warning("%s: saved, but older ones could not be removed: %s", self.path, error)


def wait_for_last(group: ShardGroup) -> None:
    """Return when this group's asynchronous save is over, however it ended: its own ``wait`` tells."""
    last = _last.pop(group.group, None)
    if last is not None:
        last._future.exception()


def _check_arguments(target: Path, keep: int | None) -> None:
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f"keep: expected a number of checkpoints, at least 1, or None, got {keep!r}")
    check_target(target)


def _pack_objects(contents: Contents, scheduler: Any, extra: Any, options: ZeroOptions) -> bytes:
    """What isn't a tensor of the model or the optimizer, each part checked by itself so that errors can name it."""
    objects = {**contents.state.settings(), "model": contents.extra_states(), "extra": extra}
    objects["scheduler"] = None if scheduler is None else scheduler.state_dict()
    objects["options"] = _told(options)
    objects["slices"] = contents.group.size
    for what, part in objects.items():
        packed(part, what)
    return packed(objects, "the checkpoint's objects")


def _told(options: ZeroOptions) -> dict[str, Any]:
    """What its layout depends on, and loading doesn't."""
    wire = options.communication_dtype
    return {
        "bucket_size": options.bucket_size,
        "communication_dtype": None if wire is None else str(wire).removeprefix("torch."),
        "reduce_scatter": options.reduce_scatter,
        "master_weights": options.master_weights,
        "cpu_offload": options.cpu_offload,
        "pad_buckets_for_high_nccl_busbw": options.pad_buckets_for_high_nccl_busbw,
        "fp8_communication": options.fp8_communication,
        "fp8_min_numel": options.fp8_min_numel,
    }


def _describe(contents: Contents, optimizer: LowLevelZeroOptimizer, tensors: dict[str, Tensor]) -> partial[Manifest]:
    """The manifest, but for what is known at the end."""
    return partial(
        Manifest,
        version=__version__,
        torch=torch.__version__,
        world_size=contents.group.ranks,
        stage=2 if optimizer._options.partition_grad else 1,
        saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        tensors=contents.saved(),
        tied=contents.all_tied(),
        states=contents.states(tensors),
        experts=contents.experts,
    )


def _token(group: ShardGroup) -> str:
    """16 hexadecimal digits, the same on every rank and never the same again."""
    (number,) = group.from_rank_zero([secrets.randbits(62)])
    return f"{number:016x}"
