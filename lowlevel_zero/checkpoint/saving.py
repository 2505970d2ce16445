"""Saving a checkpoint: all ranks agree and write their slices; then the first rank renames the folder."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..communication.agreement import Alike, together
from ..communication.process_groups import context_of
from ..communication.shard_group import ShardGroup
from ..optimizer import LowLevelZeroOptimizer
from ..options import Takes
from ..partition import BY_ELEMENTS
from ..state.global_names import from_all_ranks
from ..state.loading import STATES, lines_of_others
from ..streams import streams_of
from .background import Background
from .contents import Contents
from .folders import check_target
from .manifest import OBJECTS, RANK_STATE, UNTRAINED, Manifest
from .objects import Objects, Settings, packed, saved_bytes
from .optimizers import Name, Optimizers, check_arguments, group_of, has_written, names_text
from .plan import Keys, Share, name_of
from .storage import CheckpointWriter

_log = logging.getLogger("lowlevel_zero")

_ALIGNMENT = 64  # bytes
_KEEP = Takes("a number of checkpoints, at least 1, or None", (int, NoneType), lambda keep: keep is None or keep >= 1)
_SAVES = Alike("the same path, model and optimizers", "pass them alike; a relative path starts in one directory on all")


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

    Each rank writes its own slices, in the format of ``torch.distributed.checkpoint``. The checkpoint is written beside
    ``path`` and renamed when all of it is on the disk. Nothing that was there before is replaced or removed, but for
    what ``keep`` says, and what saves have left that were broken off. All ranks must see the same file system. Names
    are the model's own, whatever wraps it or modules in it.

    Args:
        path: the checkpoint, as in ``"run/step-100"``, where nothing is yet, or an empty directory.
        model: the module; its parameters and persistent buffers are saved.
        optimizer: trains parameters of ``model`` and no others; or several, in a list or in a dict by name, of which
            no two train the same parameter.
        scheduler: anything with ``state_dict`` and ``load_state_dict``; of several optimizers a list or a dict as
            theirs, with None for one without.
        extra: further values: numbers, strings, tensors, lists and dicts. Rank 0's are saved.
        rank_state: a dict as ``extra`` may be, of which each rank has its own: random number states, a data loader's
            position.
        exclude_frozen: leave out parameters that require no gradients and that no optimizer trains, as the base model
            of LoRA. The loading script must create these parameters itself.
        async_save: copy what is to be saved to the host and return; a thread writes it while training goes on. A
            further save or load waits for it, and so does the interpreter's end; wait yourself before
            ``destroy_process_group``, or it may be broken off, with an error.
        keep: then remove the files of all but the ``keep`` newest of this run's checkpoints in ``path``'s directory.
            This run's are those that were saved with these optimizers, or by runs that these were loaded from. Other
            files in their directories stay, and so do symbolic links.

    Returns:
        The save, with ``wait()``; it is over unless ``async_save``.

    All ranks raise alike. An error of asynchronous writing is raised by ``wait()``, else by the next save or load, else
    at the end of the process, whose exit code is 120 then.

    Raises:
        TypeError: what isn't a model, an optimizer or a number, or can't be read by ``torch.load(weights_only=True)``.
        ValueError: a bad ``keep``, parameters that aren't the model's or that two optimizers train, ranks that differ
            in their arguments, or in what the optimizer's class adds to its state dict.
        FileExistsError, NotADirectoryError: something is at ``path``.
        RuntimeError: another rank's error, weights that some ranks alone have written since the last step, or files
            that could not be written, now or by the asynchronous save before; the message has the reason.
    """
    group = group_of(optimizer)
    doing = f"save a checkpoint to {path}"
    with together(group, doing, _SAVES) as lines:
        target = Path(os.path.abspath(path))
        last = finish_last(group)
        _KEEP("keep", keep)
        check_target(target)
        optimizers, schedulers = check_arguments(model, optimizer, scheduler, rank_state)
        for each in optimizers.values():
            each.refuse_undefined("save_checkpoint")
        contents = Contents(model, optimizers)
        lines.marked = has_written(optimizers.values())
        lines += [f"path {target}", f"async_save={async_save}, keep={keep}, exclude_frozen={exclude_frozen}"]
        lines += [names_text(optimizers, "optimizer"), *contents.lines()]
        saving = Saving(target, last if async_save else None)
    for each in optimizers.values() if lines.marked else ():
        each.guard.refuse_uneven(doing, each.sharded_groups)
    contents.meet(doing, exclude_frozen)
    with together(group, doing, STATES) as lines:
        share = _prepare(contents, schedulers, extra, rank_state, saving if async_save else None, lines)
    _tell_untrained(contents)
    runs, serial = run_of(group, optimizers)
    experts = {each.path: each for of_rank in from_all_ranks(contents.groups, share.experts) for each in of_rank}
    share.plan += (experts[path] for path in sorted(experts))
    writer = CheckpointWriter(target, group, _manifest(contents, runs, serial), share, keep)
    if async_save:
        saving.start(writer.write)
        context_of(group.group).writing = saving
    else:
        saving.set_result(writer.write())
    return saving


