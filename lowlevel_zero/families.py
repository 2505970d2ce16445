"""Families of parameters: those that the same ranks share have buckets, gradients and gathers of their own; often one.

Collectives of several families come in the order of the families on every rank, and none waits for another's in the
midst of a backward: each rank belongs to one group of every family, so whatever the groups, nobody waits in a circle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby

import torch
from torch import Tensor

from .agreement import Call
from .bookkeeping.gather_store import GatherStore
from .bookkeeping.gradient_store import GradientStore
from .bookkeeping.gradient_sum import GradientSum
from .bookkeeping.learnt_plan import PlanState
from .bookkeeping.offload import Offload
from .bookkeeping.parameter_store import ParameterStore, ShardedParameter
from .bookkeeping.step_observer import StepObserver
from .communication.collectives import ShardGroup
from .options import ZeroOptions
from .reducer import Reducer, driving
from .streams import Streams

_log = logging.getLogger("lowlevel_zero")


class ShardedGroup:
    """The parameters that one shard group shares, and what takes their gradients to new values.

    Attributes:
        number: its place among the families.
        group: the ranks.
        records: the parameters.
        gradients: what reductions leave.
        reducer: turns backwards into that.
        gathers: brings stepped slices back.
    """

    def __init__(self, families: Families, number: int) -> None:
        parameters, options, streams = families.parameters, families.options, families.streams
        self.number = number
        self.group = parameters.shard_groups[number]
        self.records = parameters.families[number]
        self.gradients = GradientStore(self.records, self.group.rank, families.raw_unit, families.offload)
        self.reducer = Reducer(parameters, options, self.gradients, streams, number, families.driver, families.observer)
        wide = options.pad_buckets_for_high_nccl_busbw
        self.gathers = GatherStore(self.group, streams, options.overlap_allgather, families.offload, wide)


class Families:
    """All families of an optimizer that have trainable parameters, in order, and what is done to all of them.

    Args:
        parameters: the records.
        options: the caller's choices.
        streams: what all of this happens on.
        raw_unit: makes what gradients as reductions leave them are to be multiplied with to be averaged and unscaled.
        offload: brings rows to the host and back; None: they stay where they are.
        observer: is told of what happens in a step.
        groups: is filled with them.

    Attributes:
        several: there may be more than one, and ranks may differ in what they have gradients for.
    """

    def __init__(
        self,
        parameters: ParameterStore,
        options: ZeroOptions,
        streams: Streams,
        raw_unit: Callable[[], float | Tensor],
        offload: Offload | None = None,
        observer: StepObserver | None = None,
        groups: list[ShardedGroup] | None = None,
    ) -> None:
        self.observer = StepObserver() if observer is None else observer
        self.parameters = parameters
        self.options = options
        self.streams = streams
        self.raw_unit = raw_unit
        self.offload = offload
        self.driver = object()
        self.several = len(parameters.shard_groups) > 1
        self._families: list[ShardedGroup] = [] if groups is None else groups
        self.extend()

    def __iter__(self) -> Iterator[ShardedGroup]:
        return iter(self._families)

    def __getitem__(self, place: int) -> ShardedGroup:
        return self._families[place]

    @property
    def widest(self) -> torch.dtype:
        """In which gradients are measured at least: fp64 if any is, since a rank may have none of those."""
        double = self.several and any(record.wire_dtype == torch.float64 for record in self.parameters)
        return torch.float64 if double else torch.float32

    def of(self, record: ShardedParameter) -> ShardedGroup:
        """The family of a parameter."""
        return next(family for family in self if family.number == record.family)

    def parted(self, records: Iterable[ShardedParameter]) -> Iterator[tuple[ShardedGroup, list[ShardedParameter]]]:
        """Parameters that come in the order of their families, by family."""
        for number, own in groupby(records, key=lambda record: record.family):
            yield next(family for family in self if family.number == number), list(own)

    def extend(self) -> None:
        """Take new records into plans and hooks."""
        known = {family.number for family in self}
        for family in self:
            family.reducer.extend()
        new = [number for number, records in enumerate(self.parameters.families) if records and number not in known]
        self._families += [ShardedGroup(self, number) for number in new]
        self._families.sort(key=lambda family: family.number)

    # ---- rounds: see Reducer, whose methods these are ----

    @property
    def sync(self) -> bool:
        """Gradients are reduced (False under ``no_sync``)."""
        return self[0].reducer.sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        for family in self:
            family.reducer.sync = sync

    def begin(self, loss: Tensor, inputs: Tensor | Sequence[Tensor] | None) -> None:
        """``optimizer.backward`` starts, for every family, whatever one of them raises; ``end`` has to follow."""
        driving.append(self.driver)
        with ExitStack() as begins:
            for family in reversed(self._families):
                begins.callback(family.reducer.begin, loss, inputs)

    def end(self, failed: bool) -> None:
        """``optimizer.backward`` has ended, for every family, whatever one of them raises."""
        driving.remove(self.driver)
        with ExitStack() as ends:
            for family in reversed(self._families):
                ends.callback(family.reducer.end, failed)

    def finish(self, call: Call) -> None:
        """Complete every record's ``g``, on all ranks alike. Communicates."""
        for family in self:
            family.reducer.finish(call)

    def settle(self) -> None:
        """Finish what is in flight, for the other ranks' sake too, and count rounds anew. Communicates."""
        for family in self:
            family.reducer.settle()

    def even_out(self, call: Call) -> None:
        """Bring all ranks to the same round, with nothing in flight. Communicates."""
        with torch.inference_mode(False), torch.no_grad():  # sums will be added to later, outside of it
            for family in self:
                family.reducer.even_out(call)

    def end_step(self) -> None:
        """Between steps: let what this one has taught take effect, and rest."""
        for family in self:
            family.reducer.end_step()
            family.group.rest()

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight or about to be."""
        return all(family.reducer.idle for family in self)

    def plan_states(self) -> list[PlanState | None]:
        """What the plans follow from."""
        return [family.reducer.plan_state() for family in self]

    def restore_plans(self, states: Sequence[PlanState | None]) -> None:
        """Go on with the plans of another run, where they are of as many parameters; with no gradients around."""
        for family, state in zip(self, states, strict=False):
            if state is not None and len(state.order) == len(family.records):
                family.reducer.restore_plan(state)

    # ---- gradients and values ----

    def sums(self) -> list[GradientSum]:
        """What has been summed for parameters that worked."""
        return [total for family in self for total in family.gradients.sums()]

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients with ``factor``, when they are next used."""
        for family in self:
            family.gradients.scale(family.gradients.sums(), factor)

    def expose(self, unit: float | Tensor) -> None:
        """Make gradients of what has been summed, and show each ``p32`` its own, for its caller to edit."""
        for family in self:
            family.gradients.expose(unit)

    @property
    def exposed(self) -> bool:
        """Gradients are complete, and their caller's to edit."""
        return self[0].gradients.exposed

    def zero(self) -> None:
        """Make all gradients zeros; a parameter that has one goes on having one."""
        for family in self:
            family.gradients.zero()

    def clear(self) -> None:
        """Forget all gradients."""
        for family in self:
            family.gradients.clear()

    def finish_gathers(self) -> None:
        """Return when all parameters are up to date."""
        for family in self:
            family.gathers.finish()

    # ---- what is held ----

    def gradients_held(self) -> list[Tensor]:
        """Tensors of gradients, in flight and reduced."""
        return [held for family in self for held in (*family.gradients.held(), *family.reducer.held())]

    def remove_hooks(self) -> None:
        """Leave the parameters as they were before."""
        for family in self:
            family.reducer.remove_hooks()

    def release(self) -> None:
        """Let others have the wires."""
        reducers = {family.number: family.reducer for family in self}
        for number, ranks in enumerate(self.parameters.shard_groups):
            reducer = reducers.get(number)
            if reducer is None or reducer.idle:
                ranks.release()
            else:
                ranks.abandon(reducer.under_way())


def log_start(families: Families, group: ShardGroup) -> None:
    """One line, on the first of ``group``'s ranks."""
    if group.place == 0:
        way = group.way_of(families.parameters.records[0].padded.device)
        _log.info(
            "ZeRO stage %d: %s elements in %d parameters over %d ranks, %d buckets%s",
            2 if families.options.partition_grad else 1,
            f"{sum(record.split.numel for record in families.parameters):,}",
            len(families.parameters.records),
            group.ranks,
            sum(len(family.reducer.plan.whole.buckets) for family in families),
            "" if way is None else f", by {way}",
        )
