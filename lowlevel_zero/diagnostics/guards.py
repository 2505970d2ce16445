"""Checks before a call: parameters and param groups must be as the optimizer left them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from operator import is_

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..bookkeeping.module_names import own_names
from ..bookkeeping.parameter_store import ParameterStore
from ..bookkeeping.sharded_parameter import ShardedParameter, free_each_other
from ..bookkeeping.step_state import StepState
from ..communication.agreement import SyncProgress, UnevenWrites, agree, raised_by_all, together
from ..communication.failed_ranks import run_each
from ..communication.shard_group import ShardGroup
from ..sharded_group import ShardedGroup
from ..streams import Streams
from .frozen_weights import REPLACED, FrozenWeights
from .verification import difference


class Guard:
    """Checks an optimizer's calls, parameters and param groups. Doesn't communicate unless a method says so.

    Attributes:
        edited: the records whose parameters were written or moved since the ranks agreed last, and those for which a
            state dict has brought a master, as ``trouble`` found.
        frozen: finds writes of other weights, once the optimizer is constructed.
    """

    def __init__(
        self,
        optim: Optimizer,
        parameters: ParameterStore,
        model: nn.Module | None,
        state: StepState,
        streams: Streams,
    ) -> None:
        self._state = state
        self._streams = streams
        self._optim = optim
        self._parameters = parameters
        self._model = model
        self.edited: list[ShardedParameter] = []
        self.frozen: FrozenWeights | None = None

    def enter(self, call: str, updates: bool = True, wakes: bool = True) -> None:
        """Raise ``RuntimeError`` where ``call`` can't be made, as in a backward or fork; else end a sleep if ``wakes``.

        A call that ``updates`` tensors on the device is also refused in inference mode and in a graph's capture. One
        that ``wakes`` brings back what sleeps on the host.
        """
        progress = self._parameters.shard_groups[0].progress
        if os.getpid() != progress.process:
            progress.check_process(call)
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{call}: expected it outside of backward, got it within one: don't call it in a hook or a "
                "torch.autograd.Function"
            )
        if self._state in StepState.in_backward:
            raise RuntimeError(
                f"{call}: expected it outside of optimizer.backward_pass, got it within: leave the with block first, "
                "which finishes the backward, and run one backward in it"
            )
        if updates and torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{call}: expected it outside of torch.inference_mode, whose tensors can't be updated later, got it "
                "within: use torch.no_grad where gradients aren't wanted"
            )
        if updates and self._streams.several and self._streams.captures():
            raise RuntimeError(
                f"{call}: expected it outside of a CUDA graph's capture, got it within: hosts have their part in it, "
                "which a graph doesn't replay: capture the model's forward and backward, as "
                "torch.cuda.make_graphed_callables does, and leave the optimizer out"
            )
        if wakes:
            self._state.wake_up()

    def trouble(self) -> RuntimeError | None:
        """List written parameters in ``edited``, and return the error that keeps this rank from stepping, or None."""
        self.edited = []
        try:
            if self._parameters.frozen:
                self.refuse_unfrozen()
            self._refuse_regrouped()
            self._look_at_parameters()
        except RuntimeError as error:
            return error
        return None

    def refuse_unfrozen(self) -> None:
        """Raise ``RuntimeError`` if a parameter that was frozen when its group was added requires grad now."""
        for p in self._parameters.frozen:
            if p.requires_grad:
                name = own_names(self._model).get(p, f"a {tuple(p.shape)} parameter")
                raise RuntimeError(
                    f"{name}: expected it frozen, as it was when the optimizer was constructed, found "
                    "requires_grad=True: hand it over with optimizer.add_param_group({'params': [p]}) on every rank "
                    "after unfreezing it"
                )

    def _look_at_parameters(self) -> None:
        """Collect edited parameters in ``edited``; raise for a converted one, or for a slice that was written."""
        for record in self._parameters.records:
            p = record.p
            written = p.data_ptr() != record.address or p._version != record.version
            if written or record.saved_master is not None:
                self.edited.append(record)
                if p.requires_grad or record.worked:
                    record.check_kind()
            if record.p32._version != record.slice_version and not record.is_empty:
                raise RuntimeError(
                    f"{record.name}: expected its slice in param_groups to be written by the wrapped optimizer's step "
                    "alone, found a write by other code, which the model hasn't seen: write the model's parameters "
                    "instead, or wrap the optimizer that writes (LowLevelZeroOptimizer(Lookahead(AdamW(...)))), and "
                    "load a checkpoint to go on"
                )

    def check_same_values(self, uneven: UnevenWrites, records: Sequence[ShardedParameter], group: ShardGroup) -> None:
        """Raise on all ranks unless unevenly written parameters are equal, and add them to ``edited``. Communicates.

        They are equal if a rank swaps weights for averaged ones and back, or writes values that others receive from it.
        What some ranks have replaced is refused whatever its values are, since these ranks train it no more.
        """
        written = [record for record in records if record.name in uneven.names]
        names: dict[Tensor, str] = {record.p: record.name for record in written}
        if self.frozen is not None:
            names.update(self.frozen.named(uneven.names))
        if any(name.endswith(REPLACED) for name in uneven.names) or difference(names, group) is not None:
            raise raised_by_all(RuntimeError(str(uneven)), group) from None
        for record in written:
            record.version = -1
        self.edited += [record for record in written if record not in self.edited]

    def refuse_uneven(self, doing: str, groups: Sequence[ShardedGroup]) -> None:
        """Raise on all ranks if some have written parameters, and values differ between ranks. Communicates.

        Args:
            doing: the call that the ranks make, in words.
            groups: the optimizer's parameters by the ranks that share them.
        """
        with together(self._parameters.shard_groups[0], doing):
            run_each(partial(self._refuse_uneven, doing, each) for each in groups)

    def _refuse_uneven(self, doing: str, group: ShardedGroup) -> None:
        """Raise on all ranks of ``group`` if some have written its parameters, and values differ. Communicates."""
        written = [(record.name, record.writes) for record in group.records if record.writes]
        try:
            agree(group.group, None, None, doing, progress=SyncProgress(written=written))
        except UnevenWrites as uneven:
            self.check_same_values(uneven, group.records, group.group)

    def follow_edits(self) -> None:
        """Copy edited parameters into their masters, and moved ones back to their storages. Doesn't communicate."""
        free_each_other(self.edited)
        for record in self.edited:
            trained = record.p.requires_grad or record.worked
            with nullcontext() if trained else suppress(RuntimeError):  # a frozen one may have been converted
                record.follow_edits()
                record.note_version()
        self.edited = []

    def _refuse_regrouped(self) -> None:
        """Raise ``RuntimeError`` if the caller has changed the slices in the optimizer's param groups."""
        expected = self._parameters.slices
        groups = self._optim.param_groups
        if len(groups) != len(expected):
            raise RuntimeError(
                f"param_groups: expected the {len(expected)} groups of this optimizer, found {len(groups)}: {_EDIT}"
            )
        for at, (group, slices) in enumerate(zip(groups, expected, strict=True)):
            held = group["params"]
            if len(held) != len(slices) or not all(map(is_, held, slices)):
                raise RuntimeError(
                    f"param_groups[{at}]['params']: expected the {len(slices)} slices that the optimizer put there, "
                    f"found {len(held)} tensors, not all of them these: {_EDIT}"
                )


_EDIT = (
    "bring parameters in by optimizer.add_param_group on every rank, and leave one out by p.requires_grad_(False) or "
    "a learning rate of 0"
)