class Saving(Background[Path]):
    """A checkpoint that is being written: a future of its path.

    ``done()`` tells whether it is there, or has failed; ``result()`` is ``wait()``.

    Attributes:
        path: where it will be.
        staging: memory of the host for what is written while training goes on; the next asynchronous save uses it
            again. None: nothing has been copied.
    """

    def __init__(self, path: Path, last: Saving | None) -> None:
        super().__init__()
        self.path = path
        self.staging: Tensor | None = None if last is None else last.staging

    def wait(self) -> Path:
        """Wait until the checkpoint is written, and return its path.

        Raises:
            RuntimeError: it could not be written, on whichever rank; raised on all.
        """
        return self.result()

    def stage(self, values: Mapping[Keys, Tensor]) -> dict[Keys, Tensor]:
        """Copy 1-D ``values`` to the host, wait, and return the copies, in the last save's memory if it is enough.

        It is pinned where values come from a device. Returns when the values may change.
        """
        places, end = {}, 0
        for keys, value in values.items():
            places[keys] = slice(end, end + value.nbytes)
            end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        devices = {value.device for value in values.values()}
        pins = streams_of(devices).pins
        staging = self.staging
        if staging is None or staging.nbytes < end or staging.is_pinned() != pins:
            self.staging = staging = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pins)
        copies = {keys: staging[places[keys]].view(value.dtype) for keys, value in values.items()}
        for keys, copy in copies.items():
            copy.copy_(values[keys].detach(), non_blocking=True)
        for device in devices:  # a frozen parameter or a buffer may be on another than what is trained
            streams_of([device]).mark().synchronize()
        return copies


def _prepare(
    contents: Contents,
    schedulers: Mapping[Name, Any],
    extra: Any,
    rank_state: dict[str, Any] | None,
    staging: Saving | None,
    lines: list[str],
) -> Share:
    """Return the tensors and files that this rank writes, copied to the host if ``staging``; add states to ``lines``.

    ``staging``: the save that holds the copies. None: all is written before training goes on.
    """
    rank = contents.group.group_rank
    settings = {name: _settings(contents, name, schedulers[name]) for name in contents.optimizers}
    objects = Objects(settings, contents.extra_states, extra)
    content = objects.to_bytes()
    share = contents.share()
    lines += [line for each in contents.optimizers.values() for line in lines_of_others(each.optim)]
    lines += [f"{name_of(each.path)} {each.dtype} {each.shape}" for each in share.plan if each.path[0] == "optim"]
    if rank_state is not None:
        share.files[RANK_STATE.format(rank)] = packed(rank_state, "rank_state")
    if rank == 0:
        share.files[OBJECTS] = content
        for keys, value in objects.by_keys().items():
            if isinstance(value, Tensor):
                share.add(keys, value, [0])
            else:
                share.pickles[keys] = saved_bytes(value)
    if staging is not None:
        share.values = staging.stage(share.values)
    return share


def finish_last(group: ShardGroup) -> Saving | None:
    """Wait for this group's asynchronous save, raise its error if nobody has been told of it yet, and return it."""
    last = context_of(group.group).writing
    if not isinstance(last, Saving):
        return None
    known, error = last.told, last.exception()
    if error is not None and not known:
        raise RuntimeError(
            f"expected the asynchronous save before to have succeeded, it failed ({error}): mend it, and save again"
        ) from error
    return last


def run_of(
    group: ShardGroup, optimizers: Mapping[Name, LowLevelZeroOptimizer], others: Sequence[str] = (), serial: int = 0
) -> tuple[tuple[str, ...], int]:
    """Store in the optimizers, and return, the ids of their run and of earlier ones, and a checkpoint's serial number.

    The first call communicates: the first rank names the run. ``others``: runs that it goes on from. ``serial``: the
    loaded checkpoint's; 0: a checkpoint is to be saved, and gets a new one.
    """
    known = [run for optimizer in optimizers.values() for run in optimizer.runs]
    known = known or [f"{group.from_rank_zero([secrets.randbits(62)])[0]:016x}"]
    newest = max(optimizer.serial for optimizer in optimizers.values())
    newest = max(serial, newest) if serial else max(time.time_ns(), newest + 1)
    run = tuple(dict.fromkeys((*known, *others))), newest
    for optimizer in optimizers.values():
        optimizer.runs, optimizer.serial = run
    return run


def _tell_untrained(contents: Contents) -> None:
    """Warn on the first rank if parameters that require gradients are trained by none of the optimizers."""
    untrained = [name for name, tensor in contents.saved.items() if tensor.kind == UNTRAINED]
    if untrained and contents.group.group_rank == 0:
        _log.warning(
            "save_checkpoint: no optimizer that was given trains %s, ... (%d parameters that require gradients): their "
            "values are saved, but no state of an optimizer: pass all optimizers together, as in [muon, adamw]",
            untrained[0],
            len(untrained),
        )


def _settings(contents: Contents, name: Name, scheduler: Any) -> Settings:
    """Return one optimizer's settings, its scheduler's state and the options that its layout depends on."""
    optimizer = contents.optimizers[name]
    splits = ((record.name, record.split) for record in optimizer.sharded_parameters)
    told = {name: (split.by, split.owner, split.multiple, split.costs) for name, split in splits}
    layout = {
        "communication_dtype": optimizer.options.communication.dtype,
        "fp8_communication": optimizer.options.communication.fp8,
        "master_weights": optimizer.options.master_weights,
        "cpu_offload": optimizer.options.cpu_offload,
        "splits": {name: split for name, split in told.items() if split != (BY_ELEMENTS, None, 1, ())},
    }
    return {
        **contents.states_of[name].settings(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "options": layout,  # loading needs neither this nor what follows
        "stage": optimizer.options.stage,
        "slices": optimizer.shard_group.size,
    }


def _manifest(contents: Contents, runs: tuple[str, ...], serial: int) -> Manifest:
    """Return the manifest of a checkpoint to be written, yet without its files' sizes and checksums."""
    return Manifest(
        version=__version__,
        torch=torch.__version__,
        world_size=contents.group.ranks,
        stage=next(iter(contents.optimizers.values())).options.stage,
        saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        serial=serial,
        tensors={name: tensor for name, tensor in contents.saved.items() if name not in contents.excluded},
        tied=contents.tied,
        files={},
        experts=contents.experts,
        excluded=contents.excluded,
        runs=runs,
    )
