"""Bytes per rank, by owner: what is held, every storage counted once; and what will be, from shapes and options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..bookkeeping.gather_store import IN_FLIGHT
from ..communication.backends.backend import Backend
from ..optimizer import LowLevelZeroOptimizer
from ..options import ZeroOptions, check_floating
from ..partition import EvenSplit
from ..stepper import PART
from .state_sizes import OptimizerLike, state_sizes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def held_bytes(owners: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Bytes of the storages behind each owner's tensors.

    A storage that several tensors share counts once, for the first owner that names it: an fp32 master slice
    that is a view of its parameter adds nothing.
    """
    seen: set[int] = {0}  # of an empty storage
    held: dict[str, int] = {}
    for owner, tensors in owners.items():
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        held[owner] = sum(size for address, size in storages.items() if address not in seen)
        seen |= storages.keys()
    return held


# ---- what will be held ----


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds, by owner: the names are ``optimizer.memory_held()``'s."""

    parameters: int = 0
    gradients: int = 0
    masters: int = 0
    states: int = 0
    wires: int = 0

    @property
    def total(self) -> int:
        """All owners together."""
        return self.parameters + self.gradients + self.masters + self.states + self.wires


@dataclass(frozen=True)
class Estimate(Held):
    """Bytes that each rank will hold after a backward, wherever they lie. Activations aren't counted.

    Attributes:
        parameters: with their padding.
        gradients: reduced ones.
        masters: slices that aren't their parameters' own rows.
        states: the optimizer's.
        wires: bucket buffers that are under way at once, at most.
        world_size, stage, cpu_offload: what it is an estimate of.
        host: what of it ``cpu_offload`` has on the host; the rest is on the device.
    """

    world_size: int = 1
    stage: int = 1
    cpu_offload: bool = False
    host: Held = Held()

    @property
    def device(self) -> int:
        """Bytes of ``total`` that are where the parameters are."""
        return self.total - self.host.total

    def owners(self) -> Held:
        """Those whose sum ``total`` is."""
        return Held(self.parameters, self.gradients, self.masters, self.states, self.wires)

    def as_dict(self) -> dict[str, Any]:
        """Numbers by name, for JSON."""
        told = {"total": self.total, "device": self.device, "host": self.host.total, "on_host": asdict(self.host)}
        return {**asdict(self), **told}


def estimate(
    model_or_numel: nn.Module | Iterable[Tensor] | float,
    world_size: int,
    stage: int = 1,
    dtype: torch.dtype | str | None = None,
    optimizer: OptimizerLike = "adamw",
    *,
    cpu_offload: bool = False,
    master_weights: bool = True,
    communication_dtype: torch.dtype | str | None = None,
    reduce_bucket_size: int = 1024 * 1024,
    reduce_scatter: bool = False,
    micro_batches: int = 1,
    fp8_communication: bool = False,
    fp8_min_numel: int = 2048,
) -> Estimate:
    """What each of ``world_size`` ranks will hold, without any of them, and without allocating what it counts.

    Of a model (on the meta device too) padding and param groups are those of a run; of a number of elements padding is
    left out. Stage 0 is DDP with ``gradient_as_bucket_view=True``, where each rank steps all masters, on the host with
    ``cpu_offload``.

    Args:
        model_or_numel: the model, its parameters, or their number of elements.
        world_size: ranks that share them.
        stage: 0, 1 or 2.
        dtype: the parameters', as torch's or as in ``"bf16"``; None: the model's own, of a number fp32.
        optimizer: one, over the model's parameters or others; its class; or a name, as in ``"adamw"`` or
            ``"sgd-momentum"``. The size of its state is found out by a small one that steps.
        cpu_offload, master_weights, communication_dtype, reduce_bucket_size, reduce_scatter: the options of
            ``LowLevelZeroOptimizer``.
        micro_batches: backwards before a step; after the first, reduced gradients are summed in fp32.
        fp8_communication, fp8_min_numel: the options, too; of a number of elements all or nothing travels in fp8.

    Raises:
        TypeError, ValueError: what can't be estimated; the message says which argument.
    """
    forced = as_dtype("dtype", dtype)
    check_floating("dtype", forced)
    options = ZeroOptions(
        partition_grad=stage == 2,
        reduce_scatter=reduce_scatter,
        reduce_bucket_size=reduce_bucket_size,
        communication_dtype=as_dtype("communication_dtype", communication_dtype),
        forced_dtype=forced,
        cpu_offload=cpu_offload,
        master_weights=master_weights,
        fp8_communication=fp8_communication,
        fp8_min_numel=fp8_min_numel,
    )
    for name, number in (("world_size", world_size), ("micro_batches", micro_batches)):
        _check_count(name, number)
    if stage not in (0, 1, 2):
        raise ValueError(f"stage: expected 0 (DDP), 1 or 2, got {stage!r}")
    inner = optimizer.optim if isinstance(optimizer, LowLevelZeroOptimizer) else optimizer
    ranks = 1 if stage == 0 else world_size
    shapes = _shapes(model_or_numel, inner, forced)
    pieces = list(_pieces(shapes, options, inner, ranks, None if stage == 0 else micro_batches))
    parameters, gradients, masters, states, landed = (sum(column) for column in zip(*pieces, strict=True))
    return Estimate(
        *(parameters, gradients, masters, states, min(parameters, _under_way(options, ranks))),
        world_size=world_size,
        stage=stage,
        cpu_offload=cpu_offload,
        host=Held(0, landed, masters, states) if cpu_offload else Held(),
    )


