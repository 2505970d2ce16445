"""Gradient syncs: each carries the gradients of one backward over the ranks, bucket by bucket in the plan's order.

A sync is opened, its buckets fill and start, it is closed, and its reductions end one after the other, in the order
of starting. Every rank runs the same syncs in the same order.

- No backward waits for other ranks without end, since they may be waiting for this one in another call: it bounds the
  buffers in flight as long as the others keep up.
- Where a sync is to hear which parameters the others use, and doesn't, it is put off until the ranks have agreed on a
  call.
- A rank that has run fewer syncs than others runs theirs with zeros when the ranks agree.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..communication.shard_group import ShardGroup
from ..communication.work import Work
from .bucket_plan import LearntPlan, PlanState
from .bucket_store import BucketStore
from .gradient_store import GradientStore
from .step_state import Damage, StepState
from .unused_parameters import UnusedParameters

# Seconds that a backward waits for other ranks, which may be waiting for this one in another call: at first, and where
# many waits were in vain, as if ranks run different numbers of backwards in each step.
_PATIENCE, _LEAST_PATIENCE = 1.0, 1 / 64


@dataclass(eq=False, repr=False)
class GradientSyncs:
    """Opens, closes and finishes the syncs of one shard group."""

    _group: ShardGroup  # the ranks that share the parameters
    _ranks: ShardGroup  # all ranks of the optimizer
    plan: LearntPlan  # the buckets that reductions follow
    unused: UnusedParameters  # exchanges which parameters the ranks use
    gradients: GradientStore  # where reduced gradients go
    buckets: BucketStore  # of the open sync, and in flight
    _state: StepState  # of the optimizer's step
    _most_in_flight: int | None  # reductions under way beyond which a backward waits for the oldest; None: for none
    in_order: bool  # reductions have one order on all ranks, as a communicator of a device needs it
    # Announcements of the syncs that run when all ranks agree, by the parameters that they carry.
    put_off: deque[Work[bytes]] = field(default_factory=deque)
    may_be_alone: bool = False  # with a sync of this step, that of a plain ``loss.backward()``
    by_itself: bool = True  # no other optimizer's backward runs within that of the open sync
    starts_early: bool = False  # complete buckets of the open sync start before its end
    _patience: float = _PATIENCE  # half as long after each wait in vain
    _announced: Work[bytes] | None = None  # the parameters that the open sync carries
    _unread: deque[Work[bytes]] = field(default_factory=deque)  # of syncs that carried all parameters

    # ---- one sync ----

    def open(self, reached: set[int] | None = None) -> None:
        """Open a sync of ``reached`` parameters (None: any), or put it off behind others. Communicates if detecting."""
        self._state.complete = False
        if self.put_off:  # all ranks run their syncs in one order
            named = None if reached is None else reached.union(self.gradients.leftovers())
            self.put_off.append(self.unused.exchange(named))
            return
        if self.buckets.in_flight:
            self._finish_some(leave=0)
        self._group.context.begun += 1
        self.buckets.open_sync(self.plan.whole if reached is None else None, reached)
        if reached is not None:
            self._announced = self.unused.exchange(reached.union(self.gradients.leftovers()))
        elif self.unused.detecting:
            self._unread.append(self.unused.exchange(None))

    def start_complete(self) -> None:
        """Start the open sync's complete buckets, once their plan is known. Communicates."""
        if self._announced is not None and self._announced.ready():
            self._read(self._announced)
        if self._announced is None:
            self._start()

    def close(self) -> bool:
        """Start the open sync's last buckets, and close it; return False if other ranks don't come to it. Communicates.

        The gradients of a sync that was put off stay in ``p.grad`` until all ranks agree.
        """
        announced = self._announced
        if announced is not None and not self._comes(announced):
            self._announced = None
            self._group.context.begun -= 1
            self.put_off.append(announced)
            self.buckets.close()
            self.gradients.put_back()
            return False
        if announced is not None:
            self._read(announced)
        self._start(close=True)
        self.buckets.close()
        self.gradients.put_back()
        self._group.progress.micro_batch += 1
        if not self.plan.order and self.plan.first is None:
            self.plan.first = list(self.buckets.arrivals)
        if self.buckets.expected is not None:
            self.unused.learnt.update(set(self.buckets.arrivals).difference(self.buckets.expected))
        self._finish_some()
        return True

    def _read(self, announced: Work[bytes]) -> None:
        """Wait to hear which parameters some rank uses in the open sync, and make its buckets of these."""
        self._announced = None
        self.buckets.follow(self.plan.of(announced.wait()))

    def _start(self, close: bool = False) -> None:
        """Start complete buckets in the plan's order; with ``close``, all that are left. Communicates."""
        waiting = self.buckets.waiting
        while waiting and (close or not waiting[0].missing):
            self.buckets.start_next()
            self._finish_some()

    # ---- the others' syncs, when the ranks agree ----

    def catch_up(self, syncs: int, takes_leftovers: bool) -> None:
        """Run the syncs that were put off, and then others' until ``syncs`` have run in this step. Communicates.

        ``takes_leftovers``: they carry the gradients that are left in ``p.grad``.
        """
        while self._unread:
            self._unread.popleft().wait()
        while self.put_off:
            self._join(self.put_off.popleft().wait())
        while self._group.progress.micro_batch < syncs:
            used = None
            if self.unused.detecting:
                used = self.unused.exchange(self.gradients.leftovers() if takes_leftovers else ()).wait()
            self._join(used)

    def _join(self, used: bytes | None) -> None:
        """Run a sync with this rank's leftovers or zeros, of the parameters ``used``; None: of all. Communicates."""
        self._group.context.begun += 1
        self.buckets.open_sync(self.plan.whole if used is None else self.plan.of(used), ())
        self.close()

    # ---- reductions end, in the order of starting ----

    def finish(self) -> None:
        """Wait for all reductions under way, and add their sums."""
        while self.buckets.in_flight:
            self._finish_oldest()

    def _finish_some(self, leave: int | None = None) -> None:
        """Finish old reductions during a backward, to bound the buffers held; wait only while ranks keep up.

        Wait for none where this rank may be alone with it: others may not have begun, and not begin until all agree.
        """
        in_flight = self.buckets.in_flight
        if not self.may_be_alone and self.by_itself and self._state in StepState.in_backward:
            leave = self._most_in_flight if leave is None else leave
            while leave is not None and len(in_flight) > leave and self._comes(in_flight[0].work):
                self._finish_oldest()
        while in_flight and in_flight[0].work.ready():
            self._finish_oldest()

    def _comes(self, work: Work[Any]) -> bool:
        """Wait for other ranks' part of a work, a second at most; return whether it has come.

        They may have come to another call than a backward, and wait for this rank there. Once a wait was in vain there
        are no more until the ranks have agreed. Where several optimizers share an order, they have agreed on this
        backward.
        """
        if work.ready() or self.shares_order:
            return True
        if not self.may_be_alone:
            self.may_be_alone = not self._group.comes(work, self._patience)
            if self.may_be_alone:
                self._patience = max(self._patience / 2, _LEAST_PATIENCE)
        return not self.may_be_alone

    def _finish_oldest(self) -> None:
        """Wait for the oldest reduction, add its sum, and drop the gradients that were cleared meanwhile.

        After an error zeros are added. A later call raises the error: the other reductions are to end as they do on
        other ranks.
        """
        bucket = self.buckets.in_flight.popleft()
        for total in (partial(bucket.finish_reduce, self.buckets.streams), partial(self.buckets.lost_sum, bucket)):
            try:
                with self.buckets.streams.beside():  # whose end may raise, too
                    self.gradients.accumulate(bucket, total())
                break
            except BaseException as error:  # zeros are next: all ranks keep the same buckets
                self._state.failure.defer(error)
        if bucket.dropped_next:
            try:
                with self.buckets.streams.beside():
                    self.gradients.drop(bucket.dropped_next)
            except BaseException as error:
                self._state.failure.defer(error)

    # ---- the plan that they follow, saved and loaded between steps ----

    def plan_state(self) -> PlanState | None:
        """Return the learnt order and what goes with it, to be saved; None: no step has been taken yet."""
        plan, repeats = self.plan, list(self.buckets.repeats)
        return PlanState(plan.order, plan.came, repeats, self.unused.detecting) if plan.order else None

    def restore_plan(self, state: PlanState | None) -> None:
        """Follow a saved bucket plan, or learn one if None; forget damage to parameters. No sync may be under way.

        Gradients may stay: to sums in buckets of the former plan, later ones are added parameter by parameter.
        """
        self._state.failure.mend(Damage.PARAMETERS)
        order, came, repeats, detecting = state or PlanState([], 0, [], False)
        self.buckets.repeats = set(repeats)
        self.unused.detecting, self.unused.lacked = detecting, False
        self.plan.restore(detecting, order, came)

    # ---- queries ----

    @property
    def shares_order(self) -> bool:
        """Return whether several optimizers share one order of reductions on a device."""
        return self.in_order and self._ranks.context.is_shared
