"""What the caller chose, checked once: no option is looked at again that could be wrong."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields

import torch

BackwardContext = Callable[[], AbstractContextManager[object]]

# In a field's metadata: ranks may differ in it; how its value is told, where its name isn't the keyword, or not all.
_MAY_DIFFER, _TOLD_AS = "may differ", "told as"


@dataclass(frozen=True)
class ZeroOptions:
    """The choices of one ``LowLevelZeroOptimizer`` that don't change after its construction.

    Attributes:
        partition_grad: stage 2: this rank keeps its slice of the averaged gradient alone.
        reduce_scatter: what a bucket's reduction leaves is this rank's row (else the whole bucket).
        bucket_size: elements of a bucket, padding included, at which it counts as full.
        communication_dtype: the wire's dtype; None: each parameter's own.
        forced_dtype: what parameters are converted to first.
        overlap_communication: start a bucket's reduction as soon as it is complete, during backward.
        overlap_allgather: let gathers go on after the step.
        cpu_offload: masters, the gradients that step them and the optimizer's state live on the host.
        master_weights: step fp32 copies of 16-bit slices.
        clip_grad_norm: largest global L2 norm; 0: no clipping.
        hybrid_shard: of two levels of ranks, shard over the inner one alone.
        assume_elementwise: take the caller's word that the optimizer is elementwise.
        fp8_communication: send what is large in fp8.
        fp8_min_numel: elements of the smallest parameter that is.
        reduce_scatter_with_fp32_accumulation: sum 16-bit wires in fp32, whatever the backend does.
        gradient_predivide_factor: what gradients are divided by before they are summed, and multiplied with after.
        reduction: "mean" or "sum" over the ranks.
        pad_buckets_for_high_nccl_busbw: rows of wires are multiples of 2**16 elements.
        backward_context: makes the context manager that backward runs in.
        verbose: log each skipped step, for which the host waits for the device; on one rank, or all.
        stall_timeout: seconds after which a wait is reported; 0: never.
        debug: compare what the ranks are about to do before they do it.
        verify_every: steps after which parameters are compared; 0: never.
        max_skipped_steps: fp16 steps in a row that may overflow while the loss scale is at its minimum; 0: any number.
        error_if_nonfinite: refuse a step whose gradient norm is inf or NaN, without fp16.

    ``alike`` tells what has to be the same on all ranks: all but what decides over no collective.
    """

    partition_grad: bool = False
    reduce_scatter: bool = False
    bucket_size: int = field(default=1024 * 1024, metadata={_TOLD_AS: "reduce_bucket_size={}"})
    communication_dtype: torch.dtype | None = None
    forced_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    overlap_allgather: bool = False
    cpu_offload: bool = False
    master_weights: bool = True
    clip_grad_norm: float = 0.0
    hybrid_shard: bool = False
    assume_elementwise: bool = False
    fp8_communication: bool = False
    fp8_min_numel: int = 2048
    reduce_scatter_with_fp32_accumulation: bool = False
    gradient_predivide_factor: float = 1.0
    reduction: str = "mean"
    pad_buckets_for_high_nccl_busbw: bool = False
    backward_context: BackwardContext | None = field(default=None, metadata={_MAY_DIFFER: True})
    verbose: bool = field(default=False, metadata={_MAY_DIFFER: True})
    stall_timeout: float = 60.0
    debug: bool = field(default=False, metadata={_TOLD_AS: "debug={} (LOWLEVEL_ZERO_DEBUG sets it, too)"})
    verify_every: int = 0
    max_skipped_steps: int = 20
    error_if_nonfinite: bool = False

    def __post_init__(self) -> None:
        for switch in (each.name for each in fields(self) if isinstance(each.default, bool)):
            check_switch(switch, getattr(self, switch))
        check_bucket_size(self.bucket_size)
        check_max_norm("clip_grad_norm", self.clip_grad_norm)
        check_floating("communication_dtype", self.communication_dtype)
        check_floating("forced_dtype", self.forced_dtype)
        check_min_numel(self.fp8_min_numel)
        if self.reduce_scatter_with_fp32_accumulation and not self.keeps_row_only:
            raise ValueError(
                "reduce_scatter_with_fp32_accumulation=True: expected reduce-scatters, got stage 1, which all-reduces: "
                "pass partition_grad=True or reduce_scatter=True too, or leave it out"
            )
        check_factor("gradient_predivide_factor", self.gradient_predivide_factor)
        check_reduction(self.reduction)
        check_seconds("stall_timeout", self.stall_timeout)
        check_steps("verify_every", self.verify_every)
        check_steps("max_skipped_steps", self.max_skipped_steps)
        if self.backward_context is not None and not callable(self.backward_context):
            raise TypeError(
                "backward_context: expected a callable that returns a context manager, "
                f"got {type(self.backward_context).__name__}"
            )

    def alike(self) -> Iterator[str]:
        """What has to be the same on all ranks, a line each."""
        for each in fields(self):
            if not each.metadata.get(_MAY_DIFFER):
                yield each.metadata.get(_TOLD_AS, f"{each.name}={{}}").format(getattr(self, each.name))

    @property
    def keeps_row_only(self) -> bool:
        """Whether a reduction leaves this rank's row alone."""
        return self.partition_grad or self.reduce_scatter

    def in_fp8(self, numel: int, world_size: int) -> bool:
        """Whether a parameter of ``numel`` elements travels in fp8 between so many ranks."""
        return self.fp8_communication and numel >= max(self.fp8_min_numel, 1) and world_size > 1

    def unit(self, world_size: int) -> float:
        """What a gradient that was divided before it was summed is to be multiplied with afterwards."""
        return self.gradient_predivide_factor / (world_size if self.reduction == "mean" else 1)


