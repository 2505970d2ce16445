"""What the caller chose: every option once, with its default, its check, and whether ranks may differ in it.

What each is for stands where the caller reads it, in ``LowLevelZeroOptimizer``, whose keywords these are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch

BackwardContext: TypeAlias = Callable[[], AbstractContextManager[object]]
Check: TypeAlias = Callable[[str, object], None]

DEBUG = "LOWLEVEL_ZERO_DEBUG"

# Elements of a bucket where nobody has chosen. A host's is to stay in its cache. A device's collective costs some 20 us
# whatever its size, and takes megabytes to fill a link: DDP has 25 MiB, ColossalAI's plugin this many elements.
_ON_HOST, _ON_DEVICE = 2**20, 12 * 2**20


# ---- checks: each raises for a value that ``keyword`` doesn't take ----


def check_switch(keyword: str, value: object) -> None:
    """Raise unless ``value`` is a bool: a string "False" would count as true, a stage 1 as stage 2."""
    if not isinstance(value, bool):
        raise TypeError(f"{keyword}: expected True or False, got {type(value).__name__} {value!r}")


@dataclass(frozen=True)
class Number:
    """A check for numbers.

    Attributes:
        kind: what is expected, in words.
        within: the range, in words.
        holds: whether a number is in it.
        whole: integers alone.
    """

    kind: str
    within: str
    holds: Callable[[float], bool]
    whole: bool = False

    def __call__(self, keyword: str, value: object) -> None:
        """Raise ``TypeError`` or ``ValueError`` unless ``value`` is such a number."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            raise TypeError(f"{keyword}: expected {self.kind}, got {type(value).__name__} {value!r}")
        if not self.holds(value):
            raise ValueError(f"{keyword}: expected {self.within}, got {value}")


ELEMENTS = Number("an int (elements)", "at least 1 element", lambda numel: numel >= 1, whole=True)
MIN_NUMEL = Number("an int (elements)", "0 or more elements", lambda numel: numel >= 0, whole=True)
STEPS = Number("an int (steps)", "at least 0 steps (0 switches it off)", lambda steps: steps >= 0, whole=True)
SECONDS = Number(
    "a number of seconds >= 0", "a number of seconds >= 0 (0 switches it off)", lambda s: 0 <= s < math.inf
)
MAX_NORM = Number("a number >= 0", "a number >= 0 (0 means no clipping)", lambda norm: norm >= 0)
FACTOR = Number(
    "a number above 0", "a finite number above 0 (1 divides after the sum alone)", lambda f: 0 < f < math.inf
)


def check_elements(keyword: str, numel: object) -> None:
    """Raise unless ``numel`` is None or a number of elements."""
    if numel is not None:
        ELEMENTS(keyword, numel)


def check_floating(keyword: str, dtype: object) -> None:
    """Raise unless ``dtype`` is None or a floating-point dtype of at least 16 bits."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{keyword}: expected a torch.dtype or None, got {type(dtype).__name__} {dtype!r}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{keyword}: expected float16, bfloat16, float32 or float64, got {dtype}")


def check_reduction(keyword: str, reduction: object) -> None:
    """Raise unless ``reduction`` is one that there is."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{keyword}: expected 'mean' or 'sum' over the ranks, got {reduction!r}")


def check_context(keyword: str, context: object) -> None:
    """Raise unless ``context`` is None or makes context managers."""
    if context is not None and not callable(context):
        raise TypeError(f"{keyword}: expected a callable that returns a context manager, got {type(context).__name__}")


# ---- options ----


_MAY_DIFFER = {"may differ": True}


@dataclass(frozen=True)
class ZeroOptions:
    """The choices of one ``LowLevelZeroOptimizer`` that don't change after its construction, all of them checked.

    An option that has no other "check" in its metadata is a switch. Ranks "may differ" in one that decides over no
    collective, and in ``verbose``, which they agree on. A "hint" is said with the value where ranks do differ.
    """

    partition_grad: bool = False
    reduce_scatter: bool = False
    reduce_bucket_size: int | None = field(default=None, metadata={"check": check_elements})
    communication_dtype: torch.dtype | None = field(default=None, metadata={"check": check_floating})
    forced_dtype: torch.dtype | None = field(default=None, metadata={"check": check_floating})
    overlap_communication: bool = True
    overlap_allgather: bool = False
    cpu_offload: bool = False
    master_weights: bool = True
    clip_grad_norm: float = field(default=0.0, metadata={"check": MAX_NORM})
    hybrid_shard: bool = False
    own_communicator: bool = True
    assume_elementwise: bool = False
    fp8_communication: bool = False
    fp8_min_numel: int = field(default=2048, metadata={"check": MIN_NUMEL})
    reduce_scatter_with_fp32_accumulation: bool = False
    gradient_predivide_factor: float = field(default=1.0, metadata={"check": FACTOR})
    reduction: str = field(default="mean", metadata={"check": check_reduction})
    pad_buckets_for_high_nccl_busbw: bool = False
    slice_multiple: int = field(default=1, metadata={"check": ELEMENTS})
    backward_context: BackwardContext | None = field(default=None, metadata={"check": check_context, **_MAY_DIFFER})
    verbose: bool = field(default=False, metadata=_MAY_DIFFER)
    stall_timeout: float = field(default=60.0, metadata={"check": SECONDS})
    debug: bool = field(default=False, metadata={"hint": f" ({DEBUG} sets it, too)"})
    verify_every: int = field(default=0, metadata={"check": STEPS})
    max_skipped_steps: int = field(default=20, metadata={"check": STEPS})
    error_if_nonfinite: bool = False

    def __post_init__(self) -> None:
        for option in fields(self):
            check: Check = option.metadata.get("check", check_switch)
            check(option.name, getattr(self, option.name))
        if self.reduce_scatter_with_fp32_accumulation and not self.keeps_row_only:
            raise ValueError(
                "reduce_scatter_with_fp32_accumulation=True: expected reduce-scatters, got stage 1, which all-reduces: "
                "pass partition_grad=True or reduce_scatter=True too, or leave it out"
            )

    @classmethod
    def chosen(cls, keywords: Mapping[str, Any]) -> ZeroOptions:
        """Those among ``keywords``, and what the environment adds."""
        chosen = {option.name: keywords[option.name] for option in fields(cls) if option.name in keywords}
        return cls(**{**chosen, "debug": chosen.get("debug") or os.environ.get(DEBUG) == "1"})

    def alike(self) -> Iterator[str]:
        """What has to be the same on all ranks, a line each."""
        for option in fields(self):
            if "may differ" not in option.metadata:
                yield f"{option.name}={getattr(self, option.name)}{option.metadata.get('hint', '')}"

    @property
    def keeps_row_only(self) -> bool:
        """Whether a reduction leaves this rank's row alone."""
        return self.partition_grad or self.reduce_scatter

    def bucket_size(self, device_type: str = "cpu") -> int:
        """Elements of a bucket of parameters on such a device."""
        default = _ON_HOST if device_type == "cpu" else _ON_DEVICE
        return default if self.reduce_bucket_size is None else self.reduce_bucket_size

    def in_fp8(self, numel: int, world_size: int) -> bool:
        """Whether a parameter of ``numel`` elements travels in fp8 between so many ranks."""
        return self.fp8_communication and numel >= max(self.fp8_min_numel, 1) and world_size > 1

    def unit(self, world_size: int) -> float:
        """What a gradient that was divided before it was summed is to be multiplied with afterwards."""
        return self.gradient_predivide_factor / (world_size if self.reduction == "mean" else 1)
