"""LowLevelZeroOptimizer: one step told in order: backward, reduce, norm, step, gather."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .agreement import CONSTRUCT, Call, together
from .assignment import assign, data_parallel_group, make_groups
from .bookkeeping.gradient_sum import Scale
from .bookkeeping.offload import Offload
from .bookkeeping.parameter_store import ParameterStore, ShardedParameter, follow_edits
from .bookkeeping.step_observer import StepObserver
from .caller_names import CallerNames
from .communication.checked_group import checked
from .communication.collectives import ShardGroup
from .communication.two_levels import Ranks, check_hybrid, shard_group
from .construction import (
    check_dense_gradients,
    check_has_values,
    check_optimizer,
    check_parameters,
    check_steps_on_host,
    describe,
    parameter_names,
)
from .diagnostics.bad_numbers import BadNumbers
from .diagnostics.guards import Guard
from .diagnostics.verification import VerifyMethods
from .families import Families, ShardedGroup, log_start
from .grad_norm import GlobalNorm, clip_factor
from .gradient_methods import GradientMethods, measured
from .group_methods import GroupMethods
from .loss_scaler import LossScaler
from .optim.elementwise import check_elementwise
from .options import BackwardContext, ZeroOptions, debugging
from .sharding import Sharding, convert
from .state_methods import StateMethods
from .stepping import Stepper
from .streams import Streams, streams_of
from .wrapping import WrappingOptimizer

_log = logging.getLogger("lowlevel_zero")


class LowLevelZeroOptimizer(CallerNames, GradientMethods, GroupMethods, StateMethods, VerifyMethods, WrappingOptimizer):
    """Shards a torch optimizer over data-parallel ranks: ZeRO stage 1 and 2 (Rajbhandari et al., 2020).

    Each parameter is padded and viewed as ``[world_size, -1]``; every rank steps row ``rank`` of every
    parameter with ``optimizer`` and gathers the updated rows. The scheme is ColossalAI's low-level ZeRO, whose
    keywords it takes. All ranks construct it alike; rank 0's parameters, buffers and optimizer state are
    broadcast. From then on ``optimizer`` holds slices, not parameters. A parameter that needs padding, or shares its
    storage, moves to one of its own: other tensors over the old memory stay as they were, and don't follow it.

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
        reduce_bucket_size: elements in a communication bucket.
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
        stall_timeout: seconds after which a rank logs what it waits for and who is missing; 0: never.
        debug: compare ranks before each collective, and raise on all where they differ or one stays away; it is slow.
        verify_every: ``verify()`` after every so many steps; 0: never.
        max_skipped_steps: raise at the so manyth fp16 overflow in a row if the loss scale is at its minimum; 0: never.
        error_if_nonfinite: without fp16, refuse to step by a gradient norm that is inf or NaN; the host waits for it.

    Raises:
        RuntimeError: no process group is initialised, or another rank could not construct its optimizer, whatever its
            error was. (One that comes late, as of memory, leaves ``optimizer`` with slices: make another.)
        TypeError: an argument of the wrong type, or an optimizer that isn't elementwise.
        ValueError: a value out of range, contradictory options, a parameter that can't be sharded, or ranks
            that differ; the message names the parameter. Nothing has been changed then.
    """

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
        reduce_bucket_size: int = 1024 * 1024,
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
        stall_timeout: float = 60.0,
        debug: bool = False,
        verify_every: int = 0,
        max_skipped_steps: int = 20,
        error_if_nonfinite: bool = False,
    ) -> None:
        dp = data_parallel_group(dp_process_group, pg_to_param_list, optimizer)
        self._group = shard_group(dp, extra_dp_group, hybrid_shard)
        scaling: dict[str, Any] = {
            "initial_scale": initial_scale,
            "min_scale": min_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "max_scale": max_scale,
        }
        with together(self._group, CONSTRUCT) as agreed:
            self._options = ZeroOptions(
                partition_grad=partition_grad,
                reduce_scatter=reduce_scatter,
                bucket_size=reduce_bucket_size,
                communication_dtype=communication_dtype,
                forced_dtype=forced_dtype,
                overlap_communication=overlap_communication,
                overlap_allgather=overlap_allgather,
                cpu_offload=cpu_offload,
                master_weights=master_weights,
                clip_grad_norm=clip_grad_norm,
                hybrid_shard=hybrid_shard,
                assume_elementwise=assume_elementwise,
                fp8_communication=fp8_communication,
                fp8_min_numel=fp8_min_numel,
                reduce_scatter_with_fp32_accumulation=reduce_scatter_with_fp32_accumulation,
                gradient_predivide_factor=gradient_predivide_factor,
                reduction=reduction,
                pad_buckets_for_high_nccl_busbw=pad_buckets_for_high_nccl_busbw,
                backward_context=backward_context,
                verbose=verbose,
                stall_timeout=stall_timeout,
                debug=debugging(debug),
                verify_every=verify_every,
                max_skipped_steps=max_skipped_steps,
                error_if_nonfinite=error_if_nonfinite,
            )
            self._group.watch(self._options.stall_timeout)
            LossScaler(**scaling)
            check_hybrid(dp_process_group, extra_dp_group, hybrid_shard)
            names = self._check(optimizer, model)
            assignment = assign(pg_to_param_list, self._group, names, model)
            lines = [list(describe(optimizer, names, model, assignment.of, whose)) for whose in assignment.families]
            agreed += [*lines[0], *self._options.alike(), f"loss scale {scaling}"]
            agreed += assignment.in_common(names, self._options)
        # Rank 0 alone is verbose, as a rule: then all ranks look at overflows, of which they tell each other.
        self._options = replace(self._options, verbose=bool(self._group.largest([verbose])[0]))
        groups = [checked(each, self._options) for each in make_groups(self._group, assignment.groups, lines[1:])]
        self._group = groups[0]
        self._parameters = ParameterStore(groups, assignment.family_of)
        self._build(optimizer, model, names, scaling)

    # ---- construction: check, agree, then change ----

    def _check(self, optimizer: Optimizer, model: nn.Module | None) -> dict[Tensor, str]:
        """Raise for what can't be sharded; else the parameters' names."""
        check_optimizer(optimizer, model)
        names = parameter_names(optimizer, model)
        check_parameters([p for p in names if p.requires_grad], names, self._group, self._options.fp8_communication)
        check_has_values(model)
        check_dense_gradients(model, names)
        check_elementwise(optimizer, assume_elementwise=self._options.assume_elementwise)
        if self._options.cpu_offload:
            check_steps_on_host(optimizer)
        return names

    def _build(
        self, optimizer: Optimizer, model: nn.Module | None, names: dict[Tensor, str], scaling: dict[str, Any]
    ) -> None:
        for group in self._parameters.shard_groups:
            group.own_wires(sums_in_fp32=self._options.reduce_scatter_with_fp32_accumulation)
        with together(self._group, CONSTRUCT):
            if self._options.forced_dtype is not None:
                convert(optimizer, self._options.forced_dtype)
            sharding = Sharding(optimizer, self._parameters, self._options, names)
            sharding.include_untrained(model)
        sharding.start_alike()
        with together(self._group, CONSTRUCT):
            sharding.take_slices()
            super().__init__(optimizer)
            self._assemble(model, scaling)
        log_start(self._families, self._group)

    def _assemble(self, model: nn.Module | None, scaling: dict[str, Any]) -> None:
        """Put the parts together that a step is made of, on this rank; hooks on parameters come with them."""
        self._model = model
        records = self._parameters.records
        self._device = records[0].padded.device
        half = any(record.p.dtype == torch.float16 for record in records)
        self._scaler = LossScaler(**scaling, device=self._device) if half else None
        self._raw_unit = partial(_raw_unit, self._options.unit(self._group.ranks), self._scaler)
        streams = streams_of([record.padded.device for record in records])
        offload = Offload(streams) if self._options.cpu_offload else None
        groups: list[ShardedGroup] = []
        self._observer: StepObserver = BadNumbers(self._parameters, groups, self._options, self._scaler)
        self._families = Families(
            self._parameters, self._options, streams, self._raw_unit, offload, self._observer, groups
        )
        self._stepper = Stepper(self.optim, self._families, on_host=offload is not None)
        self._norm: GlobalNorm | None = None
        self._warned = False
        self._guard = Guard(self.optim, self._parameters, model)

    # ---- what rooms read: the records, and the few things that go with them ----

    @property
    def sharded_parameters(self) -> ParameterStore:
        """The records of the trained parameters, and the parameters of all groups; to be read only."""
        return self._parameters

    @property
    def sharded_groups(self) -> Sequence[ShardedGroup]:
        """The trained parameters by the ranks that share them, with what takes their gradients to new values."""
        return tuple(self._families)

    def sharded_group_of(self, record: ShardedParameter) -> ShardedGroup:
        """The ranks that share a parameter, and what belongs to them."""
        return self._families.of(record)

    @property
    def shard_group(self) -> ShardGroup:
        """All data-parallel ranks: those that call this optimizer's methods together."""
        return self._group

    @property
    def options(self) -> ZeroOptions:
        """The caller's choices."""
        return self._options

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._device

    @property
    def streams(self) -> Streams:
        """Those that this optimizer works on."""
        return self._families.streams

    @property
    def scaler(self) -> LossScaler | None:
        """The dynamic loss scale; None unless a parameter is fp16."""
        return self._scaler

    @property
    def model(self) -> nn.Module | None:
        """The module that was given at construction."""
        return self._model

    def finish_gathers(self) -> None:
        """Return when all parameters are up to date. Doesn't communicate: waits for what a step has started."""
        self._families.finish_gathers()

    def finish_gradients(self) -> None:
        """Finish all reductions: each record's gradient is complete then. Communicates: every rank calls it."""
        self._families.finish(Call("look at gradients"))

    def finish_syncs(self, doing: str) -> None:
        """Bring all ranks to the same gradient sync, with nothing in flight; ``p.grad`` stays. Communicates.

        Args:
            doing: what for: one of the names of ``Call``, the same on every rank.
        """
        self._families.even_out(Call(doing))

    def __del__(self) -> None:
        if "_guard" in self.__dict__ and not self._guard.forked:
            self._families.remove_hooks()
            with suppress(RuntimeError):  # others have gone
                self._finish_last_step()
                self._families.release()

    # ---- backward: gradients become each rank's slice of their sum ----

    def backward(
        self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        """Backward through ``loss`` and reduce the gradients: every rank calls it, whatever its loss touches.

        fp16: the loss is scaled. Under ``no_sync`` gradients stay in ``p.grad``; otherwise ``p.grad`` is None
        afterwards. A loss that doesn't require grad contributes nothing.
        """
        if self._scaler is not None and isinstance(loss, Tensor):
            with torch.enable_grad():
                loss = loss * self._scaler.scale.to(loss.device)
        self.backward_by_grad(loss, None, inputs, retain_graph)

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
        self._guard.enter_backward(tensor)
        self._refuse_double_reduction()
        with self._round(tensor, inputs):
            if tensor.requires_grad:
                torch.autograd.backward(tensor, grad, retain_graph=retain_graph, inputs=inputs)
            elif not self._warned:
                self._warned = True
                _log.warning("backward: a loss that doesn't require grad on rank %d adds nothing", self._group.place)

    @contextmanager
    def _round(self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None) -> Iterator[None]:
        """One backward of this optimizer's own, and the reductions that go with it."""
        context = self._options.backward_context
        failed = True
        try:
            self._families.begin(loss, inputs)
            with nullcontext() if context is None else context():
                yield
            failed = False
        finally:
            self._families.end(failed)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in ``p.grad``, in its dtype and unreduced, until a backward outside."""
        before, self._families.sync = self._families.sync, False
        try:
            yield
        finally:
            self._families.sync = before

    def _finish_last_step(self) -> None:
        """Wait for what a step has left under way."""
        self._families.finish_gathers()
        if self._norm is not None:
            _ = self._norm.value

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
        if not self._families.sync:
            return loss
        self._guard.enter("step")
        self._finish_last_step()
        self._observer.step_begins(None if self._norm is None else self._norm.value)
        overflow = self._complete_gradients()
        follow_edits(self._parameters.working())
        norm = self._new_norm()
        if self._options.clip_grad_norm > 0 or self._scaler is not None or self._options.error_if_nonfinite:
            self._step_by_norm(norm, overflow)
        else:
            self._stepper.step(Scale(self._unit()), norm)
        self._norm = norm
        if not self._options.overlap_allgather:
            self._finish_last_step()
            self._observer.norm(norm.value)
        self._families.end_step()
        self._observer.cleared()
        if self._options.verify_every and self._group.progress.step % self._options.verify_every == 0:
            self.verify()
        return loss

    def _step_by_norm(self, norm: GlobalNorm, overflow: Tensor | None) -> None:
        """The step whose size, or whether it is taken at all, depends on the norm: that has to be there before."""
        sums = self._families.sums()
        value = measured(sums, norm)
        self._observer.norm(value)
        unit = self._unit()
        if self._options.clip_grad_norm > 0:
            unit = unit * clip_factor(value, self._options.clip_grad_norm)
        if self._scaler is not None:
            overflow = ~value.isfinite() if overflow is None else ~value.isfinite() | overflow
        if not (sums or self._families.several):
            return
        by_flag = self._stepper.skips_by_flag and not self._observer.waits
        if not self._skips(overflow, by_flag):
            on_host = self._options.cpu_offload  # which waits for gradients anyway
            self._stepper.step(Scale(float(unit) if on_host else unit, overflow if by_flag else None), None)

    def _skips(self, overflow: Tensor | None, by_flag: bool) -> bool:
        """Whether the step is skipped, unless that is left to a flag: the host waits for the device; fp16 alone."""
        if overflow is None or self._scaler is None:
            return False
        self._scaler.update(overflow)
        if by_flag or not overflow.item():
            return False
        try:
            self._observer.skipped(self._scaler)
        finally:
            self._families.clear()
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, at any time: what is in flight is finished and forgotten.

        With ``set_to_none=False`` they become zeros, and a parameter that had one is stepped with it.
        """
        self._guard.enter("zero_grad")
        self._families.settle()
        self._observer.cleared()
        if set_to_none:
            self._families.clear()
        else:
            self._families.zero()
        for members in self._parameters.groups:
            for p in members:
                if set_to_none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.detach_().zero_()


def _raw_unit(unit: float, scaler: LossScaler | None) -> float | Tensor:
    """What a gradient that was summed over the ranks, of a scaled loss, is to be multiplied with."""
    return unit if scaler is None else unit / scaler.scale
