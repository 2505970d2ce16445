"""What one rank is loaded with, in elements: slices and wires by dtype, of a model or of a number of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .alignment import alignment_of
from .bookkeeping.bucket_plan import Item, make_plan
from .options import ZeroOptions
from .partition import EvenSplit
from .state_sizes import OptimizerLike, StateSize, state_sizes
from .wrapping import WrappingOptimizer


@dataclass(frozen=True)
class Setup:
    """How a rank trains.

    Attributes:
        ranks: that share the optimizer; one in stage 0.
        options: of the optimizer.
        micro_batches: backwards before a step.
        plain: stage 0: DDP, which sums gradients in place.
        shared_memory: wires are in memory that the ranks share.
    """

    ranks: int
    options: ZeroOptions
    micro_batches: int
    plain: bool
    shared_memory: bool

    def wire_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` parameters travel."""
        return dtype if self.plain else self.options.communication_dtype or dtype

    def master_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of their master slices."""
        return torch.promote_types(dtype, torch.float32) if self.options.master_weights else dtype


class Kind(NamedTuple):
    """Parameters that share wires, in elements.

    Attributes:
        dtype, wire: of the parameters, and of what travels.
        rows: of the wires.
        fp8: they travel as that; ``wire`` is what is packed, and what their sums are kept in.
        slices: of this rank's slices.
        body: the same, in wires.
        row: of this rank's rows of the wires.
        widest: of the longest of these rows.
        buckets: how many there are.
    """

    dtype: torch.dtype
    wire: torch.dtype
    rows: int
    fp8: bool = False
    slices: int = 0
    body: int = 0
    row: int = 0
    widest: int = 0
    buckets: int = 0


class Load(NamedTuple):
    """All that a rank is loaded with: trained parameters by kind, and bytes of their states and of frozen ones."""

    kinds: list[Kind]
    states: int
    frozen: int


class _Parameter(NamedTuple):
    numel: int
    dtype: torch.dtype
    trained: bool
    group: int


def load_of_number(numel: int, optimizer: OptimizerLike, setup: Setup) -> Load:
    """Buckets as full as they get, and no padding."""
    dtype = setup.options.forced_dtype or torch.float32
    body = -(-numel // setup.ranks)
    widest = -(-min(numel, setup.options.bucket_size) // setup.ranks)
    fp8 = setup.options.in_fp8(numel, setup.ranks)
    kind = Kind(dtype, setup.wire_of(dtype), setup.ranks, fp8, body, body, body, widest, -(-body // widest))
    state = state_sizes(_inner(optimizer), setup.master_of(dtype))[0]
    return Load([kind], body * state.per_element, 0)


def load_of_parameters(tensors: Sequence[Tensor], optimizer: OptimizerLike, setup: Setup) -> Load:
    """As they would be in a run before its first step, which reorders the buckets."""
    inner = _inner(optimizer)
    parameters = _placed(tensors, inner, setup.options.forced_dtype)
    trained = [p for p in parameters if p.trained and p.numel]
    frozen = sum(p.numel * p.dtype.itemsize for p in parameters if not p.trained)
    sizes: dict[torch.dtype, list[StateSize]] = {}
    states = 0
    for p in trained:
        master = setup.master_of(p.dtype)
        if master not in sizes:
            sizes[master] = state_sizes(inner, master)
        size = sizes[master][p.group]
        states += EvenSplit(p.numel, setup.ranks).slice_size * size.per_element + size.per_parameter
    return Load(_kinds(trained, setup), states, frozen)


def _inner(optimizer: OptimizerLike) -> OptimizerLike:
    return optimizer.optim if isinstance(optimizer, WrappingOptimizer) else optimizer


def _placed(tensors: Sequence[Tensor], optimizer: OptimizerLike, dtype: torch.dtype | None) -> list[_Parameter]:
    """With their param groups; of an optimizer over other parameters (slices, say) all are in the first."""
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    group_of = {p: at for at, group in enumerate(groups) for p in group["params"]}
    strange = not any(p in group_of for p in tensors)
    return [
        _Parameter(p.numel(), dtype or p.dtype, p.requires_grad and (strange or p in group_of), group_of.get(p, 0))
        for p in tensors
    ]


def _kinds(parameters: Sequence[_Parameter], setup: Setup) -> list[Kind]:
    wires = [setup.wire_of(p.dtype) for p in parameters]
    items = [_item(p, wire, setup) for p, wire in zip(parameters, wires, strict=True)]
    plan = make_plan(items, range(len(items))[::-1], setup.options.bucket_size)
    kinds: dict[tuple[torch.dtype, torch.dtype, int, bool], Kind] = {}
    for bucket in plan.buckets:
        first = bucket.members[0]
        key = (parameters[first].dtype, wires[first], setup.ranks, bucket.fp8)
        kind = kinds.get(key, Kind(*key))
        kinds[key] = kind._replace(
            slices=kind.slices + sum(bucket.sizes),
            body=kind.body + bucket.body,
            row=kind.row + bucket.row,
            widest=max(kind.widest, bucket.row),
            buckets=kind.buckets + 1,
        )
    return list(kinds.values())


def _item(p: _Parameter, wire: torch.dtype, setup: Setup) -> Item:
    fp8 = setup.options.in_fp8(p.numel, setup.ranks)
    alignment = alignment_of(wire, setup.options.pad_buckets_for_high_nccl_busbw)
    return Item(EvenSplit(p.numel, setup.ranks), (p.dtype, wire, fp8), p.dtype == wire, fp8, alignment)
