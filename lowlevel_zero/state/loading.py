"""Loading states into slices, for whole state dicts and sharded ones: all ranks load, or none does."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from numbers import Number
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..communication.agreement import Alike, together
from ..communication.shard_group import ShardGroup
from ..optim.quantised import block_size, quantised_state
from ..optim.trials import missing_in
from .nested import State
from .values import Slice, whole_slices

_log = logging.getLogger("lowlevel_zero")

MASTER = "master_param"
# The key of the entries that a plain optimizer's state dict doesn't have, and ignores.
EXTRAS = "lowlevel_zero"
PLANS = "plans"  # of buckets, one for each shard group that has learnt one
# Whether parameters travelled in fp8, so that they are further from their masters than their dtype rounds. What doesn't
# say so counts as without fp8: a model trained elsewhere may have many numbers that fp8 can hold, by chance.
FP8 = "fp8"
OTHERS = "others"  # states of no parameter
# Among those: what the class adds to its own state dict, beside states and groups.
ADDED = "lowlevel_zero.added"
CLASS = "class"  # the name of the wrapped optimizer's

STATES = Alike(
    "the same states of the optimizer",
    "let a hook that adds some do so on every rank, and a class count the same whatever a rank owns, or keep them "
    "somewhere else",
)
_SAME_CLASS = "build the optimizer that was saved, or load the model alone"


@contextmanager
def all_or_nothing(group: ShardGroup, doing: str) -> Iterator[ExitStack]:
    """Yield a stack of undo callbacks, which run on all ranks if the body raises on one. Communicates.

    If it raises on none, the stack lets go of its callbacks.
    """
    undo = ExitStack()
    try:
        with together(group, doing):
            yield undo
    except BaseException:
        with suppress(Exception):  # a caller's object may refuse its former state, too
            undo.close()
        raise
    undo.pop_all()


def states_of_no_parameter(optim: Optimizer) -> State:
    """Return states under keys other than parameters, and under ``ADDED`` a class's entries of its state dict.

    ``ValueError`` if those entries have tensors of several elements, which may be slices.
    """
    others = {str(key): value for key, value in optim.state.items() if not isinstance(key, Tensor)}
    if type(optim).state_dict is Optimizer.state_dict:
        return others
    added = added_to(optim.state_dict())
    for key, value in added.items():
        if any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(value)):
            raise ValueError(
                f"{key}: expected {type(optim).__name__}.state_dict to add numbers to the state dict, got tensors, of "
                "which each rank may have a slice: keep them in its state, by parameter"
            )
    return {**others, **({ADDED: added} if added else {})}


def lines_of_others(optim: Optimizer) -> list[str]:
    """Return a line for each number in states of no parameter, for the ranks to compare: the first rank's are saved."""
    others = states_of_no_parameter(optim)
    held = {key: value for key, value in others.items() if key != ADDED}
    named = (("state", held), (f"{type(optim).__name__}.state_dict()", others.get(ADDED, {})))
    return sorted(
        f"{name}{keystr(path)}: {_told(leaf)}"
        for name, entries in named
        for path, leaf in tree_flatten_with_path(entries)[0]
    )


def _told(leaf: object) -> str:
    """Return a number as text, of whatever device, or else a type: text may name an expert, and objects an address."""
    if isinstance(leaf, Tensor):
        return repr(leaf.tolist())
    return repr(leaf) if isinstance(leaf, (Number, NoneType)) else type(leaf).__name__


def added_to(state_dict: Mapping[str, Any]) -> State:
    """Return what an optimizer's class adds to its state dict, besides states, groups and this package's entries."""
    return {key: value for key, value in state_dict.items() if key not in ("state", "param_groups", EXTRAS)}


