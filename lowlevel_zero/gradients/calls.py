"""Calls on one optimizer's gradients, which all ranks make together: they finish reductions and gathers first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from ..bookkeeping.sharded_parameter import ShardedParameter
from ..bookkeeping.step_state import Damage, StepState
from ..communication.agreement import Call, UnevenWrites, agree, is_raised_by_all, moment
from ..communication.failed_ranks import LostRank
from ..communication.shard_group import ShardGroup
from ..diagnostics.guards import Guard
from ..sharded_group import ShardedGroup
from ..streams import Streams


class Calls:
    """Begins calls on the gradients of one optimizer, and finishes the reductions and gathers that they need.

    Args:
        groups: the parameters by the ranks that share them; the list may grow.
        shard_groups: all shard groups, also those of which this rank has no parameters; the first has all ranks.
        guard: raises for calls that can't be made.

    Attributes:
        ranks: all data-parallel ranks.
        state: the state of the optimizer's step.
        has_experts: there are shard groups of a part of the ranks; alike on all ranks.
    """

    def __init__(
        self,
        groups: Sequence[ShardedGroup],
        shard_groups: Sequence[ShardGroup],
        guard: Guard,
        state: StepState,
        streams: Streams,
    ) -> None:
        self._groups = groups
        self.ranks = shard_groups[0]
        self.has_experts = len(shard_groups) > 1
        self._guard = guard
        self.state = state
        self._streams = streams

    def enter(self, doing: str) -> Call:
        """Check that a call may be made here, wait for gathers, and return the ``Call`` to agree on, with any error.

        Raises:
            RuntimeError: it can't be made here or now.
        """
        self._guard.enter(doing)
        for each in self._groups:
            each.gathers.finish()
        return Call(doing, self._guard.trouble())

    def finish_gradients(self, call: Call) -> None:
        """Agree on ``call``, and complete all gradients; raise on all ranks if one can't make it. Communicates."""
        self.agree(call, self._finish)
        self.state.failure.raise_deferred()
        self.state.complete = True

    def _finish(self, each: ShardedGroup, call: Call) -> None:
        """Finish one shard group's gradients; where ranks have written weights, compare these first. Communicates."""
        try:
            each.reducer.finish(call)
        except UnevenWrites as uneven:
            self._guard.check_same_values(uneven, each.records, each.group)
            each.reducer.finish(call._replace(written=()))

    def agree(self, call: Call, act: Callable[[ShardedGroup, Call], object]) -> None:
        """Run ``act``, which agrees on ``call``, for each shard group; if one rank raises, all do. Communicates.

        The ranks of experts may disagree among themselves alone, so where there are several shard groups, all ranks
        agree once more. The current stream then waits for all sums.
        """
        if not self.has_experts:
            act(self._groups[0], call)
        else:
            self._agree_in_all_groups(call, act)
        if self._streams.several:
            self._streams.join()

    def _agree_in_all_groups(self, call: Call, act: Callable[[ShardedGroup, Call], object]) -> None:
        """Run ``act`` in each shard group, and raise on all ranks if it has failed on one. Communicates."""
        error, since = None, moment()
        for each in self._groups:
            try:
                act(each, call)
            except LostRank:  # nothing can be agreed on any more; others may wait for this rank, and learn of its end
                raise
            except Exception as raised:  # of whatever kind: others go on to the agreement of all ranks
                if is_raised_by_all(raised, self.ranks, since):
                    raise
                if not is_raised_by_all(raised, each.group, since):
                    self.state.failure.note(raised, Damage.GRADIENTS)
                error = error or raised
        try:
            agree(self.ranks, None, error, call.name)
        finally:
            error = None  # its traceback holds this frame: a cycle would keep gradients alive

    def finish_gradients_to_read(self, record: ShardedParameter, doing: str) -> None:
        """Complete all gradients to read that of ``record``, which must be the same on every rank. Communicates."""
        self._guard.enter(doing)
        self.finish_gradients(Call(f"{doing} of {record.common_name}"))

    def finish_syncs(self, doing: str, updates: bool = False) -> None:
        """Run all ranks' gradient syncs to the end; unreduced gradients stay in ``p.grad``. Communicates.

        An error that costs this rank gradients is raised on all ranks by the next call that they agree on: the others
        go on with this one, which needs no gradients, and would wait for a rank that leaves it.

        Args:
            doing: one of the names of ``Call``, the same on every rank.
            updates: the call updates tensors on the device, as ``Guard.enter`` takes it.
        """
        self._guard.enter(doing, updates)
        with torch.inference_mode(False), torch.no_grad():  # later sums are added to these outside of inference mode
            self.agree(Call(doing), lambda each, call: each.reducer.agree_on_syncs(call))

    @contextmanager
    def taking_part(self, catch_up: Callable[[], object], damage: Damage = Damage.GRADIENTS) -> Iterator[None]:
        """Run the body of a public call; if it fails on this rank after the agreement, call ``catch_up``, and raise.

        An agreement tells errors of before it to all ranks, which raise together, and nothing has changed. After it a
        rank that fails takes part in what is left of the call's collectives with what it has, and raises its own error.
        Its peers finish the call with numbers that aren't to be used. They hear of it in the next call that the ranks
        agree on: it raises on all of them, and names the rank, its error and what to do: ``zero_grad`` where gradients
        are lost; loading a checkpoint where parameters and states are undefined, as by ``step``, and by gathers that
        overlap the next forward. (Calls that load, save, switch modes or add a group compare errors in ``together``.)

        Args:
            catch_up: starts what this rank hasn't started of the call's collectives, and finishes what it can.
            damage: the damage that an error in the middle of the call does.
        """
        since, self.state.failure.deferred, self.state.agreed = moment(), None, False
        try:
            yield
        except BaseException as error:
            if not self.state.agreed:
                self.state.failure.note(error)
            elif not is_raised_by_all(error, self.ranks, since):
                self.state.failure.note(error, damage)
                with suppress(Exception):  # the first error counts
                    if isinstance(error, Exception):
                        catch_up()
            raise
