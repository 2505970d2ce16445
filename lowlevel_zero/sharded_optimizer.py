"""The optimizer's interface for others: torch, the rooms above it, and callers who look at gradients and states."""

from __future__ import annotations

import copy
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from .bookkeeping.bucket_store import StepOnDevice
from .bookkeeping.module_names import parameter_names
from .bookkeeping.parameter_store import ParameterStore
from .bookkeeping.step_state import Damage, StepState
from .diagnostics.bad_numbers import BadNumbers
from .diagnostics.guards import Guard
from .diagnostics.verification import verify
from .gradients.calls import Calls
from .gradients.dispatch import make_handles
from .gradients.global_norm import GlobalNorm
from .gradients.of_optimizer import OptimizerGradients
from .loss_scaler import LossScaler
from .offload.sleep import KINDS, Asleep, check_kinds, movable
from .offload.step_on_host import StepOnHost
from .optim.modes import switch
from .optim.overrides import carry_overrides
from .options import ZeroOptions
from .sharded_group import ShardedGroup
from .state.whole import WholeState
from .stepper import Stepper
from .streams import streams_of

_log = logging.getLogger("lowlevel_zero")


ParamGroup: TypeAlias = dict[str, Any]  # as torch types it


class ShardedOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` over slices: state, gradients and names; ``LowLevelZeroOptimizer`` adds training.

    Schedulers and trainers accept it. Step hooks that are registered on it run once a step, and those of state dicts in
    ``state_dict`` and ``load_state_dict``. Rooms read its attributes, and call nothing but its methods.
    """

    _retired: str  # the reason why every call raises; empty while it is in use

    def __init__(
        self,
        optim: Optimizer,
        parameters: ParameterStore,
        options: ZeroOptions,
        model: nn.Module | None,
        writes_unused: bool,
    ) -> None:
        """Create the parts of a step over slices that ``optim`` holds already, and register hooks."""
        # Optimizer.__init__ would make groups and state of its own; unpickling makes hooks and no more.
        known = "differentiable" in optim.defaults
        super().__setstate__({"optim": optim})
        self.optim = optim
        if not known:  # which it sets, as in a pickle of an older torch
            del optim.defaults["differentiable"]
        self.options, self.model = options, model  # the caller's choices, and the module that was given
        self.sharded_parameters = parameters  # the records of the trained ones, and the parameters of all groups
        self.shard_group = parameters.shard_groups[0]  # all data-parallel ranks, which call the methods together
        self.device = parameters.records[0].padded.device
        self.streams = streams_of([self.device])  # those of the device that work is done on
        half = any(record.p.dtype == torch.float16 for record in parameters)
        self.scaler = LossScaler(options.loss_scale, self.device) if half else None
        average = options.communication.factor_of_sums(self.shard_group.ranks)
        first = self.shard_group.group_rank == 0
        self.step_state = state = StepState(average, self.scaler, warns_of_used=first)  # the phase of the current step
        # The records by the ranks that share them, with what gives them new values.
        groups: list[ShardedGroup] = []
        self.sharded_groups = groups
        self.guard = Guard(optim, parameters, model, state, self.streams)  # checks each call
        self.observer = BadNumbers(parameters, groups, options, self.scaler)
        self._stepping = StepOnHost(self.streams) if options.cpu_offload else StepOnDevice()
        self.extend_groups()
        self.calls = Calls(groups, parameters.shard_groups, self.guard, state, self.streams)
        self.gradients = OptimizerGradients(groups, self.calls)  # for uses of ``p.grad``
        make_handles(parameters, self.gradients)
        carry_overrides(optim, parameters)
        self.stepper = Stepper(optim, parameters, groups, writes_unused, options, state, self.observer)
        # Of the instance, not of the class, so that a retired optimizer has none of them.
        self.last_norm: GlobalNorm | None = None  # of the last step's gradients
        self.mode: str | None = None  # the one of "train" and "eval" called last, but "eval" only until a step
        self._switched: Any = None  # the states that were there then: loading makes others
        self.runs: tuple[str, ...] = ()  # for checkpoints in files: its run, and then those that it went on from
        self.serial = 0  # of the newest checkpoint that was saved of it or loaded into it

    def extend_groups(self) -> None:
        """Register hooks of new records, start their bucket plans again, and make missing ``ShardedGroup`` objects."""
        known = {each.number: each for each in self.sharded_groups}
        common = self.options, self.streams, self._stepping, self.step_state, self.observer.packed
        for number, records in enumerate(self.sharded_parameters.by_shard_group):
            if number in known:
                known[number].reducer.extend()
            elif records:
                known[number] = ShardedGroup(number, self.sharded_parameters, *common)
        self.sharded_groups[:] = [known[number] for number in sorted(known)]

    # ---- its end, where another optimizer takes its parameters ----

    @property
    def is_retired(self) -> bool:
        """Return whether a later optimizer has taken this one's parameters; then every other use raises."""
        return "_retired" in self.__dict__

    def __repr__(self) -> str:
        """Return the settings of the groups, as torch does, or that the optimizer is retired."""
        return f"{type(self).__name__} (retired)" if self.is_retired else super().__repr__()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise ``RuntimeError`` if the optimizer is retired, else ``AttributeError``."""
            if self.is_retired:
                raise RuntimeError(self._retired)
            return object.__getattribute__(self, name)

    # ---- for torch ----

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Return the wrapped optimizer's groups; their ``params`` are slices, ``[s]`` each."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, StateDict]:
        """Return the wrapped optimizer's state, by slice; raise ``TypeError`` for torch's ``get_state_dict``.

        torch's ``get_state_dict``, ``set_state_dict`` and their like look at it first, and then for the model's
        parameters in groups that hold slices: they are told what to use, before they have changed anything.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise TypeError(
                f"expected a plain optimizer, got a {type(self).__name__}, whose groups hold slices of the model's "
                "parameters: save and load lowlevel_zero.checkpoint.Sharded(optimizer) in place of what "
                "get_optimizer_state_dict and set_optimizer_state_dict give and take, as in "
                'dcp.save({"model": model.state_dict(), "optim": Sharded(optimizer)}); or use optimizer.state_dict(), '
                "which has whole tensors"
            )
        return self.optim.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.optim.state = state

    @property
    def defaults(self) -> ParamGroup:
        """Return the wrapped optimizer's defaults."""
        return self.optim.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optim.defaults = defaults

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise ``TypeError``: an optimizer can't be pickled or copied, only its state."""
        raise TypeError(
            f"expected its state, got the {type(self).__name__} itself to be pickled or copied, whose slices and "
            "process group are this rank's alone: save optimizer.state_dict(), which every rank calls, or use "
            "lowlevel_zero.checkpoint.save_checkpoint, and load into an optimizer that every rank constructs"
        )

    # ---- state, whole, as plain torch has it ----

    def state_dict(
        self, pinned_state_dicts: dict[int, dict[str, Any]] | None = None, only_on_master: bool = False
    ) -> StateDict:
        """Gather whole tensors, and return a plain torch optimizer's state dict. Every rank calls it.

        Tensors are gathered one at a time. fp32 masters of 16-bit parameters are one more state of each,
        ``master_param``; the loss scale, the bucket order and whether parameters travelled in fp8 are under the key
        ``lowlevel_zero``. Plain torch ignores both.

        Args:
            pinned_state_dicts: buffers for the tensors, made by the first call and used again by further ones.
            only_on_master: leave the states empty on all ranks but the first.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self.calls.finish_syncs("state_dict")
        state_dict = self.whole_state.state_dict(pinned_state_dicts, only_on_master)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a plain torch optimizer's state dict, the same on every rank; each keeps its slices. Communicates.

        Every rank calls it, and cuts its slices itself. Gradients stay, as in torch; fp16: if the loaded loss scale is
        another, they are cleared, as those of a step that is skipped.

        Raises (on all ranks; nothing has been changed then):
            TypeError: not a mapping.
            ValueError: its groups or shapes aren't this optimizer's, or ranks have different ones.
            RuntimeError: other ranks have been called for something else.
        """
        loaded: Any = copy.copy(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, loaded)
            loaded = loaded if changed is None else changed
        with self.loading_whole():
            self.whole_state.load(loaded)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @contextmanager
    def loading_whole(self) -> Iterator[None]:
        """Finish reductions, run the body, and clear gradients if that loads another loss scale. Communicates."""
        self.calls.finish_syncs("load_state_dict", updates=True)
        scale = None if self.scaler is None else self.scaler.loss_scale
        yield
        if self.scaler is not None and self.scaler.loss_scale != scale:  # which the step would divide by
            for each in self.sharded_groups:
                each.gradients.clear()
        self.step_state.failure.mend(Damage.PARAMETERS)

    def refuse_undefined(self, call: str) -> None:
        """Raise ``RuntimeError`` where a step that failed in its midst has left this rank undefined parameters."""
        refusal = self.step_state.failure.refusal(call, uses_gradients=False)
        if refusal is not None:
            raise refusal

    @property
    def whole_state(self) -> WholeState:
        """Return the object that reads and loads whole states, for callers that have finished the syncs."""
        optim, parameters, groups = self.optim, self.sharded_parameters, self.sharded_groups
        return WholeState(optim, parameters, groups, self.scaler, self.options.communication.fp8, self.model)

    # ---- modes, of a wrapped optimizer that has some ----

    @property
    def train(self) -> Callable[[], None]:
        """Return a function that switches a schedule-free optimizer to its trained parameters, and gathers them.

        Every rank calls that. ``AttributeError`` if the wrapped optimizer has none. fp32 masters keep their precision.
        In the same mode it does nothing, and doesn't communicate, so it may be called in every step.
        """
        return self._switching("train", "eval")

    @property
    def eval(self) -> Callable[[], None]:
        """Return a function that switches to the evaluated parameters, and gathers them; see ``train``."""
        return self._switching("eval", "train")

    def _switching(self, mode: str, back: str) -> Callable[[], None]:
        _ = getattr(self.optim, mode)  # AttributeError where it has none
        return partial(self._switch, mode, back)

    def _switch(self, mode: str, back: str) -> None:
        """Call the wrapped optimizer's ``mode`` on all ranks, and gather; undo it by ``back`` if a rank fails."""
        call = self.calls.enter(mode)
        if call.error is None and self.mode == mode and self._switched is self.optim.state:
            return
        parameters, agree, failure = self.sharded_parameters, self.calls.agree, self.step_state.failure
        switch(self.optim, parameters, self.sharded_groups, agree, call, back, failure)
        self.mode, self._switched = mode, self.optim.state

    # ---- for the rooms above, beside the attributes ----

    def parameter_names(self) -> dict[Tensor, str]:
        """Return the names of all parameters of the groups, frozen ones included."""
        parameters = self.sharded_parameters
        return parameter_names(parameters.groups, self.model) | {record.p: record.name for record in parameters}

    def finish_gathers(self) -> None:
        """Wait until all parameters are up to date. Starts no communication."""
        for each in self.sharded_groups:
            each.gathers.finish()

    _force_wait_all_gather = finish_gathers  # ColossalAI's name

    @property
    def loss_scale(self) -> float:
        """Return the loss scale; 1 unless a parameter is fp16. Waits for the device."""
        return 1.0 if self.scaler is None else self.scaler.loss_scale

    @torch.no_grad()
    def update_master_params(self, model: nn.Module) -> None:
        """Set masters of ``model``'s parameters to their values, or loaded ones that round to these. Sends nothing."""
        for p in model.parameters():
            record = self.sharded_parameters.find(p)
            if record is not None:
                record.refresh_master()

    # ---- sleep ----

    @torch.no_grad()
    def offload_states(self, include: Collection[str] = KINDS, pinned: bool = True, non_blocking: bool = True) -> int:
        """Move masters, states and gradients to the host till next used; return the bytes moved. Communicates.

        The device's memory is free for others when it returns, as for inference between updates. Parameters stay whole
        on the device. What sleeps can be read on the host. It comes back by ``reload_states``, or by the next call that
        may need it: every method of the optimizer but ``zero_grad()``, a plain ``loss.backward()``, a checkpoint that
        is loaded. What stays on the device: fp32 masters that are the parameters' own memory, gradients that wait in
        ``p.grad`` to be reduced, as under ``no_sync``, and what the wrapped optimizer keeps besides its state.

        With ``cpu_offload``, and where parameters are on the host, there is nothing to move.

        Args:
            include: "masters", "states", "gradients" and "buffers", or some of these. Buffers are memory that torch's
                allocator keeps for later use: without them what is freed is free for this process alone.
            pinned: use pinned memory of the host, which is copied faster.
            non_blocking: have all copies under way at once, and wait for them at the end; False: wait for each.

        Raises:
            ValueError: ``include`` has something else. Nothing has been changed then.
            RuntimeError: other ranks have been called for something else.
        """
        check_kinds(include)
        self.calls.finish_syncs("offload_states", updates=True)
        self.finish_gathers()
        if self.options.cpu_offload or not self.streams.several:
            _log.info("offload_states: what is to be offloaded is on the host already")
            return 0
        asleep = Asleep(self.streams)
        self.step_state.wake = asleep.wake
        try:
            moved = asleep.take(
                movable(include, self.optim, self.sharded_parameters.records, self.sharded_groups), pinned, non_blocking
            )
        except BaseException:
            self.step_state.wake_up()
            raise
        if "buffers" in include:
            self.streams.release_memory()
        return moved

    def reload_states(self) -> None:
        """Bring back what ``offload_states`` has moved to the host; the host doesn't wait. Doesn't communicate."""
        self.guard.enter("reload_states")

    # ---- reports ----

    @torch.no_grad()
    def verify(self, buffers: bool = False) -> None:
        """Compare all parameters between the ranks, bit by bit, and raise if some differ. Every rank calls it.

        Checksums are computed where the parameters are; the host waits for them once. Only if they differ do the
        ranks tell each other which.

        Args:
            buffers: the model's buffers, too. Training lets those of BatchNorm, say, differ.

        Raises:
            RuntimeError: the first parameter that differs, and on which ranks; or ranks that make other calls. Both on
                all ranks.
        """
        self.calls.finish_syncs("verify buffers" if buffers else "verify")
        verify(self.sharded_parameters, self.parameter_names(), self.model, buffers)
