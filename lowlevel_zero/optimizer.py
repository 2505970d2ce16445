"""LowLevelZeroOptimizer: one step in order: backward, reduce, norm, step, gather."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .bookkeeping.bucket_store import StepOnDevice
from .bookkeeping.checks import refuse_compiled
from .bookkeeping.parameter_store import ParameterStore
from .bookkeeping.step_state import Phase, StepState
from .communication.agreement import CONSTRUCT, Call, together
from .communication.grid import Ranks, check_hybrid, shard_group
from .construction import (
    ADD_GROUP,
    add_group,
    agree_on_reductions,
    check,
    connected,
    describe,
    log_start,
    shard,
)
from .diagnostics.bad_numbers import BadNumbers
from .diagnostics.guards import Guard
from .diagnostics.settings import Settings
from .diagnostics.stall_report import seconds_of, watch
from .diagnostics.untrained import Untrained
from .experts.assignment import assign, data_parallel_group, make_groups
from .gradients.calls import Calls
from .gradients.edits import check_edits, refuse
from .gradients.of_optimizer import OptimizerGradients
from .lives import alive, let_go, refuse_wrapped, register, retire_former
from .loss_scaler import LossScaler
from .offload.step_on_host import StepOnHost
from .optim.whole_steps import whole_step
from .options import MAX_NORM, BackwardContext, ZeroOptions
from .sharded_group import GroupMaker
from .sharded_optimizer import ShardedOptimizer
from .stepper import GlobalNorm, Scale, Stepper, clip_factor
from .streams import streams_of

_log = logging.getLogger("lowlevel_zero")


class LowLevelZeroOptimizer(ShardedOptimizer):
    """Shards a torch optimizer over data-parallel ranks: ZeRO stage 1 and 2 (Rajbhandari et al., 2020).

    Each parameter is padded and viewed as ``[world_size, -1]``; every rank steps row ``rank`` of every
    parameter with ``optimizer`` and gathers the updated rows. The scheme is ColossalAI's low-level ZeRO, whose
    keywords it takes. All ranks construct it alike; rank 0's parameters, buffers and optimizer state are
    broadcast. From then on ``optimizer`` holds slices, not parameters. A parameter that needs padding, or shares its
    storage, moves to one of its own: other tensors over the old memory stay as they were, and don't follow it.
    Other instances that have trained one of the parameters are retired: whatever is called on them raises.
    What can be read, saved and loaded of it is ``ShardedOptimizer``'s, which it is.

    Args:
        optimizer: an elementwise torch optimizer over the parameters.
        pg_to_param_list: what fewer ranks share, by process group: this rank's experts, under the group of the ranks
            that have the same ones. These groups part the ranks of ``dp_process_group``, who share what isn't listed.
            Gradients are summed over a parameter's own group and divided by the number of data-parallel ranks, as
            in a dense run. Buffers and frozen parameters go with their modules.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale:
            the dynamic loss scale, used where a parameter is fp16 (see ``LossScaler``).
        clip_grad_norm: clip gradients to this global L2 norm; 0: don't.
        verbose: log each skipped fp16 step, if any rank asks for it; on a GPU the host waits for the device then.
        reduce_bucket_size: elements in a communication bucket; None: 2**20 on a CPU, 12 * 2**20 on a GPU.
        communication_dtype: dtype in which gradients travel; None: each parameter's own.
        overlap_communication: reduce during backward.
        partition_grad: False: stage 1, True: stage 2.
        cpu_offload: step on the host: masters, the gradients that step them and the optimizer's state live there,
            Adam and AdamW are fused unless they were made with a choice of their own; gradients go down during
            backward. (Where the parameters are on the host too, it only costs copies.)
        dp_process_group: the ranks to shard over; None: the default group, or of a ``pg_to_param_list`` that has all
            parameters the group with the ranks of the others. Or two levels of ranks, ``(outer, inner)``.
        extra_dp_group: the outer level's ranks, where ``dp_process_group`` is the inner level's.
        forced_dtype: convert the parameters to this dtype first.
        master_weights: step an fp32 copy of 16-bit slices, not the slices themselves.
        overlap_allgather: gather updated parameters while the next forward runs; whoever reads one waits for it.
        fp8_communication: gradients and updated parameters travel in fp8, and are summed and stepped in fp32.
        backward_context: a callable; backward runs in the context manager it returns.
        model: the module that the parameters belong to: gives names to messages, and has its buffers and
            remaining parameters broadcast too.
        reduce_scatter: in stage 1, reduce-scatter instead of all-reducing (stage 2 always does).
        assume_elementwise: accept an optimizer that could not be shown to treat elements independently.
        hybrid_shard: of two levels, shard over the inner one, with replicas on the outer one; else over both.
        fp8_min_numel: elements of the smallest parameter that travels in fp8.
        reduce_scatter_with_fp32_accumulation: sum 16-bit gradients in fp32 on NCCL too. (Megatron's name.)
        gradient_predivide_factor: divide gradients by it before they are summed over the ranks, and by world size /
            factor afterwards (Horovod): the same average, but sums that stay in a 16-bit dtype's range.
        reduction: what gradients become over the ranks: their "mean" or their "sum".
        pad_buckets_for_high_nccl_busbw: pad rows of more than 2**16 elements to multiples of that (Megatron-LM).
        slice_multiple: elements that slices are multiples of, for an optimizer whose states share something within
            blocks of so many; those of torchao's and bitsandbytes' 8-bit optimizers are multiples of their blocks.
        stall_timeout: seconds after which a rank logs what it waits for and who is missing; 0: never.
        debug: compare ranks before each collective, and raise on all where they differ or one stays away; it is slow.
        verify_every: ``verify()`` after every so many steps; 0: never.
        max_skipped_steps: raise at the so manyth fp16 overflow in a row if the loss scale is at its minimum; 0: never.
        own_communicator: on NCCL, reduce and gather by a communicator made at construction, beside that of the process
            group, whose collectives in a backward then can't pair up with reductions; False: by the group's own.
        error_if_nonfinite: without fp16, refuse to step by a gradient norm that is inf or NaN; the host waits for it.

    Raises:
        RuntimeError: no process group is initialised, or another rank could not construct its optimizer, whatever its
            error was. (One that comes late, as of memory, leaves ``optimizer`` with slices: make another.)
        TypeError: an argument of the wrong type, or an optimizer that isn't elementwise.
        ValueError: a value out of range, contradictory options, a parameter that can't be sharded, or ranks
            that differ; the message names the parameter. Nothing has been changed then.
    """

    _overflow: Tensor  # 0-d: whether gradients did before their caller edited them, since ``synchronize``

    def __init__(
        self,
        optimizer: Optimizer,
        pg_to_param_list: Mapping[Any, Sequence[nn.Parameter]] | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        max_scale: float = 2**24,
        clip_grad_norm: float = 0.0,
        verbose: bool = False,
        reduce_bucket_size: int | None = None,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        partition_grad: bool = False,
        cpu_offload: bool = False,
        dp_process_group: Ranks | None = None,
        extra_dp_group: Ranks | None = None,
        forced_dtype: torch.dtype | None = None,
        master_weights: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        backward_context: BackwardContext | None = None,
        *,
        model: nn.Module | None = None,
        reduce_scatter: bool = False,
        assume_elementwise: bool = False,
        hybrid_shard: bool = False,
        fp8_min_numel: int = 2048,
        reduce_scatter_with_fp32_accumulation: bool = False,
        gradient_predivide_factor: float = 1.0,
        reduction: str = "mean",
        pad_buckets_for_high_nccl_busbw: bool = False,
        slice_multiple: int = 1,
        stall_timeout: float = 60.0,
        debug: bool = False,
        verify_every: int = 0,
        max_skipped_steps: int = 20,
        error_if_nonfinite: bool = False,
        own_communicator: bool = True,
    ) -> None:
        keywords = locals()
        ranks = data_parallel_group(dp_process_group, pg_to_param_list, optimizer)
        patience = seconds_of(stall_timeout)
        self.shard_group = shard_group(ranks, extra_dp_group, hybrid_shard, patience)
        watch(self.shard_group, patience)
        with together(self.shard_group, CONSTRUCT) as agreed:
            self.options = ZeroOptions.chosen(keywords)
            scaling = LossScaler.chosen(keywords)
            check_hybrid(dp_process_group, extra_dp_group, hybrid_shard)
            refuse_wrapped(optimizer)
            names = check(optimizer, model, self.shard_group, self.options)
            assignment = assign(pg_to_param_list, self.shard_group, names, model)
            lines = [list(describe(optimizer, names, model, assignment.of, at)) for at in assignment.numbers]
            agreed += [*lines[0], *self.options.alike(), f"loss scale {scaling}"]
            agreed += assignment.in_common(names, self.options)
        agree_on_reductions(self.shard_group, next(iter(names)).device)
        # Rank 0 alone is verbose, as a rule: then all ranks look at overflows, of which they tell each other.
        self.options = replace(self.options, verbose=bool(self.shard_group.all_reduce_max([verbose])[0]))
        groups = connected(make_groups(self.shard_group, assignment.groups, lines[1:]), self.options)
        self.shard_group = groups[0]
        retire_former([p for p in names if p.requires_grad], names, self.shard_group)
        self.sharded_parameters = ParameterStore(groups, assignment.number_of)
        sharding = shard(optimizer, self.sharded_parameters, self.options, names, CONSTRUCT, model)
        with together(self.shard_group, CONSTRUCT):
            sharding.take_slices()
            self._assemble(optimizer, model, scaling)
        log_start(self.sharded_groups, self.sharded_parameters, self.options)

    # ---- the parts of a step ----

    def _assemble(self, optimizer: Optimizer, model: nn.Module | None, scaling: dict[str, Any]) -> None:
        """Put the parts together that a step is made of, on this rank; hooks on parameters come with them."""
        super().__init__(optimizer)
        self.model = model
        self.device = self.sharded_parameters.records[0].padded.device
        self.streams = streams_of([self.device])
        self._make_state(scaling)
        self._guard = Guard(optimizer, self.sharded_parameters, model, self.step_state, self.streams)
        self._settings = Settings(optimizer)
        self._untrained = Untrained(model, self.sharded_parameters, self.shard_group.group_rank, alive)
        self._make_groups()
        self.calls = Calls(self.sharded_groups, self.shard_group, self._guard, self.step_state)
        self.gradients = OptimizerGradients(self.sharded_groups, self.shard_group, self.calls, self.step_state)
        self.gradients.make_handles(self.sharded_parameters)
        self._make_stepper()
        register(self)

    def _make_state(self, scaling: dict[str, Any]) -> None:
        """What a step knows of itself: how gradients are scaled, and how far they are."""
        half = any(record.p.dtype == torch.float16 for record in self.sharded_parameters)
        self.scaler = LossScaler(**scaling, device=self.device) if half else None
        self.step_state = StepState(self.options.unit(self.shard_group.ranks), self.scaler)
        self._skips_synchronize = False
        self._warned = False

    def _make_groups(self) -> None:
        """What takes the gradients of each shard group's parameters to new values."""
        parameters, options = self.sharded_parameters, self.options
        self.sharded_groups = []
        self._observer = BadNumbers(parameters, self.sharded_groups, options, self.scaler)
        stepping = StepOnHost(self.streams) if options.cpu_offload else StepOnDevice()
        self._maker = GroupMaker(parameters, options, self.streams, stepping, self.step_state, self._observer.packed)
        self._maker.extend(self.sharded_groups)

    def _make_stepper(self) -> None:
        """What steps all of them, and when that wants the norm."""
        options = self.options
        step_whole = whole_step(self.optim, self.sharded_parameters)
        self._stepper = Stepper(self.optim, self.sharded_groups, step_whole, on_host=options.cpu_offload)
        self._norm_first = options.clip_grad_norm > 0 or self.scaler is not None or options.error_if_nonfinite
        self._tells_norm = self._norm_first or not options.overlap_allgather

    def __del__(self) -> None:
        if "_guard" in self.__dict__:
            let_go(self)

    # ---- backward: gradients become each rank's slice of their sum ----

    def backward(
        self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Backward through ``loss`` and reduce the gradients: every rank calls it, whatever its loss touches.

        fp16: the loss is scaled. Under ``no_sync`` gradients stay in ``p.grad``; otherwise ``p.grad`` is a
        ``ShardedGradient`` afterwards, of which each rank holds a slice. A loss that doesn't require grad contributes
        nothing.
        """
        with self._gradient_sync(loss, inputs, self.scaler, by_itself=True) as scaled:
            self._run_backward(scaled, None, inputs, retain_graph)

    def backward_by_grad(
        self,
        tensor: Tensor,
        grad: Tensor | None,
        inputs: Tensor | Sequence[Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Backward from ``tensor`` with its gradient ``grad``, as a pipeline stage does.

        fp16: ``grad`` must carry ``loss_scale`` already, as it does when it comes from a later stage.
        """
        with self._gradient_sync(tensor, inputs, by_itself=True):
            self._run_backward(tensor, grad, inputs, retain_graph)

    def backward_pass(
        self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None = None
    ) -> AbstractContextManager[Tensor]:
        """What ``backward`` does, around a backward that somebody else runs, as trainers do; every rank enters it::

            with optimizer.backward_pass(loss) as scaled:
                scaled.backward()

        fp16: ``scaled`` is the loss times the loss scale, and the backward has to be run from it; else it is the loss.
        Several optimizers' contexts may be nested around one backward.

        Args:
            loss: what the backward is run from, or a multiple of it.
            inputs: what the backward is given as such.

        Raises:
            RuntimeError: fp16, and gradients came from another backward than that of the scaled loss.
        """
        return self._gradient_sync(loss, inputs, self.scaler)

    @contextmanager
    def _scaled(self, loss: Tensor, scale: Tensor) -> Iterator[Tensor]:
        """``loss`` times ``scale``, which the gradients that come must be those of."""
        with torch.enable_grad():
            scaled = loss * scale.to(loss.device)
        if not scaled.requires_grad:
            yield scaled
            return
        ran: list[Tensor] = []
        scaled.register_hook(ran.append)  # type: ignore[no-untyped-call]
        yield scaled
        if not ran and any(each.reducer.has_gradients for each in self.sharded_groups):
            raise RuntimeError(
                "expected the backward of a model with fp16 parameters from the scaled loss, got one from another: "
                "write «with optimizer.backward_pass(loss) as scaled: scaled.backward()», and begin the step anew with "
                "optimizer.zero_grad()"
            )

    def _run_backward(
        self, tensor: Tensor, grad: Tensor | None, inputs: Tensor | Sequence[Tensor] | None, retain_graph: bool
    ) -> None:
        if tensor.requires_grad:
            torch.autograd.backward(tensor, grad, retain_graph=retain_graph, inputs=inputs)
        elif not self._warned:
            self._warned = True
            rank = self.shard_group.group_rank
            _log.warning("backward: a loss that doesn't require grad on rank %d adds nothing", rank)

    @contextmanager
    def _gradient_sync(
        self,
        loss: Tensor,
        inputs: Tensor | Sequence[Tensor] | None,
        scaler: LossScaler | None = None,
        by_itself: bool = False,
    ) -> Iterator[Tensor]:
        """Run the reductions of a backward of this optimizer's own; in each group, whatever one of them raises."""
        self._guard.enter("backward")
        refuse_compiled("backward")
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss: expected a tensor, got {type(loss).__name__}: add several losses up first")
        if self.sharded_parameters.frozen:
            self._guard.refuse_unfrozen()
        if self.step_state.syncs and self.step_state.phase is Phase.SYNCHRONIZED:
            refuse(self.shard_group, "run a backward")
        failed, self.step_state.deferred = True, None
        StepState.in_backward.append(self.step_state)
        try:
            with ExitStack() as begins:
                for each in reversed(self.sharded_groups):
                    begins.callback(each.reducer.begin, loss, inputs, by_itself)
            context = self.options.backward_context or nullcontext
            with context(), nullcontext(loss) if scaler is None else self._scaled(loss, scaler.scale) as scaled:
                yield scaled
            failed = False
        finally:
            StepState.in_backward.remove(self.step_state)
            if failed:
                self.step_state.note_failure(sys.exc_info()[1])
            with ExitStack() as ends:
                for each in reversed(self.sharded_groups):
                    ends.callback(each.reducer.end, failed)
        if self.step_state.deferred is not None:
            self.step_state.raise_deferred()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in ``p.grad``, in its dtype and unreduced, until a backward outside."""
        state = self.step_state  # which another optimizer may retire meanwhile
        before, state.syncs = state.syncs, False
        try:
            yield
        finally:
            state.syncs = before

    # ---- between backward and step: what callers make of gradients ----

    @torch.no_grad()
    def synchronize(self) -> None:
        """Finish the reductions now: each slice gets its gradient, which may be edited before it is stepped.

        Afterwards ``.grad`` of every slice ``p32`` in ``optimizer.optim.param_groups`` is its slice of the averaged,
        unscaled gradient: ``[s]``, of ``p32``'s dtype and device (fp32, on the host with ``cpu_offload``), or None
        where no rank had one. Edit it in place, assign another, or None to leave its parameter out; then
        ``with optimizer.skip_synchronize(): optimizer.step()`` steps with what is there. Every rank calls it, after
        the last backward, and leaves the same parameters with gradients. What a slice is edited by must not depend
        on the rest of the parameter, of which other ranks hold slices: for a norm there is ``clip_grad_norm_``. Until
        ``step`` or ``zero_grad`` full gradient slices are held in ``p32``'s dtype. From Horovod.

        fp16: what overflowed is skipped by the step, whatever has been made of it.

        Raises:
            RuntimeError: called again before ``step`` or ``zero_grad``, or under ``no_sync``.
        """
        if self.step_state.phase is Phase.SYNCHRONIZED:
            refuse(self.shard_group, "synchronize")
        if not self.step_state.syncs:
            raise RuntimeError(
                "expected synchronize() outside of no_sync, where gradients are reduced, got it within: "
                "run the last backward, and synchronize(), after the with block"
            )
        call, norm = self.calls.enter("synchronize"), self._new_norm()
        with self.calls.taking_part(norm.catch_up if self.scaler is not None else nullcontext):
            self.calls.finish_gradients(call)
            unit = self.step_state.gradient_scale()
            if self.scaler is not None:
                self._measure(norm, unit)
                self._overflow = ~norm.value.isfinite()
            for each in self.sharded_groups:
                each.gradients.materialize_grads(float(unit) if self.options.cpu_offload else unit)
            self.step_state.phase = Phase.SYNCHRONIZED

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` takes the gradients that ``synchronize`` has left, as they have been edited since."""
        before, self._skips_synchronize = self._skips_synchronize, True
        try:
            yield
        finally:
            self._skips_synchronize = before

    def _release_grads(self) -> None:
        """Gradients are their caller's no longer."""
        self.step_state.phase = Phase.COMPLETE
        for each in self.sharded_groups:
            each.gradients.release_grads()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients, after backward, to a global L2 norm; returns the norm before, 0-d fp32.

        What ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` does for a plain optimizer; that
        function itself would see no gradients here. After ``synchronize`` the slices' ``.grad`` are clipped. Every
        rank calls it, with the same ``max_norm``.
        """
        MAX_NORM("max_norm", max_norm)
        call, norm = self.calls.enter("clip_grad_norm_"), self._new_norm()
        call = call._replace(name=f"{call.name} to {max_norm}")
        with self.calls.taking_part(norm.catch_up):
            self.calls.finish_gradients(call)
            state = self.step_state
            self._measure(norm, 1.0 if state.phase is Phase.SYNCHRONIZED else state.gradient_scale())
            factor = clip_factor(norm.value, max_norm)
            for each in self.sharded_groups:
                each.gradients.multiply([record for record in each.records if record.worked], factor)
        return norm.value

    def _measure(self, norm: GlobalNorm, unit: float | Tensor) -> None:
        """Start the norm of all gradients, times ``unit``."""
        norm.scale = unit
        for each in self.sharded_groups:
            for bucket in each.gradients.sums():
                norm.add(bucket.measured)
        norm.start()

    def _new_norm(self) -> GlobalNorm:
        """Summed in fp64 at least where a parameter of experts is: other ranks may have none of those."""
        several = len(self.sharded_parameters.shard_groups) > 1
        double = several and any(record.communication_dtype == torch.float64 for record in self.sharded_parameters)
        return GlobalNorm(self.shard_group, self.device, dtype=torch.float64 if double else torch.float32)

    # ---- step: norm, clip, step the slices, gather them ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the reductions and step what has a gradient; every rank calls it. Under ``no_sync``: nothing.

        Args:
            closure: run first, with gradients enabled; its loss is returned.

        As in torch, gradients stay until ``zero_grad``. fp16: on an overflow on any rank nothing is stepped,
        gradients are cleared and the loss scale backs off.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.step_state.syncs:
            return loss
        call = self._enter_step()
        synchronized = self.step_state.phase is Phase.SYNCHRONIZED
        norm, self._stepper.left = self._new_norm(), None
        with self.calls.taking_part(partial(self._catch_up, norm), undefined=True):
            last = None if self._norm is None or self._tells_norm or self._norm.is_lost else self._norm.value
            if synchronized or self._skips_synchronize:
                check_edits(self.sharded_parameters, synchronized, self._skips_synchronize)
            self.calls.finish_gradients(call)
            self._observer.step_begins(last)  # which may ask the other ranks, so they have to be in this call
            if self._guard.edited:
                self._guard.follow_edits()
            self._take_step(norm, 1.0 if synchronized else self.step_state.gradient_scale())
            self._norm = norm
            if synchronized:
                self._release_grads()
            self._end_step()
        self._observer.cleared()
        lacked = True in [each.reducer.has_lacked for each in self.sharded_groups]
        self._untrained.look(self.sharded_groups[0].group.progress.step, lacked)
        if self.options.verify_every and self.shard_group.progress.step % self.options.verify_every == 0:
            self._verify()
        return loss

    def _enter_step(self) -> Call:
        """Begin a step, for which the ranks compare what steers it, and which weights have been written."""
        call = self.calls.enter("step")
        others = {"clip_grad_norm": self.options.clip_grad_norm, **(self.scaler.settings() if self.scaler else {})}
        settings = self._settings.at(self.sharded_groups[0].group.progress.step, others)
        return call._replace(settings=settings, written=self._guard.edited)

    def _take_step(self, norm: GlobalNorm, unit: float | Tensor) -> None:
        """Step and gather, with gradients of this ``unit``; the norm is measured on the way, if it isn't due before."""
        if not self._norm_first:
            norm.scale = unit
            self._stepper.step(Scale(unit), norm)
            self._judge(norm)
            return
        self._measure(norm, unit)
        self._judge(norm)
        if self.options.clip_grad_norm > 0:
            unit = unit * clip_factor(norm.value, self.options.clip_grad_norm)
        if norm.is_empty and len(self.sharded_parameters.shard_groups) == 1:
            return
        flag = None
        if self.scaler is not None:
            flag = self._overflowed(norm)
            self.scaler.update(flag)
            if not self._skips_by_flag:
                if flag.item():  # the host waits for the device; fp16 alone
                    self._skip(self.scaler)
                    return
                flag = None
        on_host = self.options.cpu_offload  # which waits for gradients anyway
        self._stepper.step(Scale(float(unit) if on_host else unit, flag), None)

    def _catch_up(self, norm: GlobalNorm) -> None:
        """Do what other ranks wait for in a step that has failed on this one."""
        try:
            if not self._norm_first:
                self._stepper.catch_up(norm)
                if norm.catch_up():
                    self._judge(norm)
            elif norm.catch_up() and self._leaves_out(norm):
                assert self.scaler is not None
                self._skip(self.scaler)
            else:
                self._stepper.catch_up(None)
        finally:
            self._end_step()

    def _leaves_out(self, norm: GlobalNorm) -> bool:
        """Whether other ranks leave the step out for an overflow, after they have looked at the norm."""
        self._judge(norm)
        return self.scaler is not None and not self._skips_by_flag and bool(self._overflowed(norm).item())

    def _judge(self, norm: GlobalNorm) -> None:
        """Have the norm looked at, once, where the host may wait for it now."""
        if self._tells_norm and not norm.is_judged:
            norm.is_judged = True
            self._observer.norm(norm.value)

    def _overflowed(self, norm: GlobalNorm) -> Tensor:
        """fp16: 0-d, whether the step is to be left out."""
        overflow = ~norm.value.isfinite()
        return overflow | self._overflow if self.step_state.phase is Phase.SYNCHRONIZED else overflow

    @property
    def _skips_by_flag(self) -> bool:
        """Whether the wrapped optimizer leaves the step out by itself, and the host needn't know."""
        return self._stepper.skips_by_flag and not self._observer.waits

    def _end_step(self) -> None:
        for each in self.sharded_groups:
            each.reducer.end_step()
            each.group.trim()

    def _skip(self, scaler: LossScaler) -> None:
        try:
            self._observer.skipped(scaler)
        finally:
            for each in self.sharded_groups:
                each.gradients.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, at any time: what is in flight is finished and forgotten.

        With ``set_to_none=False`` they become zeros, and a parameter that had one is stepped with it.
        """
        self._guard.enter("zero_grad")
        if self.step_state.phase is Phase.SYNCHRONIZED:
            self._release_grads()
        for each in self.sharded_groups:
            each.reducer.discard()
        self._observer.cleared()
        for each in self.sharded_groups:
            if set_to_none:
                each.gradients.clear()
            else:
                each.gradients.zero(each.records)
        for p in chain.from_iterable(self.sharded_parameters.groups):
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                record = self.sharded_parameters.find(p)
                if record is None or p.grad is not record.shown:
                    p.grad.detach_().zero_()

    # ---- param groups, of which an optimizer is made ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard one more group, as the wrapped optimizer's ``add_param_group`` would take it; every rank calls it.

        Parameters that were frozen at construction, and aren't any more, come in this way too. Those that
        ``pg_to_param_list`` had are shared as it says, all others by all data-parallel ranks.
        """
        self._guard.enter("add_param_group")
        self.finish_syncs("add_param_group")
        known = len(self.optim.param_groups)
        parameters, options = self.sharded_parameters, self.options
        try:
            names = add_group(param_group, self.optim, parameters, options, self.model, self.scaler is not None)
            retire_former([p for p in param_group["params"] if p.requires_grad], names, self.shard_group)
            sharding = shard(self.optim, parameters, options, names, ADD_GROUP)
        except BaseException:  # of whatever kind: the wrapped optimizer is as it was
            del self.optim.param_groups[known:]
            raise
        with together(self.shard_group, ADD_GROUP):
            sharding.take_slices()
            self._maker.extend(self.sharded_groups)
            self.gradients.make_handles(record for record in parameters if record.handle is None)
