"""The reducer: decides which sync carries a gradient, and has the ranks agree so that all run the same syncs.

- ``optimizer.backward`` is one sync on every rank, whatever its loss touched there.
- A plain ``loss.backward()`` opens a sync with its first gradient. A rank whose loss touched nothing opens none, so
  the ranks agree at the step on how many they have run, and who is behind joins with zeros. Until then nobody waits
  for a reduction, since its peers may be waiting to agree.
- Where there are other optimizers, the gradients of a plain ``loss.backward()`` are reduced once the ranks have agreed,
  and so are those of further shard groups: each rank alone knows what it has run, and in which order.
- Gradients that came after their bucket had left (a weight in two nested backwards) wait in ``p.grad`` for one more
  sync, before the step, on all ranks.
- Gradients that arrive while another optimizer runs its backward (a GAN's generator loss passing through the
  discriminator) stay in ``p.grad``, as in plain torch, until this one's next sync, or ``zero_grad``; whatever reads or
  edits ``p.grad`` until then has them reduced first.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import ReferenceType, finalize, ref

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .bookkeeping import shown_gradients
from .bookkeeping.gradient_sync import GradientSyncs
from .bookkeeping.plain_backwards import PlainBackwards
from .bookkeeping.sharded_parameter import ShardedParameter
from .bookkeeping.step_state import CLEARS, Damage, StepState, refuse_compiled
from .communication.agreement import Call, SyncProgress, agree, raised_by_all
from .communication.shard_group import ShardGroup

_log = logging.getLogger("lowlevel_zero")


@dataclass(eq=False, repr=False)
class Reducer:
    """Turns the gradients of backwards into each record's ``g``, for one shard group."""

    _number: int  # index of the shard group
    _group: ShardGroup  # the ranks that share the parameters
    _records: Sequence[ShardedParameter]  # the parameters, by index
    syncs: GradientSyncs  # carry gradients
    _overlaps: bool  # reductions start during a backward
    _state: StepState  # of the optimizer's step
    has_lacked: bool = False  # a step has lacked a gradient of some parameter on some rank
    _hooks: list[RemovableHandle] = field(default_factory=list)
    _keeps_some: bool = False  # gradients of plain backwards, until the ranks agree
    _dropped: list[tuple[int, str]] = field(default_factory=list)  # parameters, and when; the ranks compare them
    edited: Counter[str] = field(default_factory=Counter)  # edits of gradients, which the ranks compare next

    def __post_init__(self) -> None:
        self.plan, self._unused = self.syncs.plan, self.syncs.unused
        self._gradients, self._buckets = self.syncs.gradients, self.syncs.buckets
        self._streams = self._buckets.streams
        self._backwards = PlainBackwards(self._backward_ended)
        self.remove_hooks = finalize(self, _remove, self._hooks)  # leaves the parameters as they were before
        self.extend()

    # ---- set up once, and again when parameters are added ----

    def extend(self) -> None:
        """Register hooks for new records, and start the bucket plan again in reverse order of registration."""
        for record in self._records[len(self._hooks) :]:  # a parameter outlives its optimizer
            hook = partial(Reducer.gradient_ready, ref(self), record)
            self._hooks.append(record.p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self.plan.restore(self._unused.detecting)

    # ---- gradients come ----

    def begin(self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None, by_itself: bool) -> None:
        """Open the sync of an ``optimizer.backward`` from ``loss``, unless under ``no_sync``. May communicate.

        ``by_itself``: no other optimizer's backward runs within.
        """
        if self._state.syncs:
            if self._shows_some or self._buckets.is_open:
                self._follow_callers(adds=True)
                self._gradients.take_out()
            self.syncs.by_itself = by_itself or self._state.is_alone
            ordered = self._number == 0 and (by_itself or not self.syncs.shares_order)
            self.syncs.starts_early = self._overlaps and (ordered or not self.syncs.in_order)
            reached = None
            try:
                if self._unused.detecting:
                    reached = self._unused.reached(loss, inputs)
            finally:  # as all ranks do: even where the graph can't be looked at, as if its backward had failed
                self.syncs.open(reached)

    def end(self, failed: bool) -> None:
        """Close the sync of an ``optimizer.backward``, if one is open, even after an error. Communicates.

        Other ranks wait for this rank's part. An interrupt waits for nobody, and leaves the sync open.
        """
        if failed and not isinstance(sys.exc_info()[1], Exception):
            self._gradients.put_back()
        elif self._state.syncs and self._buckets.is_open:
            self._close_sync()
            self._unused.lacked |= self._buckets.lacked and not failed
        else:
            self._gradients.put_back()
            if self.syncs.put_off and self._state.syncs:
                self._show_kept()

    @staticmethod
    def gradient_ready(reducer: ReferenceType[Reducer], record: ShardedParameter, _: Tensor) -> None:
        """Count a gradient in ``p.grad`` for its bucket, or let it wait; start complete buckets. Communicates."""
        self = reducer()
        assert self is not None, "its hooks go with it"
        buckets, state, running = self._buckets, self._state, StepState.in_backward
        usual = running and running[-1] is state and state.syncs and buckets.is_open and buckets.expected is None
        earlier, record.arrived = record.arrived, True
        state.has_come = True
        if self._streams.several:
            self._streams.note_gradient_stream()
        if (earlier or not usual) and not self._admit(record, earlier):
            return
        if buckets.fill(record) and self.syncs.starts_early:
            self.syncs.start_complete()

    def _admit(self, record: ShardedParameter, earlier: bool) -> bool:
        """Return whether a gradient is reduced now, opening a sync if need be; else it waits in ``p.grad``.

        A frozen one is dropped, in a sync of all parameters by its bucket. ``earlier``: ``p.grad`` had another before.
        """
        if not record.p32.requires_grad:
            of_this_sync = self._buckets.is_open and record.index in self._buckets.arrivals
            shown_gradients.drop_unreduced(record, earlier and not of_this_sync)
            return False
        running = StepState.in_backward
        of_another = bool(running) and running[-1] is not self._state
        if not self._state.syncs or of_another:
            if not running:
                self._state.refuse_unscaled(record.name)
            if of_another and self._state.syncs and not (self._buckets.is_open or self._state in running):
                self._keep_until_all_agree()
                return False
            self._state.complete = False
            shown_gradients.note_waiting(record)
            return False
        if not self._buckets.is_open and not self._begin_plain(record):
            return False
        if not running:
            self._backwards.watch()
        return True

    def _begin_plain(self, record: ShardedParameter) -> bool:
        """Open the sync of a plain ``loss.backward()`` at its first gradient; return False if ranks must agree before.

        An error, as of a backward that can't be reduced, ends it, and other gradients don't come: they are lost.
        """
        try:
            self._group.progress.check_process(f"the backward of {record.name}")
            self._state.refuse_unscaled(record.name)
            refuse_compiled(record.name)
            if self._streams.captures():
                raise RuntimeError(
                    f"{record.name}: expected its gradient outside of a CUDA graph's capture, got it within, whose "
                    "replays run no hooks: capture parts of the model by torch.cuda.make_graphed_callables"
                )
            self._state.wake_up()
            if self._number > 0 or not self._state.is_alone or self.syncs.shares_order or self.syncs.put_off:
                self._keep_until_all_agree()
                return False
            self.syncs.may_be_alone = True
            self._follow_callers(adds=True)
            self.syncs.open()
            self.syncs.starts_early = self._overlaps
        except Exception as error:
            self._state.failure.note(error, Damage.GRADIENTS)
            raise
        return True

    def _keep_until_all_agree(self) -> None:
        """Leave a plain backward's gradient in ``p.grad`` until the ranks agree on a call."""
        if self._backwards.watch():
            self._follow_callers(adds=True)
        self._keeps_some = True
        self._state.complete = False

    def _backward_ended(self) -> None:
        """Close the sync of a plain backward that has ended; without one, show kept gradients. Communicates."""
        if self._buckets.is_open:
            self._close_sync()
            self._state.failure.raise_deferred()
        elif self._keeps_some:
            self._show_kept()

    def _show_kept(self) -> None:
        """Show sharded gradients in ``p.grad``, with unreduced ones pending, until the ranks agree."""
        self._keeps_some = True
        records = [record for record in self._records if not record.is_empty]
        shown_gradients.show(records)
        for record in records:
            record.p32.grad = record.slice_handle
            shown_gradients.note_waiting(record)

    # ---- one sync ----

    def warn_of_used(self) -> None:
        """Warn once, on the first rank, if a step has used gradients for the second time, with later ones added."""
        used = [bucket for bucket in self._gradients.buckets if bucket.reused] if self._state.warns_of_used else ()
        if used:
            self._state.warns_of_used = False
            _log.warning(
                "step: took gradients that an earlier step had used, as that of %s, with those of a later backward "
                "added, since neither zero_grad() of its optimizer nor of the model was called: call it in each step",
                used[0].records[0].name,
            )

    def _close_sync(self) -> None:
        """Close the open sync; if it is put off, show sharded gradients until the ranks agree. Communicates."""
        if not self.syncs.close():
            self._show_kept()

    @property
    def _shows_some(self) -> bool:
        """Return whether a sharded gradient may be in ``p.grad``."""
        return self._keeps_some or bool(self._buckets.in_flight or self._gradients.buckets)

    def _follow_callers(self, touched: Sequence[ShardedParameter] | None = None, adds: bool = False) -> None:
        """Drop gradients whose ``p.grad``, or slice's, the caller has set to None; close an open sync. May communicate.

        Which of its reductions have been started differs by rank, so it is closed first. Gradients that a later
        backward has left in it stay. If a backward ``adds``, sums are dropped that an assigned gradient replaces;
        raises if that is a slice's.
        """
        if touched is None:
            touched = self._gradients.touched() if self._shows_some else []
        for record in touched if adds else ():
            shown_gradients.check_before_backward(record)
        cleared = self._gradients.hide_cleared(touched, adds) if touched else []
        if self._buckets.is_open:
            self._drop([record for record in cleared if record.p.grad is not None])
            cleared = [record for record in cleared if record.p.grad is None]
            self._close_sync()
            shown_gradients.hide_gradients(cleared)  # which packing has shown again
        if cleared:
            self._drop(cleared)

    def _drop(self, cleared: Sequence[ShardedParameter]) -> None:
        """Drop sums of parameters, behind the reductions under way; note it for the ranks to compare later.

        So sums change in one order on all ranks.
        """
        in_flight = self._buckets.in_flight
        dropped = self._gradients.with_sums(cleared, in_flight)
        if dropped:
            self._state.wake_up()
            when = f"after backward {self._group.progress.micro_batch}"
            if self.syncs.put_off:  # their sums are still to come here, where other ranks may have dropped them
                when += f" and {len(self.syncs.put_off)} pending"
            self._dropped += [(record.index, f"{record.name} {when}") for record in dropped]
            if in_flight:
                in_flight[-1].dropped_next += dropped
            else:
                with self._streams.beside():
                    self._gradients.drop(dropped)

    # ---- the end of a step's syncs ----

    def finish(self, call: Call) -> None:
        """Complete every record's ``g`` on all ranks; parameters that no rank used get none. Communicates.

        May be called again; it then finds nothing to do.

        Raises:
            Exception: the ``call``'s error, or that of another rank's; nothing has been done then.
        """
        touched = self._gradients.touched()
        try:
            for record in touched:
                shown_gradients.check_before_step(record)
        except RuntimeError as error:
            call = call._replace(error=call.error or error)
        assigned = self._gradients.assigned(touched) if touched else {}
        with self._streams.home():
            present = self.agree_on_syncs(call, touched, completes=True, assigned=assigned)
            self.has_lacked |= present is not None
            if present is not None:
                self._gradients.resolve(present)
            if assigned:
                self._assign(assigned)

    def _assign(self, assigned: Mapping[ShardedParameter, Tensor]) -> None:
        """Copy gradients assigned to ``p32.grad`` into the sums; raise ``ValueError`` where no rank has a gradient."""
        for record in assigned:
            record.p32.grad = None if record.shown is None else record.slice_handle
        for record in assigned:
            if not record.worked:
                error = ValueError(
                    f"{record.name}: expected .grad of a slice to be assigned where some rank has a gradient for the "
                    "parameter, no rank has: assign p.grad of the parameter itself, which the step averages"
                )
                raise raised_by_all(error, self._group)
        self._streams.join()
        self._gradients.assign(assigned)

    def agree_on_syncs(
        self,
        call: Call,
        touched: Sequence[ShardedParameter] | None = None,
        completes: bool = False,
        assigned: Iterable[ShardedParameter] = (),
    ) -> bytes | None:
        """Agree on the call, and run all ranks' syncs to the end; return the presence map, or None. Communicates.

        None: no gradient lacked. On a device the current stream has yet to ``join`` the sums. Gradients that are left
        in ``p.grad`` stay there, unless the call ``completes`` them. The call comes first, before anything is done.
        ``assigned``: the records whose slice's gradient the caller has assigned.
        """
        if self._backwards.running:
            self._backwards.running.clear()
            error = RuntimeError(
                "expected a backward's gradients, but loss.backward() has ended by an error: look at what it raised"
            )
            self._state.failure.note(error, Damage.GRADIENTS)
        call = call._replace(error=call.error or self._state.failure.refusal(call.name, completes))
        try:
            was_open = self._buckets.is_open
            self._follow_callers(touched)
            if was_open:
                touched = None
            if call.name not in CLEARS:  # whose gradients go anyway
                self._state.failure.raise_deferred()
        except Exception as error:  # of whatever kind: others would wait for the agreement
            call = call._replace(error=call.error or error)
        agreed = self._compare(call, self._gradients.leftovers(touched) if completes else [], assigned)
        self._state.agreed = True
        self._state.failure.mend(Damage.CALL)  # whatever ended an earlier one, the ranks are in the same call again
        self.syncs.catch_up(agreed.syncs, completes)
        present = None
        if agreed.lacks:
            present = self._unused.exchange([record.index for record in self._records if record.worked]).wait()
        self.syncs.finish()
        self._keeps_some &= not completes
        return present

    def _compare(self, call: Call, leftovers: Sequence[int], assigned: Iterable[ShardedParameter]) -> SyncProgress:
        """Return the furthest progress of all ranks; raise if their calls or callers' changes differ. Communicates.

        Gradients that are left in ``p.grad`` take one more sync on this rank.
        """
        if call.name == "zero_grad":
            lacks, cleared, edited, written = False, [], [], []
        else:
            here = [record.worked or record.is_empty for record in self._records]
            for index in leftovers:
                here[index] = True
            lacks = self._unused.lacked or False in here
            cleared = [(text, 1) for _, text in sorted(self._dropped)]
            written = [(record.name, record.writes) for record in call.written if record.shard_group == self._number]
            by_hand = Counter(f"{record.common_name} by an assignment" for record in assigned)
            edited = sorted((self.edited + by_hand).items())
        self.syncs.may_be_alone = True  # if the call is refused, until zero_grad brings the ranks together
        syncs = self._group.progress.micro_batch + len(self.syncs.put_off) + bool(leftovers)
        progress = SyncProgress(syncs, lacks, call.settings, cleared, written, edited)
        agreed = agree(self._group, None, call.error, call.name, progress=progress, failed=self._state.failure.words)
        self.syncs.may_be_alone = False
        self._dropped.clear()
        self.edited.clear()
        return agreed

    def discard(self, call: Call) -> None:
        """Finish all reductions for ``zero_grad``, forget errors, and count syncs from 0; gradients stay. Communicates.

        Any rank may have run a plain backward alone. Gradients that become zeros are stepped, so the ranks must have
        dropped the same ones before.
        """
        # Where gradients become None, whatever has been cleared is cleared with the others.
        self.agree_on_syncs(call, touched=() if call.name == "zero_grad" else None)
        self._state.failure.mend(Damage.GRADIENTS)
        self._state.failure.deferred = None
        self._keeps_some = False
        self._group.progress.micro_batch = 0

    def end_step(self) -> None:
        """Between steps, learn rank 0's order once, and switch detection on if a gradient lacked. May communicate."""
        learns = not self.plan.order and self._group.progress.micro_batch > 0
        if learns:
            self.plan.learn()
        detects = self._unused.lacked and not self._unused.detecting
        self._unused.detecting |= detects
        self._unused.lacked = False
        if learns or detects:
            self.plan.follow(self._unused.detecting)
        self._gradients.version += 1
        self._group.progress.micro_batch = 0


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
