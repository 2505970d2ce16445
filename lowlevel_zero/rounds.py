"""Rounds: one backward's reductions each, opened, filled as gradients arrive, closed, and their wires taken in.

The reducer says when; here is what happens then, on this rank. A round that ranks opened with a message (see
``forecast``) can start nothing before all have said what they will use; what came meanwhile waits in ``p.grad``.
"""

from __future__ import annotations

import logging

from torch import Tensor

from .alignment import alignment_of
from .arrival_order import ArrivalOrder
from .bookkeeping.bucket_plan import BucketPlan, Item, make_plan
from .bookkeeping.bucket_store import BucketStore, Reduced
from .bookkeeping.gradient_store import GradientStore
from .bookkeeping.parameter_store import ParameterStore
from .communication.transport import Pending
from .forecast import Forecast, Message
from .options import ZeroOptions
from .streams import Streams

_log = logging.getLogger("lowlevel_zero")


class Rounds:
    """The rounds of one family of parameters.

    Args:
        parameters: the records.
        options: the caller's choices.
        gradients: where reduced gradients go.
        streams: what all of this happens on.
        family: whose gradients these are.

    Attributes:
        buckets: of the open round, and those in flight.
        forecast: which gradients will come, if rounds open with that.
        order: in which they come, as far as it is known.
        closed: rounds of this step that have been.
        paced: all ranks are known to run the open round, so that wires may be waited for in its midst.
        stepped: gradients that are there have been used by a step.
    """

    def __init__(
        self, parameters: ParameterStore, options: ZeroOptions, gradients: GradientStore, streams: Streams, family: int
    ) -> None:
        self._records = parameters.families[family]
        self._group = group = parameters.shard_groups[family]
        self._options = options
        self._gradients = gradients
        self._streams = streams
        divisor = options.gradient_predivide_factor
        self.buckets = BucketStore(self._records, group, options.keeps_row_only, streams, divisor)
        # A rank must not wait in one family for a peer that may be waiting for it in another.
        alone = len(parameters.families) == 1
        device = self._records[0].padded.device
        self._in_flight = group.in_flight(device, options.keeps_row_only) if alone else None
        self.forecast = Forecast(parameters, family)
        self.order = ArrivalOrder(group)
        self._message: Message | None = None
        self._told = family > 0 or group.place > 0
        self.stepped = False
        self.forget()

    @property
    def plan(self) -> BucketPlan:
        """The buckets that reductions and gathers follow, from the next round on."""
        return self.buckets.plan

    def replan(self) -> None:
        """Follow the order in which gradients are expected now."""
        self.plan_in(self.order.expected(len(self._records), self.forecast.on))

    def plan_in(self, order: list[int]) -> None:
        """Fill buckets with these parameters in this order."""
        wide = self._options.pad_buckets_for_high_nccl_busbw
        items = [
            Item(r.split, r.kind, r.wire_dtype == r.p.dtype, r.fp8, alignment_of(r.wire_dtype, wide))
            for r in self._records
        ]
        self._travelling = sum(record.split.numel > 0 for record in self._records)
        self.buckets.follow(make_plan(items, order, self._options.bucket_size))

    # ---- one round ----

    def open(self, reached: set[int] | None = None) -> None:
        """Open a round in whose backward these gradients are foreseen; None: any may come."""
        self.take_some(leave=0)
        self.buckets.open_round(reached)
        message = None
        if self.forecast.on:
            message = self.forecast.open_round(None if reached is None else reached.union(self.leftovers()))
        if reached is None:
            self.buckets.choose()
        else:
            self._message = message
        self._tell_of_old_gradients()

    def _tell_of_old_gradients(self) -> None:
        """Warn once that a backward adds to what has been stepped already: most often that isn't meant."""
        if self.stepped and not self._told:
            self._told = True
            _log.warning(
                "backward: adds to gradients that the last step has used, since optimizer.zero_grad() wasn't called; "
                "model.zero_grad() doesn't reach them: they aren't in p.grad"
            )

    def leftovers(self) -> list[int]:
        """What can travel of that which ``p.grad`` holds."""
        bucket_of = self.plan.bucket_of
        return [record.index for record in self._records if record.p.grad is not None and bucket_of[record.index] >= 0]

    def start_ready(self) -> None:
        """Start what is complete, if the ranks' choice of what travels is known."""
        if self._chosen(wait=False):
            self.buckets.start_ready()
            self.take_some()

    def _chosen(self, wait: bool) -> bool:
        if self._message is not None and (wait or self._message.done()):
            self.buckets.choose(self._message.wait().used)
            self._message = None
        return self._message is None

    def close(self) -> None:
        """Start what is left of an open round."""
        if not self.buckets.open:
            return
        self._chosen(wait=True)
        self.buckets.close_round()
        self.closed += 1
        self._group.progress.micro_batch = self.closed
        self.order.saw(self.buckets.arrivals)
        self.forecast.learn(self.buckets.unexpected)
        self.take_some()

    @property
    def lacking(self) -> bool:
        """Whether this rank had no gradient for some parameter in the round that was closed last."""
        return self.buckets.contributed < self._travelling

    def further(self) -> None:
        """A round outside any backward, of what ``p.grad`` still holds, be it nothing."""
        self.open()
        self.close()

    def join(self, used: bytes) -> None:
        """A round that others have opened, of that for which ``used`` has a byte other than 0."""
        self.buckets.open_round(())
        self.buckets.choose(used)
        self.close()

    # ---- what comes of them ----

    def take_some(self, leave: int | None = None) -> None:
        """Finish reductions, in the midst of a step, so that few wires are held.

        After a bare backward only those that are done: others may not have begun, and not begin until the ranks
        agree on it.
        """
        if self.paced:
            leave = self._in_flight if leave is None else leave
            if leave is not None:
                self._take(self.buckets.finish(leave))
        self._take(self.buckets.finish(wait=False))

    def _take(self, reduced: list[Reduced]) -> None:
        for each in reduced:
            with self._streams.home(join=False):
                self._gradients.add(*each)

    def drain(self) -> None:
        """Close the open round and finish all that is in flight."""
        self.close()
        self._take(self.buckets.finish())

    def forget(self) -> None:
        """Count rounds anew."""
        self.closed = 0
        self._group.progress.micro_batch = 0
        self.paced = False
        if self.buckets.measured is not None:
            self.buckets.measured.clear()

    def bad_wires(self) -> set[int]:
        """The parameters of this step's wires into which this rank has put an inf or NaN; waits for the device."""
        wires = self.buckets.measured or []
        return {index for wire in wires if not wire.largest.isfinite() for index in wire.members}

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight or about to be."""
        return not (self.buckets.open or self.buckets.held())

    def under_way(self) -> list[Pending[Reduced]]:
        """Reductions in flight."""
        return self.buckets.under_way()

    def held(self) -> list[Tensor]:
        """Tensors of reductions in flight."""
        return self.buckets.held()