def load_slices(
    optim: Optimizer,
    parameters: ParameterStore,
    param_groups: Sequence[Mapping[str, Any]],
    states: Mapping[ShardedParameter, State],
    others: Mapping[str, Any],
    undo: ExitStack,
) -> None:
    """Load states of slices, except masters, and param groups by ``optim.load_state_dict``, which casts the states.

    ``others`` are states of no parameter. ``undo`` gets a callback that restores the former states and attributes,
    since hooks of the caller may raise.
    """
    place = {p32: at for at, p32 in enumerate(p32 for group in optim.param_groups for p32 in group["params"])}
    groups = [
        {**_placed(dict(saved), held), "params": [place[p32] for p32 in held["params"]]}
        for saved, held in zip(param_groups, optim.param_groups, strict=True)
    ]
    state: dict[Any, Any] = copy.deepcopy(dict(others))
    added = state.pop(ADDED, {})
    for p32, at in place.items():
        of_slice = {key: v for key, v in states.get(parameters[p32], {}).items() if key != MASTER}
        if of_slice:
            state[at] = quantised_state(optim, p32, of_slice)
    former = {**vars(optim), "state": optim.state, "param_groups": optim.param_groups}
    undo.callback(vars(optim).update, former)
    optim.load_state_dict({**added, "state": state, "param_groups": groups})


def _placed(saved: Any, held: Any) -> Any:
    """Return ``saved`` settings with each tensor on the device of the setting in ``held`` that it replaces."""
    if isinstance(saved, Tensor) and isinstance(held, Tensor):
        return saved.to(held.device)
    if type(saved) is type(held) is dict:
        return {key: _placed(value, held.get(key)) for key, value in saved.items()}
    if type(saved) is type(held) and type(saved) in (tuple, list) and len(saved) == len(held):
        return type(saved)(map(_placed, saved, held))
    return saved


def restore_masters(parameters: ParameterStore, states: Mapping[ShardedParameter, State], fp8: bool) -> None:
    """Restore saved masters, by element, where they round to the parameter. Communicates if some parameters are fp32.

    A parameter that is fp32 itself becomes its master where it was loaded from what 16 bits had kept of it. Every rank
    calls it, with the masters of the same parameters.
    """
    wide: list[list[Slice]] = [[] for _ in parameters.shard_groups]
    for record in sorted((record for record in states if MASTER in states[record]), key=lambda record: record.index):
        if record.keeps_more:
            record.restore_master(states[record][MASTER], fp8)
        elif takes_master(record):
            wide[record.shard_group].append(Slice.of_row(record, states[record][MASTER]))
    for slices, group in zip(wide, parameters.shard_groups, strict=True):
        for each, master in zip(slices, whole_slices(slices, group), strict=True):
            for dtype in (torch.bfloat16, torch.float16):
                p = each.record.p.detach()
                p.copy_(torch.where(p == master.to(dtype), master, p))


def takes_master(record: ShardedParameter) -> bool:
    """Return whether a saved fp32 master can be loaded here: as a master, or into an fp32 parameter itself."""
    return record.keeps_more or record.p32.dtype.itemsize >= torch.float32.itemsize


def warn_of_lost_states(group: ShardGroup, names: Sequence[str]) -> None:
    """Warn on the first rank of parameters whose saved states weren't loaded."""
    if names and group.group_rank == 0:
        _log.warning(
            "%s: trained when it was saved, and by no optimizer here, so that its state (and that of %d more) isn't "
            "loaded, and is missing from what is saved next: if it is to be trained, set requires_grad=True before "
            "constructing the optimizer",
            names[0],
            len(names) - 1,
        )


def check_class(
    optim: Optimizer, saved: str | None, param_groups: Sequence[Mapping[str, Any]], keys: Mapping[int, Collection[str]]
) -> None:
    """Raise ``ValueError`` if the saved state is of another class, or of an unknown one and a trial can't step it.

    Args:
        optim: the wrapped optimizer.
        saved: the class's name; None: nobody has recorded it, as in plain torch's state dicts. Then a small optimizer
            of this class tries what was saved, unless the class loads state dicts by a method of its own.
        param_groups: the settings.
        keys: by group, those of the state of a parameter that is split evenly.
    """
    own = type(optim).__name__
    if saved is not None and saved != own:
        raise ValueError(f"expected the state of this class of optimizer, {own}, got that of {saved}: {_SAME_CLASS}")
    knows_its_own = type(optim).load_state_dict is not Optimizer.load_state_dict
    untried = saved or knows_its_own or block_size(optim) > 1
    missing = None if untried else missing_in(optim, param_groups, keys)
    if missing is not None:
        raise ValueError(
            f"expected the state of this class of optimizer, {own}, got one that has no {missing}, without which it "
            f"can't step: {_SAME_CLASS}"
        )
