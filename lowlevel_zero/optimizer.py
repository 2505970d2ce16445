"""LowLevelZeroOptimizer: one step in order: backward, reduce, norm, step, gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .backward import Backwards
from .bookkeeping.parameter_store import ParameterStore
from .bookkeeping.step_state import TO_ZEROS, Damage
from .colossalai_names import ColossalNames
from .communication.agreement import CONSTRUCT, Call, is_raised_by_all, moment, together
from .communication.grid import Ranks, check_hybrid
from .communication.shard_group import ShardGroup
from .construction.prepare import (
    ADD_GROUP,
    add_group,
    agreed_verbosity,
    check,
    connected,
    garbage_collector_paused,
    join,
    shard,
)
from .construction.start_line import log_start
from .diagnostics.frozen_weights import FrozenWeights
from .diagnostics.settings import Settings
from .diagnostics.untrained import Untrained
from .diagnostics.verification import verify
from .experts.assignment import data_parallel_group
from .gradients.dispatch import make_handles
from .gradients.global_norm import GlobalNorm, clip_factor
from .lives import alive, let_go, refuse_wrapped, register, retire_former
from .options import (
    CLIPPED_NORM,
    BackwardContext,
    Communication,
    Cost,
    Diagnostics,
    LossScale,
    ZeroOptions,
    options_of,
    with_meanings,
)

T = TypeVar("T")


@with_meanings
class LowLevelZeroOptimizer(ColossalNames):
    """Shards a torch optimizer over data-parallel ranks: ZeRO stage 1 and 2 (Rajbhandari et al., 2020).

    Every rank passes the same arguments. Rank 0's parameters, buffers and optimizer state are broadcast first. Each
    parameter is padded and viewed as ``[world_size, -1]``: every rank steps row ``rank`` of every parameter with
    ``optimizer``, and the ranks gather the stepped rows. From then on ``optimizer`` holds these rows, which are called
    slices, in place of the parameters.

    A parameter that needs padding, or shares its storage with others, moves to a storage of its own: other tensors
    over the old memory keep their values. Earlier instances that have trained one of the parameters are retired: any
    call of them raises.

    ColossalAI's low-level ZeRO has the same scheme. Its keywords come first, in its order; ``loss_scale``,
    ``communication`` and ``diagnostics``, at the end, have the same options, and more.

    Raises:
        RuntimeError: no process group is initialised, or another rank raised an error of its own. (After a late error,
            as of memory, ``optimizer`` may hold slices already: make another.)
        TypeError: an argument of the wrong type, or an optimizer whose parameters depend on each other.
        ValueError: a value out of range, contradictory options, a parameter that can't be sharded, or ranks
            that differ; the message names the option or the parameter. Nothing has been changed then.

    Args:
        optimizer: a torch optimizer over the parameters that treats each of them, or of their elements, by itself.
        pg_to_param_list: this rank's experts: for each process group, a list of the parameters that its ranks share.
            The groups divide the ranks of ``dp_process_group``, which share all other parameters. Gradients of experts
            are summed over their group and divided by the number of data-parallel ranks, as in a dense run. Buffers
            and frozen parameters are shared as the trained parameters of their modules are. A module that is passed
            here is the ``model``.
        dp_process_group: the ranks to shard over; None: the default group, or, if all parameters are in
            ``pg_to_param_list``, the one of its groups that has all others' ranks. Or a grid's two, ``(outer, inner)``.
        extra_dp_group: the outer level's ranks, where ``dp_process_group`` is the inner level's.
        model: the module that the parameters belong to: gives names to messages, and has its buffers and
            remaining parameters broadcast too.
        partition_grad: False: stage 1, True: stage 2.
    """

    @garbage_collector_paused()
    def __init__(
        self,
        optimizer: Optimizer,
        pg_to_param_list: Mapping[Any, Sequence[nn.Parameter]] | nn.Module | None = None,
        initial_scale: float = LossScale.initial_scale,
        min_scale: float = LossScale.min_scale,
        growth_factor: float = LossScale.growth_factor,
        backoff_factor: float = LossScale.backoff_factor,
        growth_interval: int = LossScale.growth_interval,
        hysteresis: int = LossScale.hysteresis,
        max_scale: float = LossScale.max_scale,
        clip_grad_norm: float = ZeroOptions.clip_grad_norm,
        verbose: bool = Diagnostics.verbose,
        reduce_bucket_size: int | None = Communication.bucket_size,
        communication_dtype: torch.dtype | None = Communication.dtype,
        overlap_communication: bool = Communication.overlap_reductions,
        partition_grad: bool = False,
        cpu_offload: bool = ZeroOptions.cpu_offload,
        dp_process_group: Ranks | None = None,
        extra_dp_group: Ranks | None = None,
        forced_dtype: torch.dtype | None = ZeroOptions.forced_dtype,
        master_weights: bool = ZeroOptions.master_weights,
        overlap_allgather: bool = Communication.overlap_gathers,
        fp8_communication: bool = Communication.fp8,
        backward_context: BackwardContext | None = ZeroOptions.backward_context,
        *,
        model: nn.Module | None = None,
        stage: int | None = None,
        split: str | None = ZeroOptions.split,
        cost: Cost | None = ZeroOptions.cost,
        loss_scale: LossScale | None = None,
        communication: Communication | None = None,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        keywords = dict(locals())
        assigned: Any = pg_to_param_list
        if model is None and isinstance(pg_to_param_list, nn.Module):
            assigned, model = None, pg_to_param_list
        ranks = data_parallel_group(dp_process_group, assigned, optimizer)
        group = join(ranks, extra_dp_group, communication, diagnostics)
        self._shard(group, optimizer, model, assigned, keywords)

    def _shard(
        self, group: ShardGroup, optimizer: Optimizer, model: nn.Module | None, assigned: Any, keywords: dict[str, Any]
    ) -> None:
        """Check the arguments on all ranks, shard the parameters, and create the parts of a step. Communicates."""
        with together(group, CONSTRUCT) as agreed:
            options = options_of(keywords)
            levels = keywords["dp_process_group"], keywords["extra_dp_group"]
            check_hybrid(*levels, options.communication.hybrid_shard)
            refuse_wrapped(optimizer)
            checked = check(optimizer, model, assigned, group, options)
            agreed += checked.lines[0]
        options = agreed_verbosity(group, options)
        groups = connected(group, checked, options)
        retire_former(checked.new, checked.names, groups[0])
        parameters = ParameterStore(groups, checked.assignment.number_of, checked.assignment.listed)
        sharding = shard(optimizer, parameters, options, checked, CONSTRUCT, model)
        with together(groups[0], CONSTRUCT):
            sharding.take_slices()
            super().__init__(optimizer, parameters, options, model, checked.writes_unused)
            context = options.backward_context or nullcontext
            self._backwards = Backwards(self.sharded_groups, self.guard, self.step_state, context)
            self._settings = Settings(optimizer, parameters)
            self._untrained = Untrained(model, parameters, alive)
            self.guard.frozen = self._frozen = FrozenWeights(model, parameters, alive)
            register(self)
            log_start(self)

    def __del__(self) -> None:
        if "guard" in self.__dict__:
            let_go(self)

    # ---- backward: gradients become each rank's slice of their sum ----

    def backward(
        self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Run a backward from ``loss``, and start reducing its gradients, unless under ``no_sync``. Communicates.

        Every rank calls it. fp16: the loss is scaled. ``p.grad`` is a ``ShardedGradient`` afterwards, of which each
        rank holds a slice; under ``no_sync`` gradients stay in it. A loss that doesn't require grad contributes
        nothing.
        """
        self._backwards.run(loss, None, inputs, retain_graph, scales=True)

    def backward_by_grad(
        self,
        tensor: Tensor,
        grad: Tensor | None,
        inputs: Tensor | Sequence[Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Run a backward from ``tensor`` with its gradient ``grad``, and else as ``backward`` does. Communicates.

        fp16: ``grad`` must carry ``loss_scale`` already, as it does when it comes from a later pipeline stage.
        """
        self._backwards.run(tensor, grad, inputs, retain_graph)

    def backward_pass(
        self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None = None
    ) -> AbstractContextManager[Tensor]:
        """Return a context that reduces the gradients of a backward that the caller runs. Every rank enters it::

            with optimizer.backward_pass(loss) as scaled:
                scaled.backward()

        fp16: ``scaled`` is the loss times the loss scale, and the backward has to be run from it; else it is the loss.
        Several optimizers' contexts may be nested around one backward.

        Args:
            loss: the tensor from which the backward is run, or a multiple of it.
            inputs: the ``inputs`` argument of the backward.

        Raises:
            RuntimeError: fp16, and gradients came from another backward than that of the scaled loss.
        """
        return self._backwards.sync(loss, inputs, scales=True)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate in ``p.grad``, in its dtype, without reduction."""
        return self.step_state.syncing(False)  # the state, since another optimizer may retire this one meanwhile

    # ---- between backward and step: gradient access ----

    @torch.no_grad()
    def synchronize(self) -> None:
        """Finish all reductions, so that gradients can be read and edited; raise under ``no_sync``. Communicates.

        Every rank calls it. Gradients are then ``p.grad`` of the model's parameters, or ``.grad`` of the slices in
        ``optimizer.param_groups`` (see ``ShardedGradient``). The name is Horovod's.

        Raises:
            RuntimeError: called under ``no_sync``, where gradients aren't reduced.
        """
        if not self.step_state.syncs:
            raise RuntimeError(
                "expected synchronize() outside of no_sync, where gradients are reduced, got it within: "
                "run the last backward, and synchronize(), after the with block"
            )
        call = self.calls.enter("synchronize")
        with self.calls.taking_part(nullcontext):
            self.calls.finish_gradients(call)

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Return a context without effect, for code that is written for Horovod.

        A step reduces gradients that have come since, and takes edited gradients as they are.
        """
        return nullcontext()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a global L2 norm of ``max_norm``, and return the norm before. Communicates.

        It does what ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` does, in fewer kernels, and counts
        experts' gradients. Every rank calls it, with the same ``max_norm``.
        """
        CLIPPED_NORM("max_norm", max_norm)
        call, norm = self.calls.enter("clip_grad_norm_"), self.stepper.new_norm()
        call = call._replace(name=f"{call.name} to {max_norm}")
        with self.calls.taking_part(norm.catch_up):
            self.calls.finish_gradients(call)
            self.stepper.measure(norm)
            factor = clip_factor(norm.value, max_norm)
            for each in self.sharded_groups:
                each.gradients.multiply([record for record in each.records if record.worked], factor)
        return norm.value

    # ---- step: norm, clip, step the slices, gather them ----

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], T]) -> T: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], T] | None = None) -> T | None:
        """Finish reductions, clip, step unless fp16 overflowed, and gather; nothing under ``no_sync``. Communicates.

        Args:
            closure: run first, with gradients enabled and under ``no_sync`` too; its loss is returned.

        As in torch, gradients stay until ``zero_grad``. fp16: on an overflow on any rank nothing is stepped,
        gradients are cleared and the loss scale backs off.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.step_state.syncs:
            return loss
        call = self.calls.enter("step")
        others = {"clip_grad_norm": self.options.clip_grad_norm, **(self.scaler.settings() if self.scaler else {})}
        settings = self._settings.at(self.shard_group.progress.step, others)
        call = call._replace(settings=settings, written=[each for each in self.guard.edited if each.writes])
        call = call._replace(written=[*call.written, *self._frozen.look(self.shard_group.progress.step)])
        norm, self.stepper.left = self.stepper.new_norm(), None
        with self.calls.taking_part(partial(self._catch_up, norm), damage=Damage.GRADIENTS | Damage.PARAMETERS):
            self.calls.finish_gradients(call)
            self._frozen.note()
            self.observer.step_begins()  # it may ask the other ranks, so they have to be in this call
            if self.guard.edited:
                self.guard.follow_edits()
            self.stepper.take_step(norm)
            self._end_step(norm)
        self.observer.cleared()
        verify_every = self.options.diagnostics.verify_every
        if verify_every and self.shard_group.progress.step % verify_every == 0:
            verify(self.sharded_parameters, self.parameter_names(), self.model, buffers=False)
        self._warn()
        return loss

    def _warn(self) -> None:
        """Warn of gradients that add up and of untrained parameters, after a step: a log's handler may raise."""
        for each in self.sharded_groups:
            each.reducer.warn_of_used()
        lacked = True in [each.reducer.has_lacked for each in self.sharded_groups]
        self._untrained.look(self.shard_group.progress.step, lacked)

    def _catch_up(self, norm: GlobalNorm) -> None:
        """After an error in a step, run its other collectives; count it unless all ranks left it. Communicates."""
        since, refused = moment(), False
        try:
            self.stepper.catch_up(norm)
        except RuntimeError as error:
            refused = is_raised_by_all(error, self.shard_group, since)
            raise
        finally:
            if not refused:  # by a norm for which every rank leaves its step in the middle
                self._end_step(norm)

    def _end_step(self, norm: GlobalNorm) -> None:
        """Count the step, keep its ``norm``, update the bucket plans, and free idle buffers. May communicate."""
        self.last_norm = norm
        for each in self.sharded_groups:
            each.reducer.end_step()
            each.group.trim()
        for group in self.sharded_parameters.shard_groups:
            group.progress.step += 1
        if self.mode == "eval":
            self.mode = None  # the next call may write others through ``p.data``, where nothing shows that

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Finish reductions, and set all gradients to None, or else to zeros. Communicates: every rank calls it.

        With ``set_to_none=False`` a parameter that had a gradient is stepped with its zeros. A ``zero_grad``
        that the wrapped optimizer's class has of its own is called in the end, with False if that is given; it finds
        slices without gradients.
        """
        self.guard.enter("zero_grad", wakes=not set_to_none)
        call = Call("zero_grad" if set_to_none else TO_ZEROS)
        self.calls.agree(call, lambda each, call: each.reducer.discard(call))
        self.observer.cleared()
        if set_to_none:
            for each in self.sharded_groups:
                each.gradients.clear()
            for p in self.sharded_parameters.frozen:
                p.grad = None
        else:
            for each in self.sharded_groups:
                each.gradients.zero(each.records)
            for p in chain.from_iterable(self.sharded_parameters.groups):
                record = self.sharded_parameters.find(p)
                if p.grad is not None and (record is None or p.grad is not record.shown):
                    p.grad = p.grad.detach().zero_()  # in place: it may be a view of a caller's buffer
        if type(self.optim).zero_grad is not Optimizer.zero_grad:
            self.optim.zero_grad(*(() if set_to_none else (False,)))  # one of a class may take no argument

    # ---- param groups, of which an optimizer is made ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer, and shard its parameters. Communicates: every rank calls it.

        Parameters that were frozen at construction, and aren't any more, come in this way too. Those that
        ``pg_to_param_list`` had are shared as it says, all others by all data-parallel ranks.
        """
        self.calls.finish_syncs("add_param_group", updates=True)
        known = len(self.optim.param_groups)
        parameters, options = self.sharded_parameters, self.options
        try:
            checked = add_group(param_group, self.optim, parameters, options, self.model, self.scaler is not None)
            retire_former(checked.new, checked.names, self.shard_group)
            sharding = shard(self.optim, parameters, options, checked, ADD_GROUP)
        except BaseException:  # of whatever kind: the wrapped optimizer is as it was
            del self.optim.param_groups[known:]
            raise
        with together(self.shard_group, ADD_GROUP):
            sharding.take_slices()
            self.stepper.writes_unused = checked.writes_unused
            self.extend_groups()
            make_handles((record for record in parameters if record.handle is None), self.gradients)