def check_switch(keyword: str, value: object) -> None:
    """Raise unless ``value`` is a bool: a string "False" would count as true, a stage 1 as stage 2."""
    if not isinstance(value, bool):
        raise TypeError(f"{keyword}: expected True or False, got {type(value).__name__} {value!r}")


def check_bucket_size(size: object) -> None:
    """Raise unless ``size`` is a positive number of elements."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"reduce_bucket_size: expected an int (elements), got {type(size).__name__} {size!r}")
    if size <= 0:
        raise ValueError(f"reduce_bucket_size: expected at least 1 element, got {size}")


def check_min_numel(numel: object) -> None:
    """Raise unless ``numel`` is a number of elements."""
    if isinstance(numel, bool) or not isinstance(numel, int):
        raise TypeError(f"fp8_min_numel: expected an int (elements), got {type(numel).__name__} {numel!r}")
    if numel < 0:
        raise ValueError(f"fp8_min_numel: expected 0 or more elements, got {numel}")


def check_max_norm(keyword: str, norm: object) -> None:
    """Raise unless ``norm`` is a number >= 0 that is not NaN."""
    if isinstance(norm, bool) or not isinstance(norm, (int, float)):
        raise TypeError(f"{keyword}: expected a number >= 0, got {type(norm).__name__} {norm!r}")
    if math.isnan(norm) or norm < 0:
        raise ValueError(f"{keyword}: expected a number >= 0 (0 means no clipping), got {norm}")


def check_seconds(keyword: str, seconds: object) -> None:
    """Raise unless ``seconds`` is a finite number >= 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{keyword}: expected a number of seconds >= 0, got {type(seconds).__name__} {seconds!r}")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{keyword}: expected a number of seconds >= 0 (0 switches it off), got {seconds}")


def check_steps(keyword: str, steps: object) -> None:
    """Raise unless ``steps`` is a number of steps, or 0."""
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"{keyword}: expected an int (steps), got {type(steps).__name__} {steps!r}")
    if steps < 0:
        raise ValueError(f"{keyword}: expected at least 0 steps (0 switches it off), got {steps}")


def debugging(debug: bool) -> bool:
    """Whether ``debug`` is chosen, by keyword or by ``LOWLEVEL_ZERO_DEBUG=1`` in the environment."""
    return debug or os.environ.get("LOWLEVEL_ZERO_DEBUG") == "1"


def check_floating(keyword: str, dtype: object) -> None:
    """Raise unless ``dtype`` is None or a floating-point dtype of at least 16 bits."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{keyword}: expected a torch.dtype or None, got {type(dtype).__name__} {dtype!r}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{keyword}: expected float16, bfloat16, float32 or float64, got {dtype}")


def check_factor(keyword: str, factor: object) -> None:
    """Raise unless ``factor`` is a finite number above 0."""
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"{keyword}: expected a number above 0, got {type(factor).__name__} {factor!r}")
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"{keyword}: expected a finite number above 0 (1 divides after the sum alone), got {factor}")


def check_reduction(reduction: object) -> None:
    """Raise unless ``reduction`` is one that there is."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: expected 'mean' or 'sum' over the ranks, got {reduction!r}")


def refuse_undelivered(**keywords: object) -> None:
    """Raise ``NotImplementedError`` for the first keyword that asks for what isn't built yet."""
    for keyword, value in keywords.items():
        if value:
            raise NotImplementedError(f"{keyword}={value!r} is not available yet: leave {keyword} out")
