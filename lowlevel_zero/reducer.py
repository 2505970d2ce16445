"""The reducer: when rounds of reductions open and close, and what the ranks agree on so that all run the same.

- ``optimizer.backward`` is one round on every rank, whatever its loss touched there.
- A bare ``loss.backward()`` opens a round with its first gradient. A rank whose loss touched nothing opens
  none, so before the step the ranks agree on the largest number of rounds, and who is behind adds rounds of
  zeros. That agreement travels beside the wires, which others may have sent already. Until then nobody waits for
  a wire, since its peers may be waiting to agree.
- Gradients that came after their bucket had left (a weight in two nested backwards) get a further round, on
  all ranks, since the last wire of a round tells of them.
- Once a step has shown a dropped parameter, rounds open with a message (see ``forecast``): they leave out what
  nobody will use, and these messages are all that the ranks need to agree on about rounds.
- Gradients that arrive while another optimizer runs its backward (a GAN's generator loss passing through the
  discriminator) stay in ``p.grad``, as in plain torch, until this one's next round, or ``zero_grad``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from .arrival_order import PlanState
from .bookkeeping.bucket_plan import BucketPlan
from .bookkeeping.gradient_store import GradientStore
from .bookkeeping.parameter_store import ParameterStore, ShardedParameter
from .calls import Call
from .options import ZeroOptions
from .rounds import Rounds
from .streams import Streams, at_home

DOUBLE_REDUCTION = (
    "expected step or zero_grad after synchronize(), got the gradient of one more backward, which would be reduced "
    "beside those that are the caller's to edit: call synchronize() after the last backward of a step"
)

# Stand for optimizers whose ``backward`` runs, the innermost last.
driving: list[object] = []


class _BackwardCount(threading.local):
    """How many ``optimizer.backward`` calls this thread has seen, of whichever optimizer."""

    value = 0


class Reducer:
    """Turns the gradients of backwards into each record's ``g``.

    Args:
        parameters: the records.
        options: the caller's choices.
        gradients: where reduced gradients go.
        streams: what all of this happens on.
        family: whose gradients these are.
        driver: stands for the optimizer whose backward drives this reducer, and those of its other families.

    Attributes:
        rounds: those of this rank.
        sync: gradients are reduced (False under ``no_sync``: hooks do nothing).
    """

    _backwards: ClassVar[_BackwardCount] = _BackwardCount()

    def __init__(
        self,
        parameters: ParameterStore,
        options: ZeroOptions,
        gradients: GradientStore,
        streams: Streams,
        family: int = 0,
        driver: object = None,
    ) -> None:
        self._streams = streams
        self._several_streams = streams.several
        self._driver = driver or object()
        self._family = family
        self._records = parameters.families[family]
        self._group = parameters.shard_groups[family]
        self._options = options
        self._gradients = gradients
        self.rounds = Rounds(parameters, options, gradients, streams, family)
        self._buckets = self.rounds.buckets
        self._forecast = self.rounds.forecast
        self._on_host = all(record.padded.device.type == "cpu" for record in self._records)
        self._half = any(record.p.dtype == torch.float16 for record in self._records)
        self._buckets.measured = [] if self._half or options.error_if_nonfinite else None
        gradients.counts = not self._on_host
        self._hooks: list[RemovableHandle] = []
        self._graph_task = -1
        self._ends_matter = True
        self._nested_seen = False
        self._watch_late = True
        self._bare = True
        self.sync = True
        self._forget_rounds()
        self.extend()

    # ---- what is set up once, and again when parameters are added ----

    @property
    def plan(self) -> BucketPlan:
        """The buckets that reductions and gathers follow."""
        return self.rounds.plan

    def extend(self) -> None:
        """Take records that have no hook yet into hooks and plan, which starts anew in reverse order."""
        me = ref(self)
        for record in self._records[len(self._hooks) :]:
            hook = _hook(me, record)
            self._hooks.append(record.p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self.rounds.order.forget()
        self.rounds.replan()

    def plan_state(self) -> PlanState | None:
        """What the plan follows from; None: no step has been taken yet."""
        order = self.rounds.order
        if not order.known:
            return None
        return PlanState(
            [*order.came, *order.lacked],
            len(order.came),
            self._watch_late,
            [record.index for record in self._records if record.repeats],
            self._forecast.state(),
        )

    def restore_plan(self, state: PlanState | None) -> None:
        """Go on with the plan of another run, or start one anew, with no gradients around.

        All ranks call it alike; with a forecast in the state it communicates.
        """
        self._watch_late = state is None or self._on_host or state.reentrant
        for record in self._records:
            record.repeats = state is not None and record.index in state.repeats
        self._forecast.restore(None if state is None else state.forecast)
        if state is None:
            self.rounds.order.forget()
        else:
            self.rounds.order.restore(state)
        self.rounds.replan()

    def remove_hooks(self) -> None:
        """Leave the parameters as they were before."""
        for handle in self._hooks:
            handle.remove()

    # ---- rounds ----

    def begin(self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None) -> None:
        """``optimizer.backward`` starts: a round of its own, after one that an error may have left open."""
        self._ends_matter = not self._on_host  # there they tell of nested backwards
        self.rounds.paced = not self._uneven
        self._backwards.value += 1
        if self.sync:
            self.rounds.close()
            self._driven = True
            self._open_driven(loss, inputs)

    def _open_driven(self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None) -> None:
        """Open a round, as all ranks do: even where the graph can't be looked at, as if its backward had failed."""
        reached = None
        try:
            if self._forecast.on:
                reached = self._forecast.reached(loss, inputs)
        finally:
            self._open(reached)

    def end(self, failed: bool) -> None:
        """``optimizer.backward`` has ended. After an error the round stays open, for ``zero_grad`` to discard."""
        self._ends_matter = True
        self.rounds.paced = self._driver in driving and not self._uneven
        if self.sync and not failed:
            self.rounds.close()
            self._forecast.lacked |= self.rounds.lacking
            self._last_backward = self._backwards.value

    def arrive(self, record: ShardedParameter) -> None:
        """A gradient has been accumulated into ``p.grad``."""
        if self._several_streams:
            self._streams.produced()
        record.arrived = True
        if not self.sync or (driving and driving[-1] is not self._driver):
            return
        if not self._buckets.open:
            self._open_bare(record)
        if self._ends_matter:
            self._watch_graph_task()
        if self._buckets.arrive(record) and self._overlaps:
            self.rounds.start_ready()

    def _open_bare(self, record: ShardedParameter) -> None:
        """The first gradient of a bare ``loss.backward()`` has come, or of one that nobody expects."""
        if self._gradients.exposed:
            record.p.grad = None
            raise RuntimeError(f"{record.name}: {DOUBLE_REDUCTION}")
        self._uneven = True
        self.rounds.paced = False
        self._refuse_unscaled(record)
        self._open()

    def _watch_graph_task(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            Variable._execution_engine.queue_callback(partial(_on_graph_task_end, ref(self)))

    def _refuse_unscaled(self, record: ShardedParameter) -> None:
        """A bare backward of an fp16 model: nobody has scaled the loss, and the step would unscale."""
        if self._half and self._driver not in driving:
            raise RuntimeError(
                f"{record.name}: expected the backward of a model with fp16 parameters through "
                "optimizer.backward(loss), which scales the loss, got a gradient from another: call that instead of "
                "loss.backward()"
            )

    def graph_task_ended(self) -> None:
        """Backward of one graph is over; if it wasn't nested in another's and nobody drives, so is the round."""
        if torch._C._current_autograd_node() is not None:
            self._nested_seen = True
        elif self._driver not in driving and not self._waits_its_turn:
            self.rounds.close()

    @property
    def _overlaps(self) -> bool:
        return self._options.overlap_communication and not self._waits_its_turn

    @property
    def _waits_its_turn(self) -> bool:
        """On a device, groups' wires come in one order on all ranks: a further family's at the end, in its turn."""
        return self._family > 0 and not self._on_host

    def _open(self, reached: set[int] | None = None) -> None:
        self._graph_task = -1
        self.rounds.open(reached)

    # ---- the end of a step's rounds ----

    @at_home
    def drain(self) -> None:
        """Finish what this rank has started. Tells of no other rank: only ``finish`` completes a step."""
        if self._gradients.exposed:
            self._gradients.absorb()
            return
        self.rounds.drain()

    @at_home
    def finish(self, call: Call) -> None:
        """Complete every record's ``g``, on all ranks alike; parameters that no rank used have none.

        Communicates: all ranks call it. May be called again; it then finds nothing to do. On the host, which waits
        for reductions here anyway, the ranks always agree on their rounds. On a device they do unless all are
        known to have run the same: to have called ``backward`` of this optimizer, and none of another's since.
        After ``synchronize`` nothing is reduced any more: what callers have made of gradients is taken over.

        Raises:
            Exception: the ``call``'s error, or that of another rank's, if ranks agree here; nothing has been done then.
        """
        if self._gradients.exposed:
            call.check()
            self.drain()
            return
        by_messages = self._forecast.on
        if by_messages or self._on_host or not self._driven or self._last_backward != self._backwards.value:
            self._complete_rounds(call, with_leftovers=True)
        call.check()
        self.drain()
        self._refuse_unforeseen()
        while self._watch_late and not self._forecast.on and self._gradients.late():
            self.rounds.further()
            self.drain()
        self._gradients.resolve()

    def _complete_rounds(self, call: Call, with_leftovers: bool) -> None:
        """Close the open round, and see to it that all ranks have run as many as the one that ran most."""
        self.rounds.close()
        if self._forecast.on:
            self._join_rounds(call, with_leftovers)
            return
        leftovers = with_leftovers and len(self.rounds.leftovers()) > 0
        said = [self.rounds.closed + leftovers, self._forecast.lacked, *call.words(self._group)]
        most, lacked, *called = self._group.largest(said)
        call.settle(called, self._group)
        self._forecast.saw(lacked=bool(lacked))
        while self.rounds.closed < most:
            self.rounds.further()

    def _join_rounds(self, call: Call, with_leftovers: bool) -> None:
        """Run the rounds that others have opened, and those of leftovers, until no rank opens another."""
        while True:
            leftovers = self.rounds.leftovers() if with_leftovers else []
            forecast, words = self._forecast, call.words(self._group)
            said = (forecast.open_round(leftovers, words) if leftovers else forecast.no_round(words)).wait()
            if not said.opens:
                call.settle(said.call, self._group)
                forecast.saw(said.lacked, said.missed)
                return
            self.rounds.join(said.used)

    def _refuse_unforeseen(self) -> None:
        """Where the "late" flag isn't read (on a device, it would have to be waited for), don't lose a gradient."""
        late = self._buckets.late
        if late and not (self._watch_late or self._forecast.on):
            raise RuntimeError(
                f"{self._records[late[0]].name}: its gradient came again after it had been reduced, which the first "
                "step gave no sign of: switch reentrant activation checkpointing on before the first step, or pass "
                "overlap_communication=False"
            )

    def settle(self) -> None:
        """``zero_grad``: finish what is in flight, for the other ranks' sake too, and count rounds anew.

        Communicates as ``finish`` does: on the host always, on a device where backwards have been bare.
        """
        self._gradients.conceal()
        self.rounds.stepped = False
        if self._on_host or (self._bare and not self._driven):
            self.even_out(Call("zero_grad"))
        self.drain()
        self._forget_rounds()

    @at_home
    def even_out(self, call: Call) -> None:
        """Bring all ranks to the same round, with nothing in flight; ``p.grad`` stays. Communicates."""
        self._complete_rounds(call, with_leftovers=False)
        self.rounds.drain()

    def end_step(self) -> None:
        """Between steps: forecast or not, and once take over the order in which gradients came on rank 0."""
        self._forecast.look(self._gradients.take_fewest(), self._driven)
        was_on = self._forecast.on
        self._forecast.end_step()
        if self.rounds.closed and not self.rounds.order.known:
            self._learn_order()
        elif self.rounds.order.known and self._forecast.on and not was_on:
            self.rounds.replan()
        self._bare = not self._driven
        self.rounds.stepped = any(record.worked for record in self._records)
        self._forget_rounds()
        self._gradients.conceal()
        self._group.progress.step += 1

    def _forget_rounds(self) -> None:
        self.rounds.forget()
        self._driven = False
        self._uneven = False
        self._last_backward = -1

    def _learn_order(self) -> None:
        self.rounds.order.learn(len(self._records))
        self.rounds.replan()
        self._watch_late = self._on_host or bool(self._group.largest([self._nested_seen])[0])


def _hook(reducer: ReferenceType[Reducer], record: ShardedParameter) -> Callable[[Tensor], None]:
    """The hook of one parameter. It holds the reducer weakly: a parameter outlives its optimizer."""

    def on_gradient(_: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.arrive(record)

    return on_gradient


def _on_graph_task_end(reducer: ReferenceType[Reducer]) -> None:
    alive = reducer()
    if alive is not None:
        alive.graph_task_ended()
