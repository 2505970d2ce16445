"""Saving a checkpoint: all ranks agree and write their slices; when all have, the first puts it in its place."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.utils._pytree import tree_map_only

from .. import __version__
from ..communication.agreement import together
from ..communication.failed_ranks import explained
from ..communication.process_groups import context_of, side_group
from ..communication.shard_group import ShardGroup
from ..optimizer import LowLevelZeroOptimizer
from .background import Background
from .contents import Contents
from .folders import NotSynced, check_target
from .manifest import OBJECTS, RANK_STATE, UNTRAINED, Manifest
from .objects import Objects, Settings, packed, unpacked
from .optimizers import Name, Optimizers, check_optimizers, check_rank_state, check_schedulers, group_of, names_text
from .storage import ALONE, CommittingWriter

_log = logging.getLogger("lowlevel_zero")

# Options that a run's layout depends on, and loading doesn't.
_LAYOUT = (
    *("communication_dtype", "reduce_scatter", "master_weights", "cpu_offload", "pad_buckets_for_high_nccl_busbw"),
    *("fp8_communication", "fp8_min_numel", "slice_multiple"),
)


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers,
    *,
    scheduler: Any = None,
    extra: Any = None,
    rank_state: dict[str, Any] | None = None,
    exclude_frozen: bool = False,
    async_save: bool = False,
    keep: int | None = None,
) -> Saving:
    """Save model, optimizer, scheduler and ``extra`` to the directory ``path``; every rank calls it, between steps.

    Each rank writes its own slices, by ``torch.distributed.checkpoint``. The checkpoint is written beside ``path`` and
    renamed when all of it is on the disk. Nothing that was there before is replaced or removed, but for what ``keep``
    says, and what saves have left that were broken off. All ranks must see the same file system. Names are the model's
    own, whatever wraps it or modules in it.

    Args:
        path: the checkpoint, as in ``"run/step-100"``, where nothing is yet, or an empty directory.
        model: the module; its parameters and persistent buffers are saved.
        optimizer: trains parameters of ``model`` and no others; or several, in a list or in a dict by name, of which
            no two train the same parameter.
        scheduler: anything with ``state_dict`` and ``load_state_dict``; of several optimizers a list or a dict as
            theirs, with None for one without.
        extra: numbers, strings, tensors, lists, dicts: what else the run needs to go on. Rank 0's is saved.
        rank_state: a dict as ``extra`` may be, of which each rank has its own: random number states, a data loader's
            position.
        exclude_frozen: leave out parameters that require no gradients and that no optimizer trains, as the base model
            of LoRA. Whoever loads has to make the model with them.
        async_save: copy what is to be saved to the host and return; a thread writes it while training goes on. A
            further save or load waits for it, and so does the interpreter's end; wait yourself before
            ``destroy_process_group``, or it may be broken off, with an error.
        keep: then remove the files of all but the ``keep`` newest of this run's checkpoints in ``path``'s directory.
            This run's are those that were saved with these optimizers, or by runs that these were loaded from. Other
            files in their directories stay, and so do symbolic links.

    Returns:
        The save, with ``wait()``; it is over unless ``async_save``.

    Raises (on every rank alike; asynchronous writing raises in ``wait()``, else at the next save or load, else at the
    end of the process, whose exit code is 120 then):
        TypeError: what isn't a model or optimizer, or what ``torch.load(weights_only=True)`` would not take back.
        ValueError: a bad ``keep``, parameters that aren't the model's or that two optimizers train, ranks that differ
            in their arguments.
        FileExistsError, NotADirectoryError: something is at ``path``.
        RuntimeError: another rank's error, or files could not be written, now or by the asynchronous save before; the
            message has the reason.
    """
    group = group_of(optimizer)
    target, doing = Path(os.path.abspath(path)), f"save a checkpoint to {path}"
    with together(group, doing) as lines:
        finish_last(group)
        _check_keep(keep)
        check_rank_state(rank_state)
        check_target(target)
        optimizers = check_optimizers(model, optimizer)
        schedulers = check_schedulers(scheduler, optimizers)
        contents = Contents(model, optimizers)
        lines += [f"path {path}", f"async_save={async_save}, keep={keep}, exclude_frozen={exclude_frozen}"]
        lines += [names_text(optimizers, "optimizer"), *contents.lines()]
    contents.meet(doing, exclude_frozen=exclude_frozen)
    _tell_untrained(contents)
    with together(group, doing) as lines:
        files = {} if rank_state is None else {RANK_STATE.format(group.group_rank): packed(rank_state, "rank_state")}
        settings = {name: _settings(contents, name, each, schedulers[name]) for name, each in optimizers.items()}
        objects = Objects(settings, contents.extra_states, extra).packed()
        if group.group_rank == 0:
            files[OBJECTS] = objects
        state = _as_torch_has_it(contents, Objects(**unpacked(objects)), lines)
        if async_save:
            state = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
    manifest = _manifest(contents, runs_of(optimizers), settings)
    (number,) = group.from_rank_zero([secrets.randbits(62)])
    writer = CommittingWriter(target, f"{number:016x}", group, manifest, files, keep)
    saving = Saving(target)
    write = partial(_write, target, state, writer, side_group(group.group))
    if async_save:
        saving.start(write)
        context_of(group.group).writing = saving
    else:
        saving.run(write)
        saving.wait()
    return saving


class Saving(Background[Path]):
    """A checkpoint that is being written: a future of its path.

    ``done()`` tells whether it is there, or has failed; ``result()`` is ``wait()``.

    Attributes:
        path: where it will be.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def wait(self) -> Path:
        """Return the checkpoint's path, when it is there.

        Raises:
            RuntimeError: it could not be written, on whichever rank; raised on all.
        """
        return self.result()


