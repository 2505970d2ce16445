"""``Sharded``: an optimizer's state for your own ``dcp.save``, ``dcp.async_save`` and ``dcp.load``."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn import Parameter
from torch.optim.optimizer import StateDict

from ..bookkeeping.module_names import named_tensors
from ..bookkeeping.sharded_parameter import ShardedParameter
from ..communication.agreement import together
from ..communication.broadcast import Broadcast
from ..communication.failed_ranks import run_each
from ..communication.shard_group import ShardGroup
from ..construction.sharding import distinct
from ..optimizer import LowLevelZeroOptimizer
from ..state.global_names import global_names
from ..state.loading import (
    FP8,
    MASTER,
    STATES,
    all_or_nothing,
    lines_of_others,
    restore_masters,
    takes_master,
    warn_of_lost_states,
)
from ..state.nested import State
from .objects import packed, unpacked
from .optimizers import has_written
from .sharded_state import PLAIN, ShardedState

_log = logging.getLogger("lowlevel_zero")

# torch's loader refuses a name that a checkpoint lacks. So what plain optimizers don't have (loss scale, bucket plan)
# has no name of its own: it is one more entry of the first group's "params", which no parameter has as its name.
_MARK = "lowlevel_zero:"
_GIVE = "give the state of its optimizer"


class Sharded(Stateful):
    """The state of ``optimizer``, by the names that torch's ``get_state_dict`` gives it; every rank calls it.

    ``state.<parameter>.<key>`` has the parameter's shape, and each rank has its boxes of it. So it loads at any
    number of ranks, into a fresh optimizer too, and FSDP2 and DDP load it by name, as this loads theirs::

        state = {"model": model.state_dict(), "optim": Sharded(optimizer)}
        dcp.save(state, checkpoint_id=path)
        dcp.load(state, checkpoint_id=path)

    The optimizer needs to have been given its ``model``, which has the names.

    ``dcp.load`` reads beside the optimizer's state, which is taken over when no rank refuses it. Into the tensors of
    ``model.state_dict()`` torch reads by itself, before anybody can refuse them.
    """

    def __init__(self, optimizer: LowLevelZeroOptimizer) -> None:
        self.optimizer = optimizer
        self._own = ""  # the mark that state_dict() returned last: a loaded one is another object

    def state_dict(self) -> StateDict:
        """Broadcast the model's buffers; return the state to save or load into, zeros where none is yet. Communicates.

        Slices share memory with the optimizer's. Where parameters have been written, masters are what the next step
        makes of them. On every rank the model's persistent buffers become those of the first rank that shares them, as
        DDP makes them before a forward: torch saves each of ``model.state_dict()``'s tensors from any rank.

        Raises (on all ranks):
            TypeError: a setting that ``torch.load(weights_only=True)`` would not take back.
            ValueError: a state's name has a dot in it, a name is taken, or ranks' state dicts have other added numbers.
            RuntimeError: some ranks alone have written weights since the last step.
        """
        _share_buffers(self.optimizer)
        sharded = _state_of(self.optimizer)
        with together(self.optimizer.shard_group, _GIVE, STATES) as lines:
            lines += lines_of_others(self.optimizer.optim)
            fp8 = self.optimizer.options.communication.fp8
            settings = {**sharded.settings(), "present": sharded.present, FP8: fp8}
            groups = settings.pop("param_groups")
            own = base64.b64encode(packed(settings, "the optimizer's settings")).decode()
            self._own = f"{_MARK}{own}"
            groups[0]["params"].append(self._own)
            state = sharded.tensors()
            for name, room in sharded.room().items():  # beside a master, which may be there already
                state[name] = {**room, **state.get(name, {})}
            return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave and ``dcp.load`` filled, on all ranks or none; clear gradients. Communicates.

        The model may be loaded before or after.

        Raises (on all ranks; nothing has been changed then):
            ValueError: it is of another class, or of other parameters, shapes or groups.
        """
        sharded = _state_of(self.optimizer)
        with all_or_nothing(self.optimizer.shard_group, "load the state of its optimizer") as undo:
            self.optimizer.guard.enter("Sharded.load_state_dict")
            settings = self._settings(state_dict["param_groups"])
            sharded.check(settings, state_dict["state"])
            slices = sharded.slices({name: dict(each) for name, each in state_dict["state"].items()}, settings)
            sharded.load(slices, settings, undo)
        self.optimizer.zero_grad()
        sharded.load_progress(settings)
        restore_masters(self.optimizer.sharded_parameters, slices, settings[FP8])
        present = settings.get("present", {})
        warn_of_lost_states(self.optimizer.shard_group, sharded.lost(settings, present))
        self._warn_of_masters([name for name, keys in present.items() if MASTER in keys], slices)

    def _warn_of_masters(self, saved: Sequence[str], slices: Mapping[ShardedParameter, State]) -> None:
        """Warn on the first rank of the first fp32 master that was ``saved`` but has no place in an fp32 run."""
        lost = [r.name for r, state in slices.items() if r.name in saved and takes_master(r) and MASTER not in state]
        if lost and self.optimizer.shard_group.group_rank == 0:
            _log.warning(
                "%s: its fp32 master (and that of %d more) was saved, but isn't loaded, since fp32 parameters have "
                "no masters here: training goes on from the saved 16-bit values. To train on from the masters, load "
                "into a model of the saved dtype, save by save_checkpoint, and load that by load_checkpoint",
                lost[0],
                len(lost) - 1,
            )

    def _settings(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """Return settings encoded in an extra name among the groups' ``params``, or defaults, and groups rid of it."""
        marks = [name for group in groups for name in group["params"] if name.startswith(_MARK)]
        saved = [mark for mark in marks if mark is not self._own]
        named = [{**group, "params": [name for name in group["params"] if name not in marks]} for group in groups]
        own = unpacked(base64.b64decode(saved[0].removeprefix(_MARK))) if saved else {}
        return {**PLAIN, FP8: False, **own, "param_groups": named}


def _state_of(optimizer: LowLevelZeroOptimizer) -> ShardedState:
    """Return an optimizer's ``ShardedState``, after ranks have exchanged what only some of them have. Communicates."""
    with together(optimizer.shard_group, _GIVE):
        state = ShardedState(optimizer)
    parameters, own = optimizer.sharded_parameters, optimizer.parameter_names()
    numbers = {name: parameters.shard_group_of(p) for p, name in own.items()}
    names, _ = global_names(parameters.shard_groups, numbers)
    state.meet({p: names[name] for p, name in own.items()})
    return state


def _share_buffers(optimizer: LowLevelZeroOptimizer) -> None:
    """Broadcast persistent buffers from the first rank that has them; raise if shapes differ. Communicates."""
    tensors = () if optimizer.model is None else named_tensors(optimizer.model, persistent=True)
    names, store = {tensor: name for name, tensor in tensors}, optimizer.sharded_parameters
    buffers: list[dict[Tensor, str]] = [{} for _ in store.shard_groups]
    for each, name in names.items():
        if not isinstance(each, Parameter):
            buffers[store.shard_group_of(each)][each] = name
    with together(optimizer.shard_group, _GIVE) as lines:
        optimizer.refuse_undefined("Sharded.state_dict")
        _check_trained(names, store)
        lines.marked = has_written([optimizer])
    if lines.marked:
        optimizer.guard.refuse_uneven(_GIVE, optimizer.sharded_groups)
    with together(optimizer.shard_group, _GIVE):  # ranks of one group don't know what came of another's
        run_each(partial(_share, *each, optimizer.device) for each in zip(store.shard_groups, buffers, strict=True))


def _share(ranks: ShardGroup, buffers: Mapping[Tensor, str], device: torch.device) -> None:
    """Broadcast ``buffers`` from the first of ``ranks``; raise if shapes differ. Communicates."""
    with together(ranks, _GIVE) as lines:
        lines += [f"{name} {each.dtype} {tuple(each.shape)}" for each, name in buffers.items()]
        broadcast = Broadcast(ranks, [distinct(each.detach()) for each in buffers], device)
    broadcast.run()


def _check_trained(names: Mapping[Tensor, str], records: Iterable[ShardedParameter]) -> None:
    """Raise ``ValueError`` if the model has a different parameter under the name of a trained one."""
    trained = {record.name: record.p for record in records}
    for tensor, name in names.items():
        if trained.get(name, tensor) is not tensor:
            raise ValueError(
                f"{name}: expected the parameter that the optimizer trains in the model, got another one: if its layer "
                "was replaced after the optimizer was constructed, construct a new optimizer over model.parameters()"
            )
