"""Loading a checkpoint: everything is read and checked beside what is there, and taken over when all ranks can."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from ..communication.collectives import ShardGroup
from ..communication.roll_call import call_roll
from ..construction import together
from ..optimizer import LowLevelZeroOptimizer
from ..sharded_state import unpacked
from .contents import Contents, check_pair
from .folders import locate
from .manifest import METADATA, OBJECTS, Manifest, read_manifest
from .metadata import read_metadata
from .saving import wait_for_last
from .storage import PlainReader


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: LowLevelZeroOptimizer,
    *,
    scheduler: Any = None,
    timeout: float = 20.0,
    verify: bool = True,
) -> Any:
    """Load what ``save_checkpoint`` saved, at any world size, stage and bucket size; every rank calls it.

    Each rank reads its own slices. Gradients are cleared. Nothing in a checkpoint is run: its pickles are read as
    data alone.

    Args:
        path: the checkpoint; ``latest(directory)`` finds one.
        model: the same model.
        optimizer: one with the same param groups; of another dtype, stage or bucket size if you like.
        scheduler: the same, if one was saved.
        timeout: seconds to wait for the other ranks to call this.
        verify: read every file once more beforehand, the ranks sharing them out, and compare its checksum. Sizes
            are compared in any case.

    Returns:
        The ``extra`` that was saved.

    Raises (on every rank alike, and nothing has been changed then):
        TimeoutError: not every rank called it; the message says which did.
        TypeError: what isn't a model or optimizer.
        ValueError: another model's checkpoint, a damaged one, or none of this package's; the message names the
            first thing that is wrong.
        FileNotFoundError, NotADirectoryError: there is none at ``path``.
        RuntimeError: another rank's error.
    """
    check_pair(model, optimizer)
    group = optimizer._group
    wait_for_last(group)
    call_roll(group.group, "load_checkpoint", timeout)
    optimizer._force_wait_all_gather()
    doing = f"load the checkpoint {path}"
    with together(group, doing) as lines:
        saved = _open(Path(os.path.abspath(path)))
        lines += [f"path {path}", f"serial {saved.manifest.serial}, scheduler {scheduler is not None}"]
    with together(group, doing):
        _check_files(saved, group, verify)
        objects = read_objects(saved.folder)
        contents = Contents(model, optimizer)
        metadata = read_metadata(saved.folder)
    contents.meet(doing)
    with together(group, doing):
        templates = _matching_templates(saved, objects, metadata, contents, scheduler)
    _read(saved.folder, metadata, templates, group)
    before = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    try:
        with together(group, doing):
            tensors = contents.in_own_order(templates, saved.manifest.tensors)
            if scheduler is not None:
                scheduler.load_state_dict(objects["scheduler"])
    except Exception:
        if scheduler is not None:
            scheduler.load_state_dict(before)
        raise
    optimizer.zero_grad()
    contents.put(tensors, objects)
    return objects["extra"]


def read_objects(folder: Path) -> dict[str, Any]:
    """What isn't a tensor of the model or the optimizer, of the checkpoint ``folder``; nothing in it is run.

    Raises:
        ValueError: it is damaged, or something else.
        OSError: it can't be read.
    """
    data = (folder / OBJECTS).read_bytes()
    try:
        objects = unpacked(data)
    except Exception as error:  # a damaged or hostile pickle may raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"{folder / OBJECTS}: refused, it is damaged or not data alone: {reason:.300}") from error
    expected = {"param_groups", "loss_scale", "plan", "states", "model", "extra", "scheduler"}
    if not isinstance(objects, dict) or not expected <= objects.keys():
        raise ValueError(f"{folder / OBJECTS}: expected {sorted(expected)} in it, got something else")
    return objects


class _Saved(NamedTuple):
    """A checkpoint that was found."""

    folder: Path
    manifest: Manifest


def _open(path: Path) -> _Saved:
    folder = locate(path)
    return _Saved(folder, read_manifest(folder))


def _check_files(saved: _Saved, group: ShardGroup, verify: bool) -> None:
    """Raise ``ValueError`` unless the files are what was written; checksums are this rank's share alone."""
    wrong = saved.manifest.first_missing(saved.folder)
    if wrong is None and verify:
        wrong = saved.manifest.first_damaged(saved.folder, sorted(saved.manifest.files)[group.place :: group.ranks])
    if wrong is not None:
        raise ValueError(f"{saved.folder}: damaged: {wrong}; load another, or copy it anew")


def _matching_templates(
    saved: _Saved, objects: Mapping[str, Any], metadata: Metadata, contents: Contents, scheduler: Any
) -> dict[str, Tensor]:
    """Tensors to load into, when the checkpoint is the model's; else ``ValueError``."""
    contents.check_same(saved.manifest)
    contents.state.check(objects)
    if scheduler is not None and objects["scheduler"] is None:
        raise ValueError(f"scheduler: {saved.folder} was saved without one: leave it out, or save with scheduler=")
    known = metadata.state_dict_metadata
    templates = contents.templates(saved.manifest.tensors, known)
    for name, template in templates.items():
        entry = known.get(name)
        if not isinstance(entry, TensorStorageMetadata) or entry.size != template.shape:
            raise ValueError(f"{saved.folder / METADATA}: expected {name} of {tuple(template.shape)} in it: damaged")
    for info in (metadata.storage_data or {}).values():
        if info.relative_path not in saved.manifest.files:
            raise ValueError(f"{saved.folder / METADATA}: names {info.relative_path}, which isn't the checkpoint's")
    return templates


def _read(folder: Path, metadata: Metadata, templates: dict[str, Tensor], group: ShardGroup) -> None:
    """Fill the templates; an error of one rank is raised on all."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = PlainReader(folder, metadata)
    try:
        with warnings.catch_warnings():
            # torch 2.5, say, warns where ranks want different names, as they do with experts, and reads them all.
            warnings.filterwarnings("ignore", "Detected mismatched keys in state dict", UserWarning)
            dcp_load(templates, storage_reader=reader, planner=planner, process_group=group.apart())
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise ValueError(f"{folder}: damaged, rank {rank} could not read it: {cause}") from error
