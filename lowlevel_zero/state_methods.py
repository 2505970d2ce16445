"""An optimizer's state for its callers: whole, as plain torch has it, and sharded, for torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .agreement import Alike, Call, together
from .bookkeeping.learnt_plan import PlanState
from .bookkeeping.module_names import own_names
from .bookkeeping.parameter_store import ParameterStore
from .communication.collectives import ShardGroup
from .diagnostics.guards import Guard
from .families import Families
from .loss_scaler import LossScaler
from .options import ZeroOptions
from .state.global_names import GlobalNames
from .state.sharded import ShardedState, packed, renamed_settings, scale_as_numbers, unpacked
from .state.whole import Pinned, State, described, load_whole_state_dict, whole_state_dict

# What a plain optimizer's state dict doesn't have, and doesn't mind.
EXTRAS = "lowlevel_zero"
OTHER_PLANS = "other_plans"
# Whether parameters travelled in fp8, so that they are further from their masters than their dtype rounds. What doesn't
# say so counts as of a run without: a model that went on elsewhere has many numbers that fp8 has, by chance.
FP8 = "fp8"

SETTINGS = "settings"
_LENGTH_BYTES = 8

_SAVED = Alike(
    "the same state dict", "load the same file on every rank, whole (saved without only_on_master elsewhere)"
)


class StateMethods:
    """``state_dict``, ``sharded_state_dict`` and their inverses.

    Attributes:
        runs: for checkpoints in files: the run that this optimizer is of, and then those that it went on from.
    """

    runs: tuple[str, ...] = ()

    optim: Optimizer
    _model: nn.Module | None
    _group: ShardGroup
    _options: ZeroOptions
    _scaler: LossScaler | None
    _parameters: ParameterStore
    _families: Families
    _guard: Guard
    zero_grad: Callable[..., None]

    # ---- whole ----

    def state_dict(self, pinned_state_dicts: Pinned | None = None, only_on_master: bool = False) -> State:
        """A plain torch optimizer's state dict with whole tensors on the host; every rank calls it.

        Tensors are gathered one at a time. fp32 masters of 16-bit parameters are one more state of each,
        ``master_param``; the loss scale, the bucket order and whether parameters travelled in fp8 are under the key
        ``lowlevel_zero``. Plain torch ignores both.

        Args:
            pinned_state_dicts: buffers for the tensors, made by the first call and used again by further ones.
            only_on_master: leave the states empty on all ranks but the first.
        """
        self._families.even_out(Call("state_dict"))
        state = whole_state_dict(self.optim, self._parameters, pinned_state_dicts, only_on_master)
        plan, *others = [None if plan is None else plan._asdict() for plan in self._families.plan_states()]
        extras = {"loss_scale": scale_as_numbers(self._scaler), "plan": plan, FP8: self._options.fp8_communication}
        return {**state, EXTRAS: {**extras, OTHER_PLANS: others} if others else extras}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a plain torch optimizer's state dict, whole tensors; each rank takes its slices of them.

        Every rank calls it, with the same state dict. The states are taken without communication.

        Raises (on all ranks; nothing has been changed then):
            TypeError: not a mapping.
            ValueError: its groups or shapes aren't this optimizer's, or ranks have different ones.
            RuntimeError: other ranks have been called for something else.
        """
        self._guard.enter("load_state_dict")
        self._families.even_out(Call("load_state_dict"))
        with together(self._group, "load a state dict", _SAVED) as lines:
            if not self._families.several:
                lines += described(state_dict)
        extras = state_dict.get(EXTRAS) or {}
        load_whole_state_dict(self.optim, self._parameters, state_dict, extras.get(FP8, False))
        if self._scaler is not None and extras.get("loss_scale") is not None:
            self._scaler.load_state_dict(extras["loss_scale"])
        if self._families.idle:
            plans = [extras.get("plan"), *extras.get(OTHER_PLANS, [])]
            self._families.restore_plans([None if plan is None else PlanState(**plan) for plan in plans])

    # ---- sharded ----

    def sharded_state_dict(self, metadata: Any = None, prefix: str = "") -> dict[str, Tensor]:
        """This rank's slices by name, ``<parameter>.<state>``, to put into one's own ``dcp.save`` or ``dcp.load``.

        What has one number an element of the parameter is a 1-D ``DTensor`` of ``numel`` elements, sharded
        over the ranks, in memory order and without padding; so it loads at any world size. The rest are plain
        tensors, the same on every rank; one of them, ``settings``, holds as bytes what isn't a tensor: group
        settings, loss scale and bucket order. Tensors share memory with the optimizer's. Every rank calls it, with
        a ``model=`` given at construction (else names are places in the groups). Communicates only with experts,
        whose slices are over the ranks of their own group, and whose names are those of ``GlobalNames``.

        To load, states that don't exist yet must have a place to be loaded into, which the checkpoint's
        metadata tells of::

            state = {"optim": optimizer.sharded_state_dict(read_metadata(path), "optim.")}
            dcp.load(state, checkpoint_id=path)
            optimizer.load_sharded_state_dict(state["optim"])

        Args:
            metadata: the saved checkpoint's ``torch.distributed.checkpoint.metadata.Metadata``: the result then
                holds empty tensors of what was saved, to load into. None: what this optimizer holds, to save.
            prefix: what the names have before them in the checkpoint, as in ``"optim."``.

        Raises:
            TypeError: a setting that ``torch.load(weights_only=True)`` would not take back.
            ValueError: ``metadata`` has no state with that prefix.
        """
        sharded = self.sharded_state()
        if metadata is None:
            room = sharded.room()
            absent = self._group.exchange(list(room)) if self._families.several else [list(room)]
            settings = {**sharded.settings(), "shapes": sharded.shapes(), "absent": sorted(set().union(*absent))}
            settings[FP8] = self._options.fp8_communication
            data = packed(settings, "the optimizer's settings")
            return {**sharded.tensors(), **room, SETTINGS: _framed(data, sharded.group_names())}
        saved = {
            name.removeprefix(prefix): entry
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(prefix)
        }
        size = getattr(saved.get(SETTINGS), "size", None)
        if size is None:
            raise ValueError(f"metadata: expected {prefix}{SETTINGS}, which sharded_state_dict() saved, found none")
        names = sharded.own_names(full.rpartition(".")[0] for full in saved)
        as_saved = {_renamed(full, names): full for full in saved}
        templates = sharded.templates({own: saved[full] for own, full in as_saved.items()})
        found = {as_saved[own]: template for own, template in templates.items()}
        return {**found, SETTINGS: torch.empty(size, dtype=torch.uint8, device="cpu")}

    @torch.no_grad()
    def load_sharded_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take over what ``sharded_state_dict`` gave and ``dcp.load`` filled; every rank calls it.

        The model may be loaded before or after. Gradients are cleared.

        Raises:
            ValueError: it is of other parameters, shapes, strides or groups. Nothing has been changed then.
        """
        if SETTINGS not in state_dict:
            raise ValueError(f"state_dict: expected sharded_state_dict()'s, got one without {SETTINGS!r}")
        sharded = self.sharded_state()
        settings = _unframed(state_dict[SETTINGS])
        names = sharded.own_names(name for group in settings["param_groups"] for name in group["params"])
        settings = renamed_settings(settings, names.__getitem__)
        _check_shapes(sharded.shapes(), {names[name]: shape for name, shape in settings["shapes"].items()})
        sharded.check(settings)
        self.zero_grad()
        without = {SETTINGS, *settings["absent"]}
        tensors = {_renamed(full, names): tensor for full, tensor in state_dict.items() if full not in without}
        sharded.load(tensors, settings)
        masters = sharded.masters(tensors)
        for record in self._parameters:
            if record in masters:
                whole = record.p32.new_zeros(record.split.slice_size)
                whole[: len(masters[record])].copy_(masters[record])
                record.offer_master(whole, settings.get(FP8, False))

    def sharded_state(self, names: Mapping[Tensor, str] | None = None) -> ShardedState:
        """The optimizer's state by global ``names`` of its parameters; None: by those it has for messages.

        Communicates where there are several families.
        """
        if names is None:
            own = self._own_names()
            families = {name: self._parameters.family_of(p) for p, name in own.items()}
            among_all = GlobalNames(self._parameters.shard_groups, families)
            names = {p: among_all[name] for p, name in own.items()}
        return ShardedState(self.optim, self._families, self._scaler, names)

    def _own_names(self) -> dict[Tensor, str]:
        """The names of the groups' parameters, frozen ones included."""
        of_model = own_names(self._model)
        names: dict[Tensor, str] = {}
        for at, members in enumerate(self._parameters.groups):
            for place, p in enumerate(members):
                record = self._parameters.find(p)
                names[p] = of_model.get(p, f"param_groups[{at}]['params'][{place}]") if record is None else record.name
        return names


