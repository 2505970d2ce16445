"""Estimates of the bytes that each rank will hold, by owner, from shapes and options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..bookkeeping.gather_store import IN_FLIGHT, PART
from ..communication.backends.backend import Backend
from ..layout.held import NOTHING, Held, held_of, master_dtype
from ..optim.quantised import slice_multiple
from ..optimizer import LowLevelZeroOptimizer
from ..options import Number, ZeroOptions, check_floating
from ..partition import EvenSplit
from .state_sizes import OptimizerLike, made_optimizer, state_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

_COUNT = Number("an int", "at least 1", lambda number: number >= 1, whole=True)
_ELEMENTS = Number("a number", "a whole number of elements, at least 1", lambda number: number >= 1 and number % 1 == 0)


@dataclass(frozen=True)
class Estimate(Held):
    """Bytes that each rank will hold after a backward, wherever they lie. Activations aren't counted."""

    bucket_buffers: int = 0  # those that are under way at once, at most
    world_size: int = 1
    stage: int = 1
    cpu_offload: bool = False
    host: Held = NOTHING  # what of it cpu_offload has on the host; the rest is on the device

    @property
    def total(self) -> int:
        """The bytes of all owners together."""
        return super().total + self.bucket_buffers

    @property
    def device(self) -> int:
        """The bytes of ``total`` that are on the parameters' device."""
        return self.total - self.host.total

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name, for JSON."""
        totals = {"total": self.total, "device": self.device, "host": self.host.total, "on_host": asdict(self.host)}
        return {**asdict(self), **totals}


OWNERS = (*vars(NOTHING), "bucket_buffers")


def estimate(
    model_or_numel: nn.Module | Iterable[Tensor] | float,
    world_size: int,
    stage: int = 1,
    dtype: torch.dtype | str | None = None,
    optimizer: OptimizerLike = "adamw",
    *,
    micro_batches: int = 1,
    communication_dtype: torch.dtype | str | None = None,
    **options: Any,
) -> Estimate:
    """Estimate what each of ``world_size`` ranks will hold, without starting ranks or allocating memory.

    Of a model (on the meta device too) padding and param groups are those of a run; a number of elements counts as one
    parameter. Stage 0 is DDP with ``gradient_as_bucket_view=True``, where each rank steps all masters, on the host with
    ``cpu_offload``.

    Args:
        model_or_numel: the model, its parameters, or their number of elements.
        world_size: ranks that share them.
        stage: 0, 1 or 2.
        dtype: the parameters', as torch's or as in ``"bf16"``; None: the model's own, of a number fp32.
        optimizer: one, over the model's parameters or others; its class; or a name, as in ``"adamw"`` or
            ``"sgd-momentum"``. The size of its state is found out by a small one that steps.
        micro_batches: backwards before a step; after the first, reduced gradients are summed in fp32.
        communication_dtype: dtype in which gradients travel, as ``dtype``.
        options: others of ``LowLevelZeroOptimizer``, such as ``cpu_offload``, ``master_weights``,
            ``reduce_bucket_size``, ``reduce_scatter`` and ``fp8_communication``.

    Raises:
        TypeError, ValueError: what can't be estimated; the message says which argument.
    """
    if stage not in (0, 1, 2):
        raise ValueError(f"stage: expected 0 (DDP), 1 or 2, got {stage!r}")
    _COUNT("world_size", world_size)
    _COUNT("micro_batches", micro_batches)
    chosen = ZeroOptions(
        partition_grad=stage == 2,
        forced_dtype=as_dtype("dtype", dtype),
        communication_dtype=as_dtype("communication_dtype", communication_dtype),
        **options,
    )
    stepping, make = made_optimizer(optimizer.optim if isinstance(optimizer, LowLevelZeroOptimizer) else optimizer)
    ranks, sums = (world_size, micro_batches) if stage else (1, 0)
    states = cache(partial(state_bytes, stepping, make))
    parts: list[tuple[Held, Held]] = [(NOTHING, NOTHING)]
    for numel, p_dtype, group in _shapes(model_or_numel, stepping, chosen.forced_dtype):
        if group is None or not numel:
            parts.append((Held(parameters=numel * p_dtype.itemsize), NOTHING))
        else:
            split = EvenSplit(numel, ranks, slice_multiple(stepping, numel, ranks, chosen.slice_multiple))
            state = states(master_dtype(p_dtype, chosen), split.slice_size)[group]
            parts.append(_trained(split, p_dtype, state, chosen, sums))
    held, host = (sum(column, NOTHING) for column in zip(*parts, strict=True))
    buffers = min(held.parameters, _under_way(chosen, ranks))
    return Estimate(
        **vars(held),
        bucket_buffers=buffers,
        world_size=world_size,
        stage=stage,
        cpu_offload=chosen.cpu_offload,
        host=host,
    )


def _trained(
    split: EvenSplit, dtype: torch.dtype, state: int, options: ZeroOptions, micro_batches: int
) -> tuple[Held, Held]:
    """Return the bytes that a rank holds of a trained parameter, in all and on the host.

    ``micro_batches``: how many are summed, if several then in at least fp32; 0: by DDP, in place.
    """
    reduced = options.communication_dtype or dtype if micro_batches else dtype
    if micro_batches > 1:
        reduced = torch.promote_types(reduced, torch.float32)
    own = held_of(split, dtype, options, state, reduced)
    if not options.cpu_offload:
        return own, NOTHING
    on_host = replace(own, parameters=0, gradients=split.slice_size * reduced.itemsize)
    leaves_device = micro_batches > 0 and (split.world_size == 1 or options.keeps_row_only)
    return replace(own, gradients=on_host.gradients + (0 if leaves_device else own.gradients)), on_host


def _under_way(options: ZeroOptions, ranks: int) -> int:
    """Return the bytes of bucket buffers in a backward, or of gathered rows in a step, whichever are more."""
    itemsize = (options.communication_dtype or options.forced_dtype or torch.float32).itemsize
    reducing = (Backend.in_flight + 1) * options.bucket_size() if options.keeps_row_only else 0
    gathering = (IN_FLIGHT + 1) * PART * ranks
    return max(reducing, gathering) * itemsize if ranks > 1 else 0


def _shapes(
    model: nn.Module | Iterable[Tensor] | float, optimizer: Optimizer, dtype: torch.dtype | None
) -> list[tuple[int, torch.dtype, int | None]]:
    """Return elements, dtype and param group of each parameter; group None: it isn't trained.

    Of an optimizer over other parameters (slices, say) all are in the first group.
    """
    if isinstance(model, (int, float)):
        _ELEMENTS("model_or_numel", model)
        return [(int(model), dtype or torch.float32, 0)]
    among = model.parameters() if isinstance(model, nn.Module) else model
    tensors = [among] if isinstance(among, Tensor) or not isinstance(among, Iterable) else list(dict.fromkeys(among))
    for p in tensors:
        if not isinstance(p, Tensor):
            raise TypeError(f"model_or_numel: expected a model, parameters or a number, got {type(p).__name__}")
    if not tensors:
        raise ValueError("model_or_numel: expected at least one parameter, got none")
    group_of = {p: at for at, group in enumerate(optimizer.param_groups) for p in group["params"]}
    if group_of.keys().isdisjoint(tensors):
        group_of = dict.fromkeys(tensors, 0)
    return [(p.numel(), dtype or p.dtype, group_of.get(p) if p.requires_grad else None) for p in tensors]


def as_dtype(keyword: str, dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the floating-point dtype of a name, as in ``"bf16"`` or ``"bfloat16"``; a dtype is returned unchanged."""
    if isinstance(dtype, str):
        named = DTYPES | {str(known).removeprefix("torch."): known for known in DTYPES.values()}
        if dtype not in named:
            raise ValueError(f"{keyword}: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        return named[dtype]
    check_floating(keyword, dtype)
    return dtype
