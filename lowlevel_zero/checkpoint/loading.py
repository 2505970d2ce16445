"""Loading a checkpoint: every rank checks everything first; then each reads its slices into place."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from operator import ior
from pathlib import Path
from typing import Any

from torch import nn

from ..bookkeeping.step_state import Damage
from ..communication.agreement import together
from ..layout.text import counted, ranks_text
from ..optimizer import LowLevelZeroOptimizer
from ..state.loading import all_or_nothing, warn_of_lost_states
from .contents import Contents
from .folders import locate, on_first_rank
from .manifest import RANK_STATE, Manifest, read_manifest
from .objects import Extra, read_data
from .optimizers import Name, Optimizers, called, check_arguments, check_names, group_of, names_text
from .saved import SavedCheckpoint
from .saving import finish_last, run_of

_log = logging.getLogger("lowlevel_zero")

_AS_SAVED = "pass them as they were passed to save_checkpoint"


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers,
    *,
    scheduler: Any = None,
    rank_state: dict[str, Any] | None = None,
    verify: bool = True,
) -> Extra:
    """Load what ``save_checkpoint`` saved, at any world size, stage and bucket size; every rank calls it.

    Each rank reads its own slices. Gradients are cleared. Nothing in a checkpoint is run: its pickles are read as
    data alone. Names are the model's own, whatever wraps it or modules in it, or did when it was saved.

    Args:
        path: the checkpoint, or a directory of them, of which the newest whole one is loaded: the one that rank 0 sees.
        model: the same model. It keeps its own values of parameters that ``exclude_frozen`` left out.
        optimizer: one with the same param groups; of another dtype, stage or bucket size if you like. Of several that
            were saved as many in a list, or a dict with the same names.
        scheduler: the same, if one was saved; of several optimizers a list or a dict, as when they were saved.
        rank_state: a dict, which is emptied, and filled with the ``rank_state`` that this rank saved. At another number
            of ranks, rank r gets that of the old rank r; a warning lists ranks without one.
        verify: read every file once more beforehand, the ranks sharing them out, and compare its checksum. Sizes
            are compared in any case.

    Returns:
        The ``extra`` that was saved.

    All ranks raise alike, and nothing has been changed then, unless a file that was checked can't be read to its end.

    Raises:
        TypeError: the model or an optimizer is of another type.
        ValueError: another model's checkpoint, a damaged one, or none of this package's; the message names the
            first thing that is wrong.
        FileNotFoundError, NotADirectoryError: there is none at ``path``.
        RuntimeError: another rank's error, or an asynchronous save before that failed, which nobody has been told.
    """
    group = group_of(optimizer)
    doing = f"load the checkpoint {path}"
    with together(group, doing) as lines:
        place = Path(os.path.abspath(path))
        finish_last(group)
        optimizers, given = check_arguments(model, optimizer, scheduler, rank_state)
        schedulers = {name: each for name, each in given.items() if each is not None}
        for each in optimizers.values():
            each.guard.enter("load_checkpoint")
        lines += [f"path {path}", f"{names_text(optimizers, 'optimizer')}, {names_text(schedulers, 'scheduler')}"]
    folder = on_first_rank(group, lambda: locate(place))
    with together(group, doing) as lines:
        saved = SavedCheckpoint(folder)
        files = saved.manifest.files
        saved.manifest.check_files(folder, sorted(files)[group.group_rank :: group.ranks], verify)
        check_names("optimizer", optimizers, saved.objects.optimizers, "with which the checkpoint was saved", _AS_SAVED)
        own = {} if rank_state is None else _state_of(folder, saved.manifest, group.group_rank)
        contents = Contents(model, optimizers)
        lines += [f"serial {saved.manifest.serial}", *contents.lines()[:1]]
    contents.meet(doing)
    with all_or_nothing(group, doing) as undo:
        contents.check_same(saved, schedulers)
        contents.load_objects(saved, schedulers, undo)
        if rank_state is not None:
            undo.callback(ior, rank_state, dict(rank_state))
            undo.callback(rank_state.clear)
            rank_state.clear()
            rank_state.update(own)
    with _damaging(optimizers.values()):
        for each in optimizers.values():
            each.zero_grad()
        with together(group, doing):
            contents.read(saved)
        contents.gather(saved.objects)
    warn_of_lost_states(group, contents.lost(saved))
    run_of(group, optimizers, saved.manifest.runs, saved.manifest.serial)
    if group.group_rank == 0:
        _tell(saved, group.ranks, rank_state is not None, optimizers.keys() - schedulers.keys())
    return saved.objects.extra


@contextmanager
def _damaging(optimizers: Collection[LowLevelZeroOptimizer]) -> Iterator[None]:
    """Note on this rank, if the body raises, that parameters are undefined: each later call asks for a checkpoint."""
    try:
        yield
    except BaseException as error:  # of whatever type, an interrupt too: a part of the checkpoint has been loaded
        for each in optimizers:
            each.step_state.failure.note(error, Damage.PARAMETERS)
        raise


def read_rank_state(path: str | os.PathLike[str], rank: int) -> dict[str, Extra]:
    """Return the ``rank_state`` that rank ``rank`` gave ``save_checkpoint``, or an empty dict. One process may call it.

    Args:
        path: as ``load_checkpoint``'s.

    Raises:
        ValueError, OSError: it is damaged, or there is no checkpoint.
    """
    folder = locate(Path(os.path.abspath(path)))
    return _state_of(folder, read_manifest(folder), rank)


def _state_of(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    """Check and read the state that ``rank`` saved for itself; an empty dict if it saved none."""
    name = RANK_STATE.format(rank)
    if name not in manifest.files:
        return {}
    manifest.check_files(folder, [name])
    state = read_data(folder / name)
    assert isinstance(state, dict)
    return state


def _tell(saved: SavedCheckpoint, ranks: int, wants_states: bool, unscheduled: Collection[Name]) -> None:
    """Log which parameters the checkpoint lacks, and which schedulers and ranks' own states of it weren't loaded.

    ``unscheduled``: the optimizers for which no scheduler was passed.
    """
    left = [name for name in unscheduled if saved.objects.optimizers[name]["scheduler"] is not None]
    if left:
        _log.warning(
            "load_checkpoint: the checkpoint has the state of a learning-rate scheduler, %s, which wasn't passed: pass "
            "scheduler=..., or its schedule begins anew",
            ", ".join(sorted(called(name, "scheduler") for name in left)),
        )
    if left_out := saved.manifest.excluded:
        text = "%s was saved without %s (exclude_frozen=True), which keep the values that the model has: %s"
        _log.warning(text, saved.path, counted(len(left_out), "frozen parameter"), ", ".join(left_out))
    states = saved.manifest.rank_states
    if wants_states and states != list(range(ranks)):
        text = f"{ranks} ranks load: " + (f"saved by {ranks_text(states)}" if states else "none was saved")
        if without := sorted({*range(ranks)} - {*states}):
            text += f"; ranks {ranks_text(without)} are given none"
        if surplus := [rank for rank in states if rank >= ranks]:
            text += f"; those of ranks {ranks_text(surplus)} are given to nobody: see read_rank_state"
        _log.warning("%s: rank_state: %s", saved.path, text)
    elif states and not wants_states:
        _log.info("%s: it has states of ranks' own, which nobody has asked for: pass rank_state={} to fill", saved.path)