class _Shape(NamedTuple):
    """One parameter, or a number of elements without padding."""

    numel: int
    dtype: torch.dtype
    trained: bool = True
    group: int = 0
    padded: bool = True


def _pieces(
    shapes: Iterable[_Shape], options: ZeroOptions, optimizer: OptimizerLike, ranks: int, micro_batches: int | None
) -> Iterator[tuple[int, int, int, int, int]]:
    """Bytes of each parameter that ``ranks`` share: itself, gradient, master, state, and what is on the host of g.

    ``micro_batches``: how many are summed, in at least fp32; None: by DDP, which sums in place and keeps it.
    """
    sizes = cache(lambda master: state_sizes(optimizer, master))
    row_only = ranks == 1 or options.keeps_row_only
    for shape in shapes:
        if not (shape.trained and shape.numel):
            yield shape.numel * shape.dtype.itemsize, 0, 0, 0, 0
            continue
        own = EvenSplit(shape.numel, ranks).slice_size
        whole = own * ranks if shape.padded else shape.numel
        master = torch.promote_types(shape.dtype, torch.float32) if options.master_weights else shape.dtype
        state = sizes(master)[shape.group]
        reduced = _gradient_dtype(shape.dtype, options, micro_batches).itemsize
        landed = own * reduced if options.cpu_offload else 0
        leaves = options.cpu_offload and row_only and micro_batches is not None  # the device, for the host
        apart = options.cpu_offload or master != shape.dtype or options.in_fp8(shape.numel, ranks)
        yield (
            whole * shape.dtype.itemsize,
            landed + (0 if leaves else own if row_only else whole) * reduced,
            own * master.itemsize if apart else 0,
            own * state.per_element + (state.per_parameter if shape.padded else 0),
            landed,
        )


def _gradient_dtype(dtype: torch.dtype, options: ZeroOptions, micro_batches: int | None) -> torch.dtype:
    if micro_batches is None:
        return dtype
    sent = options.communication_dtype or dtype
    return sent if micro_batches == 1 else torch.promote_types(sent, torch.float32)


def _under_way(options: ZeroOptions, ranks: int) -> int:
    """Bytes of bucket buffers in a backward, or of gathered rows in a step, whichever is more."""
    itemsize = (options.communication_dtype or options.forced_dtype or torch.float32).itemsize
    reducing = (Backend.in_flight + 1) * options.reduce_bucket_size if options.keeps_row_only else 0
    gathering = (IN_FLIGHT + 1) * PART * ranks
    return max(reducing, gathering) * itemsize if ranks > 1 else 0


# ---- what is estimated ----


def _shapes(
    model_or_numel: nn.Module | Iterable[Tensor] | float, optimizer: OptimizerLike, dtype: torch.dtype | None
) -> list[_Shape]:
    """With their param groups; of an optimizer over other parameters (slices, say) all are in the first."""
    if isinstance(model_or_numel, (int, float)):
        return [_Shape(_count(model_or_numel), dtype or torch.float32, padded=False)]
    tensors = _parameters(model_or_numel)
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    group_of = {p: at for at, group in enumerate(groups) for p in group["params"]}
    strange = not any(p in group_of for p in tensors)
    return [
        _Shape(p.numel(), dtype or p.dtype, p.requires_grad and (strange or p in group_of), group_of.get(p, 0))
        for p in tensors
    ]


def as_dtype(keyword: str, dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by its name, as in ``"bf16"`` or ``"bfloat16"``; others as they are."""
    if not isinstance(dtype, str):
        return dtype
    named = DTYPES | {str(known).removeprefix("torch."): known for known in DTYPES.values()}
    if dtype not in named:
        raise ValueError(f"{keyword}: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    return named[dtype]


def _check_count(keyword: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{keyword}: expected an int, got {type(number).__name__} {number!r}")
    if number < 1:
        raise ValueError(f"{keyword}: expected at least 1, got {number}")


def _count(number: float) -> int:
    if isinstance(number, bool) or not math.isfinite(number) or number != int(number) or number < 1:
        raise ValueError(f"model_or_numel: expected a whole number of elements, at least 1, got {number!r}")
    return int(number)


def _parameters(model: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    among = model.parameters() if isinstance(model, nn.Module) else model
    found = [among] if isinstance(among, Tensor) or not isinstance(among, Iterable) else list(dict.fromkeys(among))
    for p in found:
        if not isinstance(p, Tensor):
            raise TypeError(f"model_or_numel: expected a model, parameters or a number, got {type(p).__name__}")
    if not found:
        raise ValueError("model_or_numel: expected at least one parameter, got none")
    return found
