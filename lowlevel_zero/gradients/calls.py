"""Calls on the gradients of one optimizer, which all ranks make together: they finish reductions and gathers first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..bookkeeping.sharded_parameter import ShardedParameter
from ..bookkeeping.step_state import Phase, StepState
from ..communication.agreement import Call, WrittenOnSome
from ..communication.shard_group import ShardGroup
from ..diagnostics.guards import Guard
from ..sharded_group import ShardedGroup
from .edits import refuse


class Calls:
    """Begins calls on the gradients of one optimizer, and finishes the reductions and gathers that they need.

    Args:
        groups: the parameters by the ranks that share them; the list may grow.
        ranks: all data-parallel ranks.
        guard: raises for calls that can't be made.
        state: of the optimizer's step.
    """

    def __init__(self, groups: Sequence[ShardedGroup], ranks: ShardGroup, guard: Guard, state: StepState) -> None:
        self._groups = groups
        self._ranks = ranks
        self._guard = guard
        self._state = state

    def enter(self, doing: str) -> Call:
        """Finish gathers for a call, and return the call, on which the ranks then have to agree.

        Raises:
            RuntimeError: it can't be made here or now.
        """
        self._guard.enter(doing)
        for each in self._groups:
            each.gathers.finish()
        return Call(doing, self._guard.trouble())

    def finish_gradients(self, call: Call) -> None:
        """Complete all gradients on all ranks, or raise on all of them if ``call`` can't be made on one."""
        for each in self._groups:
            try:
                each.reducer.finish(call)
            except WrittenOnSome as some:
                self._guard.check_same_values(some, each.records, each.group)
                each.reducer.finish(call._replace(written=()))
        if self._state.deferred is not None:
            self._state.raise_deferred()
        if self._state.phase is Phase.COMING:
            self._state.phase = Phase.COMPLETE

    def finish_gradients_for(self, doing: str) -> None:
        """Complete all gradients for a use of ``p.grad``; raise after ``synchronize``, which leaves none there."""
        call = self.enter(doing)
        if self._state.phase is Phase.SYNCHRONIZED:
            refuse(self._ranks, doing)
        self.finish_gradients(call)

    def finish_gradients_to_read(self, record: ShardedParameter, doing: str) -> None:
        """Complete all gradients to read that of ``record``, which ranks must have in common."""
        self._guard.enter(doing)
        self.finish_gradients(Call(f"{doing} of {record.common_name}"))

    def finish_syncs(self, doing: str) -> None:
        """Bring all ranks to the same gradient sync, with nothing in flight; ``p.grad`` stays. Communicates.

        Args:
            doing: one of the names of ``Call``, the same on every rank.
        """
        self._guard.refuse_in_backward(doing)
        with torch.inference_mode(False), torch.no_grad():  # sums will be added to later, outside of it
            for each in self._groups:
                each.reducer.agree_on_syncs(Call(doing))
        if self._state.deferred is not None:
            self._state.raise_deferred()
