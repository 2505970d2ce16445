"""Estimates of the bytes that each rank will hold, read from the layout of a planned run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from ..layout.held import NOTHING, Held
from ..layout.records import BucketLayout
from ..optimizer import LowLevelZeroOptimizer
from ..options import DTYPE, Communication, Cost, Takes, ZeroOptions, merged
from ..partition import Owned
from .planned import PlannedRun, most_under_way
from .state_sizes import OptimizerLike, StateSizes, made_optimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

_COUNT = Takes("an int of at least 1", (int,), lambda number: number >= 1)


@dataclass(frozen=True)
class Estimate(Held):
    """An estimate of the bytes that the fullest rank will hold after a backward, activations aside.

    Attributes:
        bucket_buffers: the most bytes of buffers that are under way at once, in a backward or a step.
        world_size, stage, cpu_offload: the run.
        host: the bytes that ``cpu_offload`` keeps on the host; the rest is on the device.
        least, mean: the ``total`` of the emptiest rank, and of a rank on average.
        owned: each rank's share of the parameters that one rank steps whole; empty: there are none.
    """

    world_size: int = 1
    stage: int = 1
    cpu_offload: bool = False
    host: Held = NOTHING
    least: int = 0
    mean: float = 0.0
    owned: tuple[Owned, ...] = ()

    @property
    def device(self) -> int:
        """Return the bytes of ``total`` that are on the parameters' device."""
        return self.total - self.host.total

    def as_dict(self) -> dict[str, object]:
        """Return all numbers by name, as values for JSON."""
        totals = {"total": self.total, "device": self.device, "host": self.host.total, "on_host": asdict(self.host)}
        return {**asdict(self), **totals}


def estimate(
    model_or_numel: nn.Module | Iterable[Tensor] | float,
    world_size: int,
    stage: int = 1,
    dtype: torch.dtype | str | None = None,
    optimizer: OptimizerLike = "adamw",
    *,
    device: torch.device | str | None = None,
    micro_batches: int = 1,
    communication_dtype: torch.dtype | str | None = None,
    reduce_bucket_size: int | None = None,
    fp8_communication: bool = False,
    communication: Communication | None = None,
    cpu_offload: bool = ZeroOptions.cpu_offload,
    master_weights: bool = ZeroOptions.master_weights,
    split: str | None = ZeroOptions.split,
    cost: Cost | None = ZeroOptions.cost,
) -> Estimate:
    """Estimate the bytes that each of ``world_size`` ranks will hold, without starting ranks or allocating the model.

    The splits and the buckets are those that a run makes. A number of elements is cut into parameters that fill a
    bucket each. Stage 0 is DDP with ``gradient_as_bucket_view=True``, where each rank steps all masters, on the host
    with ``cpu_offload``.

    Args:
        model_or_numel: the model, its parameters, or their number of elements.
        world_size: ranks that share them.
        stage: 0, 1 or 2.
        dtype: the parameters', as torch's or as in ``"bf16"``; None: the model's own, of a number fp32.
        optimizer: one, over the model's parameters or others; its class; or a name, as in ``"adamw"`` or
            ``"sgd-momentum"``. Another one, over small parameters, steps to show the size of its states.
        device: the type of the device that is planned for, which decides the size of buckets; None: the device of the
            parameters, or "cuda" where they have none.
        micro_batches: backwards before a step; after the first, reduced gradients are summed in fp32.
        communication_dtype: dtype in which gradients travel, as ``dtype``.
        reduce_bucket_size, fp8_communication, communication, cpu_offload, master_weights, split, cost: as in
            ``LowLevelZeroOptimizer``.

    Raises:
        TypeError, ValueError: a bad argument; the message names it.
    """
    if stage not in (0, 1, 2):
        raise ValueError(f"stage: expected 0 (DDP), 1 or 2, got {stage!r}")
    _COUNT("world_size", world_size)
    _COUNT("micro_batches", micro_batches)
    travels = as_dtype("communication_dtype", communication_dtype)
    keywords = {"reduce_bucket_size": reduce_bucket_size, "fp8_communication": fp8_communication}
    travel = merged("communication", communication, {**keywords, "communication_dtype": travels})
    chosen = ZeroOptions(
        stage=max(stage, 1),
        cpu_offload=cpu_offload,
        forced_dtype=as_dtype("dtype", dtype),
        master_weights=master_weights,
        split=split,
        cost=cost,
        communication=travel if stage else Communication(),
    )
    groups = None
    if isinstance(optimizer, LowLevelZeroOptimizer):
        groups, optimizer = optimizer.sharded_parameters.groups, optimizer.optim
    run = PlannedRun(model_or_numel, chosen, StateSizes(*made_optimizer(optimizer)), device, groups)
    return _estimate(run, world_size, stage, micro_batches)


def _estimate(run: PlannedRun, world_size: int, stage: int, micro_batches: int) -> Estimate:
    """Return the bytes that the fullest of ``world_size`` ranks will hold of a planned run."""
    layout, offload = run.layout(world_size if stage else 1), run.options.cpu_offload
    buffers = most_under_way(layout, run.options, run.on_host, micro_batches)
    frozen = sum(shape.shape.numel() * shape.dtype.itemsize for shape in run.shapes if shape.group is None)
    everywhere = Held(parameters=frozen, bucket_buffers=buffers)
    own: defaultdict[int | None, Held] = defaultdict(Held)  # by owner; None: each rank is one
    for p in layout.parameters:
        everywhere += replace(p.everywhere, gradients=0)
        own[p.split.owner] += replace(p.own, gradients=0)
    keeps_all = stage == 0 or (stage == 1 and world_size > 1)
    for bucket in layout.buckets:
        on_all, on_owner = _gradients(bucket, micro_batches if stage else 1, keeps_all, offload)
        everywhere += Held(gradients=on_all)
        own[bucket.owner] += Held(gradients=on_owner)
    by_rank = [own[None] + own.get(rank, NOTHING) for rank in range(world_size)] if own.keys() - {None} else [own[None]]
    fullest = max(by_rank, key=lambda held: held.total)
    return Estimate(
        **vars(everywhere + fullest),
        world_size=world_size,
        stage=stage,
        cpu_offload=offload,
        host=fullest if offload else NOTHING,
        least=everywhere.total + min(held.total for held in by_rank),
        mean=everywhere.total + sum(held.total for held in by_rank) / len(by_rank),
        owned=tuple(layout.owned.values()) if stage else (),
    )


def _gradients(bucket: BucketLayout, micro_batches: int, keeps_all: bool, offload: bool) -> tuple[int, int]:
    """Return the bytes of a bucket's reduced gradients on each rank's device, and the owners' additional bytes.

    Sums of several micro-batches are in fp32 at least. With ``offload`` owners hold theirs on the host.
    """
    dtype = torch.promote_types(bucket.dtype, torch.float32) if micro_batches > 1 else bucket.dtype
    row, body = (width * dtype.itemsize for width in (bucket.planned.row, bucket.planned.body))
    on_device = row if dtype == bucket.dtype else body
    own = 0 if keeps_all and not offload else body if offload else on_device
    return bucket.rows * on_device if keeps_all else 0, own


def as_dtype(keyword: str, dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype of a name such as ``"bf16"``, a floating dtype or None unchanged; raise for anything else."""
    if isinstance(dtype, str):
        named = DTYPES | {str(known).removeprefix("torch."): known for known in DTYPES.values()}
        if dtype not in named:
            raise ValueError(f"{keyword}: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        return named[dtype]
    DTYPE(keyword, dtype)
    return dtype