def _renamed(full: str, names: Mapping[str, str]) -> str:
    """``<name>.<key>`` with the parameter's other name."""
    name, _, key = full.rpartition(".")
    return f"{names.get(name, name)}.{key}"


def _framed(data: bytes, groups: Sequence[Sequence[str]]) -> Tensor:
    """``data``, with its length before it, in as many bytes as any settings of these parameters take.

    So that what was saved after many steps has the size of what a fresh optimizer offers to load into.

    Args:
        groups: the names in each param group.
    """
    size = 2**16 + sum(2**9 + 2**4 * len(name) for names in groups for name in names)
    size += 2**12 * len(groups)
    while size < len(data) + _LENGTH_BYTES:
        size *= 2
    framed = (len(data).to_bytes(_LENGTH_BYTES, "little") + data).ljust(size, b"\0")
    return torch.frombuffer(bytearray(framed), dtype=torch.uint8)


def _check_shapes(ours: Mapping[str, list[list[int]]], saved: Mapping[str, list[list[int]]]) -> None:
    for name, (shape, stride) in ours.items():
        if name in saved and saved[name] != [shape, stride]:
            raise ValueError(
                f"{name}: expected state of shape {tuple(shape)} and strides {tuple(stride)}, got "
                f"{tuple(saved[name][0])} and {tuple(saved[name][1])}: build the model that it was saved of"
            )


def _unframed(framed: Tensor) -> Any:
    stop = _LENGTH_BYTES + int.from_bytes(framed[:_LENGTH_BYTES].tolist(), "little")
    try:
        return unpacked(bytes(framed[_LENGTH_BYTES:stop].tolist()))
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"state_dict: {SETTINGS!r} isn't what sharded_state_dict() gave: {error}") from error