def _write(path: Path, state: dict[str, Any], writer: CommittingWriter, group: dist.ProcessGroup) -> Path:
    """Write a state that training doesn't change, or waits for, by collectives of a side group; returns ``path``."""
    try:
        dcp_save(state, storage_writer=writer, process_group=group)
    except (CheckpointException, Exception) as error:  # whatever torch's writer, or a disk, raises
        rank, (cause, _) = min(getattr(error, "failures", {}).items(), default=(None, (error, None)))
        reason = explained(error, group, "writing") if rank is None else None
        told = reason or f"{'' if rank is None else f'rank {rank}: '}{type(cause).__name__}: {cause}"
        hint = "" if dist.is_initialized() else f" ({ALONE})"
        there = "is in its place, but a crash of the machine may lose it" if isinstance(cause, NotSynced) else ""
        raise RuntimeError(f"{path}: the checkpoint {there or 'could not be written'}. {told}{hint}") from error
    finally:
        writer.release()
    return path


def finish_last(group: ShardGroup) -> None:
    """Wait for this group's asynchronous save, and raise its failure unless somebody knows it. Doesn't communicate."""
    context = context_of(group.group)
    last, context.writing = context.writing, None
    if last is not None:
        known = isinstance(last, Saving) and last.told
        error = last.exception()
        if error is not None and not known:
            raise RuntimeError(f"expected the asynchronous save before to have succeeded: {error}") from error


def runs_of(optimizers: Mapping[Name, LowLevelZeroOptimizer], others: Sequence[str] = ()) -> tuple[str, ...]:
    """The run that these optimizers are of, and then those that it went on from: these ``others`` too, from now on."""
    known = dict.fromkeys(run for optimizer in optimizers.values() for run in optimizer.runs)
    runs = tuple(dict.fromkeys((*(known or [secrets.token_hex(8)]), *others)))
    for optimizer in optimizers.values():
        optimizer.runs = runs
    return runs


def _check_keep(keep: int | None) -> None:
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f"keep: expected a number of checkpoints, at least 1, or None, got {keep!r}")


def _tell_untrained(contents: Contents) -> None:
    untrained = [name for name, tensor in contents.saved.items() if tensor.kind == UNTRAINED]
    if untrained and contents.group.group_rank == 0:
        _log.warning(
            "save_checkpoint: no optimizer that was given trains %s, ... (%d parameters that require gradients): their "
            "values are saved, but no state of an optimizer: pass all optimizers together, as in [muon, adamw]",
            untrained[0],
            len(untrained),
        )


def _as_torch_has_it(contents: Contents, objects: Objects, lines: list[str]) -> dict[str, Any]:
    """What is saved, as torch's ``get_state_dict`` puts it together, so that its tools find it by name.

    ``lines`` get names of states, which have to be alike on all ranks that share them.
    """
    optimizers = objects.optimizers.values()
    state: dict[str, dict[str, Any]] = {name: {**of} for each in optimizers for name, of in each["states"].items()}
    for name, tensors in contents.states().items():
        state.setdefault(name, {}).update(tensors)
        lines += [f"{name}.{key}" for key in tensors if contents.entries[name].shard_group == 0]
    groups = [group for settings in optimizers for group in settings["param_groups"]]
    extra = objects.model if contents.group.group_rank == 0 else {}  # tensors among it may differ
    return {"model": {**contents.model(), **extra}, "optim": {"state": state, "param_groups": groups}}


def _settings(contents: Contents, name: Name, optimizer: LowLevelZeroOptimizer, scheduler: Any) -> Settings:
    """What isn't a tensor of one of the optimizers."""
    return {
        **contents.states_of[name].settings(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "options": {option: getattr(optimizer.options, option) for option in _LAYOUT},
        "stage": 2 if optimizer.options.partition_grad else 1,
        "slices": optimizer.shard_group.size,
    }


def _manifest(contents: Contents, runs: tuple[str, ...], settings: Mapping[Name, Settings]) -> Manifest:
    """The manifest, but for what is known when all has been written."""
    return Manifest(
        version=__version__,
        torch=torch.__version__,
        world_size=contents.group.ranks,
        stage=next(iter(settings.values()))["stage"],
        saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        serial=0,
        tensors={name: tensor for name, tensor in contents.saved.items() if name not in contents.excluded},
        tied=contents.tied,
        files={},
        experts=contents.experts,
        excluded=contents.excluded,
        runs=runs,
    )
