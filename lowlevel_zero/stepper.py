"""The stepper, which measures and clips gradients, steps slices bucket by bucket, and starts their gathers.

It goes part by part where that is the same as one step of the wrapped optimizer, whose kernels then scale gradients
themselves if they can.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim import optimizer as _torch_optimizer

from .bookkeeping.bucket_store import Bucket
from .bookkeeping.gather_store import in_parts
from .bookkeeping.parameter_store import ParameterStore
from .bookkeeping.sharded_parameter import ShardedParameter
from .bookkeeping.step_state import StepState
from .diagnostics.bad_numbers import BadNumbers
from .gradients.global_norm import GlobalNorm, clip_factor
from .loss_scaler import LossScaler
from .optim.owned_step import OwnedStep
from .optim.trials import step_is_replaced
from .options import ZeroOptions
from .partition import ELEMENTWISE
from .sharded_group import ShardedGroup

# Their fused kernels take a gradient's scale and a flag to leave everything as it is. (SGD's leaves a first momentum
# unset when the flag is up.)
_FUSED = {torch.optim.Adam, torch.optim.AdamW}
# Their settings where the user has left the choice of a kernel to torch.
_LEFT_OPEN = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}


class Part(NamedTuple):
    """Buckets of a shard group that are stepped and gathered together, and the records among them that worked."""

    group: ShardedGroup
    buckets: list[Bucket]
    records: list[ShardedParameter]


class StepGate:
    """A hook on the wrapped optimizer's ``step``: it raises unless the stepper has opened it."""

    is_open = False

    def __call__(self, optim: Optimizer, *_: object) -> None:
        """Raise ``RuntimeError`` if the caller, and not the stepper, steps the wrapped optimizer."""
        if not self.is_open:
            raise RuntimeError(
                "expected step() of the LowLevelZeroOptimizer, got that of the "
                f"{type(optim).__name__} that it wraps, which has slices and would leave the model as it is: call "
                "optimizer.step(), not optimizer.optim.step()"
            )


def steps_in_parts(optim: Optimizer) -> bool:
    """Return whether ``optim`` may step some parameters after others: elementwise, its step not hooked or patched."""
    watched = (
        set(map(type, optim._optimizer_step_pre_hooks.values())) - {StepGate},
        optim._optimizer_step_post_hooks,
        _torch_optimizer._global_optimizer_pre_hooks,
        _torch_optimizer._global_optimizer_post_hooks,
    )
    return type(optim) in ELEMENTWISE and not any(watched) and not step_is_replaced(optim)


def is_fused(optim: Optimizer) -> bool:
    """Return whether ``optim`` is torch's Adam or AdamW, fused in all groups: its kernels scale, and skip by a flag."""
    return type(optim) in _FUSED and all(map(methodcaller("get", "fused"), optim.param_groups))


