"""An optimizer for one's own ``dcp.save``, ``dcp.async_save`` and ``dcp.load``, beside a model's state dict."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn import Parameter

from ..bookkeeping.module_names import named_tensors
from ..bookkeeping.sharding import distinct
from ..communication.agreement import together
from ..optimizer import LowLevelZeroOptimizer
from ..state.global_names import GlobalNames
from ..state.sharded import ShardedState
from ..state.whole import FP8, restore_masters
from .objects import packed, unpacked

# torch's loader refuses a name that a checkpoint lacks. So what plain optimizers don't have (loss scale, bucket plan)
# has no name of its own: it is one more entry of the first group's "params", which is nobody's name.
_MARK = "lowlevel_zero:"


class Sharded(Stateful):
    """The state of ``optimizer``, by the names that torch's ``get_state_dict`` gives it; every rank calls it.

    ``state.<parameter>.<key>`` has the parameter's shape, and each rank has its boxes of it. So it loads at any
    number of ranks, into a fresh optimizer too, and FSDP2 and DDP load it by name, as this loads theirs::

        state = {"model": model.state_dict(), "optim": Sharded(optimizer)}
        dcp.save(state, checkpoint_id=path)
        dcp.load(state, checkpoint_id=path)

    The optimizer needs to have been given its ``model``, which has the names.

    ``dcp.load`` reads into the live state, and asks afterwards whether it fits: what had been read by then stays where
    ``load_state_dict`` refuses the rest. ``load_checkpoint`` reads beside it, and changes nothing when it refuses.
    """

    def __init__(self, optimizer: LowLevelZeroOptimizer) -> None:
        self.optimizer = optimizer
        self._own = ""  # what state_dict() has given last, to tell it from what was loaded in its place

    def state_dict(self) -> dict[str, Any]:
        """What it holds, and zeros for states that a step is going to make; to save, or to load into.

        Tensors share memory with the optimizer's. Masters have followed what others wrote into parameters. On every
        rank the model's persistent buffers become those of the first rank that shares them, as DDP makes them before
        a forward: torch saves each of ``model.state_dict()``'s tensors from any rank.

        Raises:
            TypeError: a setting that ``torch.load(weights_only=True)`` would not take back.
            ValueError: a state's name has a dot in it.
        """
        _share_buffers(self.optimizer)
        sharded = ShardedState(self.optimizer, _names(self.optimizer))
        fp8 = self.optimizer.options.fp8_communication
        settings = {**sharded.settings(), "present": sharded.present, FP8: fp8}
        groups = settings.pop("param_groups")
        own = base64.b64encode(packed(settings, "the optimizer's settings")).decode()
        self._own = f"{_MARK}{own}"
        groups[0]["params"].append(self._own)
        return {"state": {**sharded.tensors(), **sharded.room()}, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave and ``dcp.load`` filled. Gradients are cleared.

        The model may be loaded before or after.

        Raises:
            ValueError: it is of other parameters, shapes or groups; see above for what ``dcp.load`` has done by then.
        """
        settings = self._settings(state_dict["param_groups"])
        sharded = ShardedState(self.optimizer, _names(self.optimizer))
        sharded.check(settings)
        slices = sharded.slices(state_dict["state"], settings)
        self.optimizer.zero_grad()
        sharded.load(slices, settings)
        restore_masters(slices, settings[FP8])

    def _settings(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """The settings of what was saved; plain ones of what another optimizer has saved, be it with groups or not."""
        marks = [name for group in groups for name in group["params"] if name.startswith(_MARK)]
        saved = [mark for mark in marks if mark is not self._own]
        named = [{**group, "params": [name for name in group["params"] if name not in marks]} for group in groups]
        plain: dict[str, Any] = {"loss_scale": None, "plan": None, "other_plans": [], "states": {}, FP8: False}
        own = unpacked(base64.b64decode(saved[0].removeprefix(_MARK))) if saved else {}
        return {**plain, **own, "param_groups": named}


def _share_buffers(optimizer: LowLevelZeroOptimizer) -> None:
    """Overwrite the model's persistent buffers with those of the first rank that shares them. Communicates."""
    tensors = () if optimizer.model is None else named_tensors(optimizer.model, persistent=True)
    buffers = {tensor: name for name, tensor in tensors if not isinstance(tensor, Parameter)}
    store = optimizer.sharded_parameters
    for number, ranks in enumerate(store.shard_groups):
        own = {each: name for each, name in buffers.items() if store.shard_group_of(each) == number}
        with together(ranks, "give the state of its optimizer") as lines:
            lines += [f"{name} {each.dtype} {tuple(each.shape)}" for each, name in own.items()]
        with torch.no_grad():
            ranks.broadcast([distinct(each.detach()) for each in own], optimizer.device)


def _names(optimizer: LowLevelZeroOptimizer) -> dict[Tensor, str]:
    """The global names of parameters. Communicates with experts."""
    parameters, own = optimizer.sharded_parameters, optimizer.parameter_names()
    numbers = {name: parameters.shard_group_of(p) for p, name in own.items()}
    names = GlobalNames(parameters.shard_groups, numbers)
    return {p: names[name] for p, name in own.items()}
