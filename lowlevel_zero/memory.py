"""Bytes per rank, by owner: what is held, every storage counted once; and what will be, from shapes and options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .bookkeeping.gather_store import IN_FLIGHT
from .communication.arena import rounded
from .communication.compression import encoded_size
from .communication.shared_memory import KEPT, SharedMemory
from .communication.transport import Transport
from .options import ZeroOptions, check_floating
from .rank_share import Kind, Load, Setup, load_of_number, load_of_parameters
from .state_sizes import OptimizerLike
from .stepping import PART

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


# What will be held.


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds at one moment, by owner: the names are ``optimizer.memory_held()``'s."""

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
class Estimate:
    """Bytes that each rank will hold, wherever they lie. Activations and buffers are not counted.

    ``total`` is the sum of ``parameters``, ``gradients``, ``masters`` and ``states`` as they are after a backward,
    and of ``wires`` at their fullest.

    Attributes:
        world_size, stage, cpu_offload: what it is an estimate of.
        after_backward: gradients have been reduced, and states are there: any step but the first.
        after_step: gradients have been cleared.
        peak: the fuller one of two moments: the last bucket of a backward is packed while others travel; a part of
            the slices has its gradients in the masters' dtype while others are gathered. It is about that.
        host: of ``after_backward``, what ``cpu_offload`` has on the host; the rest is on the device.
    """

    world_size: int
    stage: int
    cpu_offload: bool
    after_backward: Held
    after_step: Held
    peak: Held
    host: Held
    wires: int

    @property
    def parameters(self) -> int:
        """Bytes of the parameters, and of their padding."""
        return self.after_backward.parameters

    @property
    def gradients(self) -> int:
        """Bytes of the reduced gradients."""
        return self.after_backward.gradients

    @property
    def masters(self) -> int:
        """Bytes of the master slices that aren't their parameters' own rows."""
        return self.after_backward.masters

    @property
    def states(self) -> int:
        """Bytes of the optimizer's state."""
        return self.after_backward.states

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
        return replace(self.after_backward, wires=self.wires)

    def as_dict(self) -> dict[str, Any]:
        """Numbers by name, for JSON."""
        owners = {**asdict(self.owners()), "total": self.total, "device": self.device}
        return {**asdict(self), **owners, "host": self.host.total, "on_host": asdict(self.host)}


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
    shared_memory: bool = False,
    fp8_communication: bool = False,
    fp8_min_numel: int = 2048,
) -> Estimate:
    """What each of ``world_size`` ranks will hold, without any of them, and without allocating what it counts.

    Of a model (on the meta device too) padding, bucket plan and param groups are those of a run, and so are the
    bytes; of a number of elements padding is left out. Wires depend on timing: see ``Estimate.wires``.

    Stage 0 is DDP with ``gradient_as_bucket_view=True``, where each rank steps all masters, on the host with
    ``cpu_offload``.

    Args:
        model_or_numel: the model, its parameters, or their number of elements.
        stage: 0, 1 or 2.
        dtype: the parameters', as torch's or as in ``"bf16"``; None: the model's own, of a number fp32.
        optimizer: one, over the model's parameters or others; its class; or a name, as in ``"adamw"`` or
            ``"sgd-momentum"``. The size of its state is found out by a small one that steps.
        cpu_offload, master_weights, communication_dtype, reduce_bucket_size, reduce_scatter: the options of
            ``LowLevelZeroOptimizer``.
        micro_batches: backwards before a step; after the first, reduced gradients are summed in fp32.
        shared_memory: the ranks are processes of one host on gloo, of which each keeps wires between steps.
        fp8_communication, fp8_min_numel: the options, too; of a number of elements all or nothing travels in fp8.

    Raises:
        TypeError, ValueError: what can't be estimated; the message says which argument.
    """
    forced = as_dtype("dtype", dtype)
    check_floating("dtype", forced)
    options = ZeroOptions(
        partition_grad=stage == 2,
        reduce_scatter=reduce_scatter,
        bucket_size=reduce_bucket_size,
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
    setup = Setup(1 if stage == 0 else world_size, options, micro_batches, stage == 0, shared_memory)
    if isinstance(model_or_numel, (int, float)):
        load = load_of_number(_count(model_or_numel), optimizer, setup)
    else:
        load = load_of_parameters(_parameters(model_or_numel), optimizer, setup)
    return _Bytes(setup, load).estimate(world_size, stage)


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


class _Bytes:
    """What the load takes, in bytes, owner by owner and moment by moment."""

    def __init__(self, setup: Setup, load: Load) -> None:
        self._setup = setup
        self._options = setup.options
        self._ranks = setup.ranks
        self._kinds = load.kinds
        self._load = load

    def estimate(self, world_size: int, stage: int) -> Estimate:
        """All of it."""
        kinds, offload = self._kinds, self._options.cpu_offload
        masters = sum(map(self._masters, kinds))
        landed = sum(kind.body * self._sum_of(kind).itemsize for kind in kinds) if offload else 0
        reducing, gathering = sum(map(self._reducing, kinds)), sum(map(self._gathering, kinds))
        wires = reducing + gathering if self._setup.shared_memory else max(reducing, gathering)
        after_backward = Held(
            parameters=self._load.frozen + sum(self._ranks * kind.slices * kind.dtype.itemsize for kind in kinds),
            gradients=landed + sum(map(self._gradients, kinds)),
            masters=masters,
            states=self._load.states,
            wires=min(KEPT, wires) if self._setup.shared_memory else 0,
        )
        return Estimate(
            world_size=world_size,
            stage=stage,
            cpu_offload=offload,
            after_backward=after_backward,
            after_step=replace(after_backward, gradients=after_backward.gradients if self._setup.plain else 0),
            peak=max(self._in_backward(after_backward), self._in_step(after_backward), key=lambda held: held.total),
            host=Held(gradients=landed, masters=masters, states=self._load.states) if offload else Held(),
            wires=wires,
        )

    def _sum_of(self, kind: Kind) -> torch.dtype:
        """The dtype of reduced gradients."""
        if self._setup.plain or self._setup.micro_batches == 1:
            return kind.wire
        return torch.promote_types(kind.wire, torch.float32)

    def _gradients(self, kind: Kind) -> int:
        """Those on the device: all rows, or this rank's, which in stage 2 offloading takes away."""
        keeps_row = self._ranks == 1 or self._options.keeps_row_only
        if keeps_row and self._options.cpu_offload and not self._setup.plain:
            return 0
        dtype = self._sum_of(kind)
        columns = kind.row if dtype == kind.wire and not self._setup.plain else kind.body
        return (1 if keeps_row else kind.rows) * columns * dtype.itemsize

    def _masters(self, kind: Kind) -> int:
        master = self._setup.master_of(kind.dtype)
        apart = self._options.cpu_offload or master != kind.dtype or kind.fp8
        return kind.slices * master.itemsize if apart else 0

    # ---- moments within a call ----

    def _in_backward(self, after: Held) -> Held:
        """The last bucket is packed: its gradients as backward left them, and its wire beside others under way."""
        raw = 0 if self._setup.plain else max(map(self._raw, self._kinds), default=0)
        return replace(after, gradients=after.gradients + raw, wires=sum(map(self._reducing, self._kinds)))

    def _raw(self, kind: Kind) -> int:
        """What a wire is packed of, and with fp8 the wire that is then encoded."""
        return kind.rows * kind.widest * (kind.dtype.itemsize + (kind.wire.itemsize if kind.fp8 else 0))

    def _in_step(self, after: Held) -> Held:
        """A part's gradients in the masters' dtype, which DDP needs of all masters at once, and rows under way."""
        cast = 0
        for kind in self._kinds:
            master = self._setup.master_of(kind.dtype)
            if master != self._sum_of(kind):
                cast += master.itemsize * (kind.body if self._setup.plain else _part(kind))
        return replace(after, gradients=after.gradients + cast, wires=sum(map(self._gathering, self._kinds)))

    def _reducing(self, kind: Kind) -> int:
        """Wires under way in a backward. (In stage 1 the backend leaves the sum in the wire: it is a gradient.)"""
        row_only = self._options.keeps_row_only
        if self._ranks == 1 or not (row_only or self._setup.shared_memory or kind.fp8):
            return 0
        row = encoded_size(kind.widest) if kind.fp8 else kind.widest * kind.wire.itemsize
        if not self._setup.shared_memory:
            bytes_each = kind.rows * row * (2 if kind.fp8 else 1)  # fp8: the others' are there beside what is sent
            return (min(Transport.in_flight + 1, kind.buckets) if row_only else kind.buckets) * bytes_each
        of_a_step = kind.buckets * self._setup.micro_batches
        slots = min(_slots(SharedMemory.in_flight), of_a_step)
        return slots * (rounded(kind.rows * row) + (rounded(row) if kind.fp8 and not row_only else 0))  # and its sums

    def _gathering(self, kind: Kind) -> int:
        """Wires under way in a step: of all rows, or, where others read it, of this rank's own."""
        if self._ranks == 1:
            return 0
        part, parts = _part(kind), -(-kind.body // _part(kind))
        if self._setup.shared_memory:
            sent = encoded_size(part) if kind.fp8 else part * kind.dtype.itemsize
            return min(_slots(IN_FLIGHT), parts) * rounded(sent)
        under_way = min((IN_FLIGHT + 1) * part, kind.body)
        return kind.rows * (under_way * kind.dtype.itemsize + (encoded_size(under_way) if kind.fp8 else 0))


def _slots(in_flight: int) -> int:
    """Wires of this rank's that others may not have read yet: as many behind as it may be ahead, and a new one."""
    return 2 * in_flight + 1


def _part(kind: Kind) -> int:
    """Elements of slices that are stepped and gathered together."""
    return min(PART + kind.widest, kind.body)