@dataclass(eq=False, repr=False)
class Stepper:
    """Measures and clips gradients, gives them to slices, steps these, and starts their gathers."""

    _optim: Optimizer  # the wrapped one
    _parameters: ParameterStore  # the records of its slices
    _groups: Iterable[ShardedGroup]  # the same by shard group, with their gradients and what gathers them
    writes_unused: bool  # the optimizer may write parameters that have no gradient
    _options: ZeroOptions
    _state: StepState  # of the optimizer's step
    _observer: BadNumbers  # is told of each norm, and of steps that an overflow skips
    left: deque[Part] | None = None  # parts that haven't started their gather; None: a step is about to begin

    def __post_init__(self) -> None:
        # A flag on the device may tell that a step is to be left out, which the host needn't read. All ranks were built
        # with the same optimizer, so it is the same on all, whatever becomes of their settings.
        self._was_fused = is_fused(self._optim)
        self._on_host = self._options.cpu_offload  # slices and gradients are: Adam is fused if its user left that open
        self._step_own = OwnedStep(self._optim, self._parameters)
        self._gate = StepGate()
        finalize(self, self._optim.register_step_pre_hook(self._gate).remove)

    # ---- the norm, and what it decides ----

    def new_norm(self) -> GlobalNorm:
        """Return a ``GlobalNorm`` over all ranks, in fp64 if experts may be fp64, else in fp32."""
        ranks, *others = self._parameters.shard_groups
        double = others and any(record.communication_dtype == torch.float64 for record in self._parameters)
        device = self._parameters.records[0].padded.device
        return GlobalNorm(ranks, device, torch.float64 if double else torch.float32)

    def measure(self, norm: GlobalNorm) -> None:
        """Start computing the ``norm`` of all averaged, unscaled gradients. Communicates."""
        pieces = [bucket.measured for each in self._groups for bucket in each.gradients.sums()]
        norm.measure(pieces, self._state.gradient_scale())

    def take_step(self, norm: GlobalNorm) -> None:
        """Measure, clip and unscale the gradients, and step and gather, unless an overflow skips it. Communicates."""
        self.measure(norm)
        self._judge(norm)
        scale, scaler = norm.scale, self._state.scaler
        if self._options.clip_grad_norm > 0:
            scale = scale * clip_factor(norm.value, self._options.clip_grad_norm)
        nothing = norm.is_empty and len(self._parameters.shard_groups) == 1
        flag = None
        if scaler is not None and not nothing:
            flag = ~norm.value.isfinite()
            scaler.update(flag)
            if not self._skips_by_flag:
                if flag.item():  # the host waits for the device; fp16 alone
                    self._skip(scaler)
                    return
                flag = None
        self._step(float(scale) if self._on_host else scale, flag)  # the host waits for gradients anyway

    def catch_up(self, norm: GlobalNorm) -> None:
        """After an error in a step, run the step's collectives that this rank hasn't run yet. Communicates."""
        known = norm.catch_up()
        if known:
            self._judge(norm)
        if known and self._state.scaler is not None and not self._skips_by_flag and not norm.value.isfinite():
            self._skip(self._state.scaler)
            return
        for part in self._parts():
            self._gather(part)
        self._end()

    def _judge(self, norm: GlobalNorm) -> None:
        """Let the observer check the norm, once; it may raise for one that isn't finite. May communicate."""
        if not norm.is_judged:
            self._observer.norm(norm.value)
            norm.is_judged = True  # now: where it can't be read on this rank, others may look for what is wrong with it

    @property
    def _skips_by_flag(self) -> bool:
        """Return whether the wrapped optimizer skips a step by a flag on the device."""
        return self._was_fused and not self._observer.waits

    def _skip(self, scaler: LossScaler) -> None:
        """Log the overflow's source, or raise after too many at the least scale, and drop gradients. Communicates."""
        try:
            self._observer.skipped(scaler)
        finally:
            for each in self._groups:
                each.gradients.clear()

    # ---- slices are stepped, part by part ----

    @_disable_dynamo  # which would compile the wrapped optimizer anew for each part
    def _step(self, factor: float | Tensor, overflow: Tensor | None) -> None:
        """Step parameters with gradients unless ``overflow``, and gather, in parts if ``steps_in_parts``. Communicates.

        ``factor`` multiplies sums, which are averaged, unscaled and clipped then. Where ``overflow``, 0-d, is true,
        parameters and states stay as they are. Where no parameter has a gradient, an optimizer that may count its steps
        steps all the same.
        """
        self._gate.is_open = True
        try:
            with _fused(self._optim) if self._on_host else nullcontext():
                self._step_parts(self._parts(), factor, overflow, steps_in_parts(self._optim))
        finally:
            self._gate.is_open = False
        self._end()

    def _end(self) -> None:
        """Wait for the gathers of parameters that can't be awaited by their readers."""
        for group in self._groups:
            group.gathers.end_step()

    def _parts(self) -> list[Part]:
        """Return the parts of the present step whose gather hasn't been started."""
        if self.left is None:
            self.left = deque(chain.from_iterable(map(self._parts_of, self._groups)))
        return list(self.left)

    def _gather(self, part: Part) -> None:
        """Start the gather of the next part, and put sharded gradients back into ``p32.grad``. Communicates."""
        for record in part.records:
            record.p32.grad = record.slice_handle if record.worked else None
            record.slice_version = record.p32._version  # as ``note_slice`` does, on the hot path
        part.group.gathers.start_gather(part.records)
        assert self.left is not None
        self.left.popleft()  # before an older gather may fail: this one has started
        part.group.gathers.limit()

    def _step_parts(
        self, parts: Sequence[Part], factor: float | Tensor, overflow: Tensor | None, in_parts: bool
    ) -> None:
        """Step and gather all at once, or part by part if ``in_parts``; gather alone on overflow. Communicates."""
        # A kernel scales gradients where no hook looks at them. Ranks may differ in it: no collective depends on it,
        # and the arithmetic is the same. (Not for masters of 16 bits, to which ``assign_gradients`` rounds gradients,
        # or of fp64, since a kernel takes the scale in fp32.)
        fused = in_parts and is_fused(self._optim)
        left_out = overflow is not None and not fused and bool(overflow.item())
        dtypes = {each.records[0].p32.dtype for part in parts for each in part.buckets}
        by_optimizer = fused and dtypes <= {torch.float32}
        device = self._parameters.records[0].p32.device
        with _scaling(self._optim, factor if by_optimizer else 1.0, overflow, device) if fused else nullcontext():
            for some in [[part] for part in parts] if in_parts else [parts]:
                for bucket in chain.from_iterable(part.buckets for part in some):
                    self.assign_gradients(bucket, factor, by_optimizer, overflow is not None)
                if in_parts and not left_out:
                    self._step_part(some[0].records)
                elif not left_out:
                    self._step_own()
                for part in some:
                    self._gather(part)

    def _parts_of(self, group: ShardedGroup) -> list[Part]:
        """Return a group's parts: newest buckets first (on the host oldest), then unused ones if ``writes_unused``.

        The next forward wants these first. To the host gradients come one after the other, so there the first bucket
        is stepped first, while others are on their way.
        """
        buckets = group.gradients.sums()
        ordered = buckets if self._on_host else buckets[::-1]
        parts = in_parts([(bucket.records[0].kind, bucket.planned.body, bucket) for bucket in ordered])
        written = group.records if self.writes_unused else ()
        rest = [record for record in written if not (record.worked or record.is_empty)]
        unused = [(record.kind, record.split.slice_size, record) for record in rest]
        return [
            *(Part(group, part, [each for bucket in part for each in bucket.records if each.worked]) for part in parts),
            *(Part(group, [], part) for part in in_parts(unused)),
        ]

    def assign_gradients(
        self, bucket: Bucket, factor: float | Tensor, by_optimizer: bool, keeps_sums: bool = False
    ) -> None:
        """Assign to each ``p32.grad`` its slice of the sum, times ``factor`` unless the optimizer multiplies.

        ``by_optimizer``: it does so in its own kernel, and writes gradients back so unless it skips. What is kept
        doesn't depend on it, since ranks may differ in it. ``keeps_sums``: it may skip, so gradients are copies.
        """
        row = bucket.to_step()
        bucket.stepped = True
        dtype = bucket.records[0].p32.dtype
        if row.dtype == dtype and not keeps_sums:
            bucket.scale = 1.0
        else:
            bucket.scale = factor
            row = row.to(torch.promote_types(row.dtype, torch.float32), copy=True)
        exact = isinstance(factor, float) and factor == 1.0
        if not (by_optimizer or exact):
            if is_fused(self._optim) and dtype is torch.float32:  # as the kernel: a replica's rank may have no hooks
                row.div_(_inverse(factor, row.device))
            else:
                row.mul_(factor)
        for record, gradient in zip(bucket.records, bucket.split(row.to(dtype)), strict=True):
            if record.worked:
                if record.is_flat:
                    record.p32.grad = gradient
                else:  # a rank has no elements of another rank's parameters
                    record.p32.grad = record.shaped(gradient) if gradient.numel() else None

    def _step_part(self, part: Sequence[ShardedParameter]) -> None:
        """Step the wrapped optimizer with only the parameters of one part in its groups."""
        groups: list[dict[str, Any]] = self._optim.param_groups
        members: dict[int, list[Tensor]] = {}
        for record in part:
            members.setdefault(record.group, []).append(record.p32)
        stepped = [(groups[at], groups[at]["params"], members[at]) for at in sorted(members)]
        try:
            for group, _, some in stepped:
                group["params"] = some
            self._optim.param_groups = [group for group, _, _ in stepped]
            self._optim.step()
        finally:
            self._optim.param_groups = groups
            for group, all_of_it, _ in stepped:
                group["params"] = all_of_it


