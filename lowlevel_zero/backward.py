"""Backwards of one optimizer: each opens a gradient sync in every shard group, and closes them even after an error.

Where optimizers share a communicator on a device, each begins by an agreement of the ranks, so the reductions of all
optimizers have one order there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .bookkeeping.step_state import Damage, StepState, refuse_compiled
from .communication.agreement import Alike, agree
from .diagnostics.guards import Guard
from .sharded_group import ShardedGroup

_log = logging.getLogger("lowlevel_zero")

Inputs: TypeAlias = "Tensor | Sequence[Tensor] | None"  # as torch's backward takes them

_BACKWARDS = Alike(
    "the same backwards of this optimizer",
    "run them alike on all ranks, and begin the step anew with optimizer.zero_grad() on all",
)


@cache
def _leave_to_python() -> None:
    """Tell ``torch.compile``, once a process, to run this package's functions uncompiled.

    Where it compiles a function that calls ``backward`` or ``step``, it would trace the exchange of the ranks.
    """
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")  # which torch.optim has imported
    if rules is not None:
        rules.add(__name__.partition(".")[0])


@dataclass(eq=False, repr=False)
class Backwards:
    """Runs backwards, and has the gradients of each reduced."""

    _groups: Sequence[ShardedGroup]  # the parameters by shard group; the list may grow
    _guard: Guard  # checks each call
    _state: StepState  # of the optimizer's step
    _context: Callable[[], AbstractContextManager[object]]  # each runs in one that this makes
    _warned: bool = False  # of a loss that doesn't require grad

    def __post_init__(self) -> None:
        _leave_to_python()

    @contextmanager
    def sync(self, loss: Tensor, inputs: Inputs, scales: bool = False, by_itself: bool = False) -> Iterator[Tensor]:
        """Open a backward's sync, run the body, and close it even after an error. Communicates.

        It yields the loss; if it ``scales``, times the loss scale. ``by_itself``: no other optimizer's backward runs
        within the body.
        """
        self._guard.enter("backward", wakes=False)
        refuse_compiled("backward")
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss: expected a tensor, got {type(loss).__name__}: add several losses up first")
        self._guard.refuse_unfrozen()
        self._agree()
        failed, self._state.failure.deferred = True, None
        StepState.in_backward.append(self._state)
        try:
            with ExitStack() as begins:
                for each in reversed(self._groups):
                    begins.callback(each.reducer.begin, loss, inputs, by_itself)
                begins.callback(self._state.wake_up)  # first; if it fails, this sync still comes before others'
            scale = self._state.scaler.scale if scales and self._state.scaler is not None else None
            with self._context(), nullcontext(loss) if scale is None else self._scaled(loss, scale) as scaled:
                yield scaled
            failed = False
        finally:
            StepState.in_backward.remove(self._state)
            if failed:
                self._state.failure.note(sys.exc_info()[1], Damage.GRADIENTS)
            with ExitStack() as ends:
                for each in reversed(self._groups):
                    ends.callback(each.reducer.end, failed)
        self._state.failure.raise_deferred()

    def run(self, loss: Tensor, grad: Tensor | None, inputs: Inputs, retain_graph: bool, scales: bool = False) -> None:
        """Run autograd's backward from ``loss`` in a sync, or warn once if it requires no grad. Communicates."""
        with self.sync(loss, inputs, scales, by_itself=True) as root:
            if root.requires_grad:
                torch.autograd.backward(root, grad, retain_graph=retain_graph, inputs=inputs)
            elif not self._warned:
                self._warned = True
                _log.warning(
                    "backward: the loss on rank %d doesn't require grad, so this rank adds no gradients, which is fine "
                    "where it has nothing to train on; else compute the loss from the model's output, outside no_grad",
                    dist.get_rank(),
                )

    @contextmanager
    def _scaled(self, loss: Tensor, scale: Tensor) -> Iterator[Tensor]:
        """Yield ``loss`` times ``scale``; raise afterwards if gradients came from another backward."""
        with torch.enable_grad():
            scaled = loss * scale.to(loss.device)
        if not scaled.requires_grad:
            yield scaled
            return
        ran: list[Tensor] = []
        scaled.register_hook(ran.append)  # type: ignore[no-untyped-call]
        self._state.has_come = False
        yield scaled
        if self._state.has_come and not ran:
            raise RuntimeError(
                "expected the backward of a model with fp16 parameters from the scaled loss, got one from another: "
                "write «with optimizer.backward_pass(loss) as scaled: scaled.backward()», and begin the step anew with "
                "optimizer.zero_grad()"
            )

    def _agree(self) -> None:
        """If optimizers share an order of reductions, raise on all ranks if backwards differ. Communicates then."""
        first, ranks = self._groups[0].reducer, self._groups[0].group
        if self._state.syncs and first.syncs.shares_order:
            within = any(each.syncs for each in StepState.in_backward)  # which starts its reductions after these
            doing = "run a backward within another optimizer's" if within else "run a backward"
            done = f"optimizer {ranks.number} {doing} after {ranks.progress.micro_batch} since the last step"
            agree(ranks, [done], None, doing, _BACKWARDS, failed=self._state.failure.words)
