"""Bytes per rank, by owner: what is held, every storage counted once; and what will be, from shapes and options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..bookkeeping.gather_store import IN_FLIGHT
from ..communication.transport import Transport
from ..optimizer import LowLevelZeroOptimizer
from ..options import ZeroOptions, check_floating
from ..partition import EvenSplit
from ..stepper import PART
from .state_sizes import OptimizerLike, StateSize, state_sizes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def held_bytes(owners: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Bytes of the storages behind each owner's tensors.

    A storage that several tensors share counts once, for the first owner that names it: an fp32 master slice
    that is a view of its parameter adds nothing.
    """
    seen: set[int] = set()
    held: dict[str, int] = {}
    for owner, tensors in owners.items():
        held[owner] = sum(_new_bytes(tensor, seen) for tensor in tensors)
    return held


def _new_bytes(tensor: Tensor, seen: set[int]) -> int:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


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
        return sum(asdict(self).values())


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
    def total(self) -> int:
        """Bytes of all owners."""
        return self.owners().total

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
    run = _Run(options, 1 if stage == 0 else world_size, stage == 0, micro_batches, inner)
    pieces = list(run.pieces(_shapes(model_or_numel, inner, forced)))
    parameters, gradients, masters, states, landed = (sum(column) for column in zip(*pieces, strict=True))
    return Estimate(
        *(parameters, gradients, masters, states, run.buffers(parameters)),
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


class _Piece(NamedTuple):
    """What one parameter takes, in bytes."""

    parameters: int
    gradients: int
    masters: int
    states: int
    landed: int  # of the gradients, those on the host


class _Run:
    """How a rank trains.

    Args:
        ranks: that share the optimizer; one in stage 0.
        plain: stage 0: DDP, which sums gradients in place.
    """

    def __init__(
        self, options: ZeroOptions, ranks: int, plain: bool, micro_batches: int, optimizer: OptimizerLike
    ) -> None:
        self._options = options
        self._ranks = ranks
        self._plain = plain
        self._sums = micro_batches > 1 and not plain
        self._optimizer = optimizer
        self._state_sizes: dict[torch.dtype, list[StateSize]] = {}

    def pieces(self, shapes: Iterable[_Shape]) -> Iterator[_Piece]:
        """What each parameter takes."""
        for shape in shapes:
            if not shape.trained:
                yield _Piece(shape.numel * shape.dtype.itemsize, 0, 0, 0, 0)
            elif shape.numel:
                yield self._piece(shape)

    def _piece(self, shape: _Shape) -> _Piece:
        own = EvenSplit(shape.numel, self._ranks).slice_size
        whole = own * self._ranks if shape.padded else shape.numel
        master = torch.promote_types(shape.dtype, torch.float32) if self._options.master_weights else shape.dtype
        size = self._state_size(master, shape.group)
        row_only = self._ranks == 1 or self._options.keeps_row_only
        apart = self._options.cpu_offload or master != shape.dtype or self._options.in_fp8(shape.numel, self._ranks)
        summed = self._sum_dtype(shape.dtype).itemsize
        landed = own * summed if self._options.cpu_offload else 0
        stays = self._plain or not (row_only and self._options.cpu_offload)  # on the device
        return _Piece(
            parameters=whole * shape.dtype.itemsize,
            gradients=landed + ((own if row_only else whole) * summed if stays else 0),
            masters=own * master.itemsize if apart else 0,
            states=own * size.per_element + (size.per_parameter if shape.padded else 0),
            landed=landed,
        )

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        wire = dtype if self._plain else self._options.communication_dtype or dtype
        return torch.promote_types(wire, torch.float32) if self._sums else wire

    def _state_size(self, master: torch.dtype, group: int) -> StateSize:
        if master not in self._state_sizes:
            self._state_sizes[master] = state_sizes(self._optimizer, master)
        return self._state_sizes[master][group]

    def buffers(self, parameters: int) -> int:
        """Bucket buffers under way in a backward, or rows in a step, whichever is more, and no more than there are."""
        if self._ranks == 1:
            return 0
        itemsize = (self._options.communication_dtype or self._options.forced_dtype or torch.float32).itemsize
        reducing = (Transport.in_flight + 1) * self._options.reduce_bucket_size if self._options.keeps_row_only else 0
        gathering = (IN_FLIGHT + 1) * PART * self._ranks
        return min(parameters, max(reducing, gathering) * itemsize)


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