@contextmanager
def _scaling(optim: Any, factor: float | Tensor, overflow: Tensor | None, device: torch.device) -> Iterator[None]:
    """Set the scale and the skip flag of a fused ``optim`` for the time of the body, as ``GradScaler`` does."""
    optim.grad_scale = _inverse(factor, device)
    optim.found_inf = None if overflow is None else overflow.float()
    try:
        yield
    finally:
        del optim.grad_scale, optim.found_inf


def _inverse(factor: float | Tensor, device: torch.device) -> Tensor:
    """Return ``1 / factor``, by which fused kernels divide gradients: 0-d, fp32, on ``device``."""
    inverse = 1.0 / factor if isinstance(factor, Tensor) or factor else math.inf  # clipping by a norm of inf
    if isinstance(inverse, Tensor):
        return inverse.to(device, torch.float32)
    return torch.full((), inverse, dtype=torch.float32, device=device)  # copying the host's would wait for the device


@contextmanager
def _fused(optim: Optimizer) -> Iterator[None]:
    """Step Adam by its fused kernel in the body if its user left the choice open; settings are restored."""
    mine = optim.param_groups if type(optim) in _FUSED else []
    chosen = [group for group in mine if all(group.get(name) == default for name, default in _LEFT_OPEN.items())]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None
