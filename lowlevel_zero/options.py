"""The options of ``LowLevelZeroOptimizer``: each is defined once, with its default, its check and its meaning.

The optimizer's docstring and the tables of ``docs/options.md`` are made from the fields below.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from .partition import BY_ELEMENTS, BY_MATRICES, BY_PARAMETERS, Split

BackwardContext: TypeAlias = Callable[[], AbstractContextManager[object]]
Cost: TypeAlias = Callable[[Tensor], float]
T = TypeVar("T")
G = TypeVar("G")

# Elements of the smallest parameter that travels in fp8. Norms and biases are smaller: their bytes count for little.
FP8_MIN_NUMEL = 2048

_FP32 = torch.finfo(torch.float32)
_WIDTH = 120  # of a docstring's lines


# ---- checks ----


class Takes(NamedTuple):
    """A check of a value."""

    expected: str  # the value that is expected, in words
    types: tuple[Any, ...]  # bool counts as an int only if it is listed
    holds: Callable[[Any], bool] = lambda _: True  # returns whether a value of these types is in the range

    def __call__(self, name: str, value: object) -> None:
        """Raise ``TypeError`` or ``ValueError`` unless the option ``name`` takes ``value``."""
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            raise TypeError(f"{name}: expected {self.expected}, got {type(value).__name__} {value!r:.80}")
        if not self.holds(value):
            raise ValueError(f"{name}: expected {self.expected}, got {value!r}")


_NUMBER, _FLOATING = (int, float), (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SWITCH = Takes("True or False", (bool,))
MAX_NORM = Takes("a number >= 0 (0 means no clipping)", _NUMBER, lambda norm: norm >= 0)
CLIPPED_NORM = MAX_NORM._replace(expected="a number >= 0")
SPLIT = Takes(
    f"None, {BY_ELEMENTS!r}, {BY_PARAMETERS!r} or {BY_MATRICES!r}",
    (str, NoneType),
    {None, BY_ELEMENTS, BY_PARAMETERS, BY_MATRICES}.__contains__,
)
DTYPE = Takes(
    "a torch.dtype or None: float16, bfloat16, float32 or float64",
    (torch.dtype, NoneType),
    lambda dtype: dtype is None or dtype in _FLOATING,
)
_STAGE = Takes("1 or 2", (int,), lambda stage: stage in (1, 2))
_ELEMENTS = Takes("an int of at least 1 element, or None", (int, NoneType), lambda numel: numel is None or numel >= 1)
_STEPS = Takes("an int of at least 0 steps (0 switches it off)", (int,), lambda steps: steps >= 0)
_CLEAN_STEPS = Takes("an int of at least 1 step", (int,), lambda steps: steps >= 1)
_OVERFLOWS = Takes("an int of at least 0 overflows", (int,), lambda count: count >= 0)
_SECONDS = Takes("a number of seconds >= 0 (0 switches it off)", _NUMBER, lambda seconds: 0 <= seconds < math.inf)
_SCALE = Takes("a number above 0 that float32 can hold", _NUMBER, lambda scale: _FP32.tiny <= scale <= _FP32.max)
_GROWTH = Takes("a number above 1 that float32 can hold", _NUMBER, lambda factor: 1 < factor <= _FP32.max)
_BACKOFF = Takes("a number between 0 and 1", _NUMBER, lambda factor: _FP32.tiny <= factor < 1)
_FACTOR = Takes("a finite number above 0 (1 divides after the sum alone)", _NUMBER, lambda f: 0 < f < math.inf)
_REDUCTION = Takes("'mean' or 'sum' over the ranks", (str,), {"mean", "sum"}.__contains__)
_CONTEXT = Takes("a callable that returns a context manager, or None", (Callable, NoneType))
_COST = Takes("a callable that returns the cost of a parameter, or None", (Callable, NoneType))


# ---- fields of options ----


class About(NamedTuple):
    """The meaning, check and keyword of one option."""

    text: str  # the meaning
    check: Takes = SWITCH  # raises for a value that it doesn't take
    keyword: str = ""  # ColossalAI's keyword for it, of an option in a group; empty: ColossalAI has none
    may_differ: bool = False  # ranks may choose different values


def option(default: T, text: str, check: Takes = SWITCH, *, keyword: str = "", may_differ: bool = False) -> T:
    """Return a dataclass field with a default and its ``About``."""
    return field(default=default, metadata={"about": About(text, check, keyword, may_differ)})


def abouts(group: Any) -> dict[str, About]:
    """Return the ``About`` of each option of a group by name; of ``ZeroOptions``, of those outside of groups."""
    return {each.name: each.metadata["about"] for each in fields(group) if "about" in each.metadata}


def entry(name: str, text: str) -> str:
    """Return one entry of a docstring's ``Args``, wrapped."""
    return textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent="    ", subsequent_indent=" " * 8)


def described(group: type[G]) -> type[G]:
    """Append the group's options to its docstring, and return the group; a class decorator."""
    lines = [entry(name, about.text) for name, about in abouts(group).items()]
    group.__doc__ = "\n".join([inspect.cleandoc(group.__doc__ or ""), "", "Args:", *lines])
    return group


@described
@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling, which is used if any parameter is fp16.

    An fp16 overflow skips the step. From the ``hysteresis``-th overflow since the scale last grew, each one shrinks it.
    Equal ``initial_scale``, ``min_scale`` and ``max_scale`` make the scale static.
    """

    initial_scale: float = option(2.0**16, "the loss scale of the first step.", _SCALE, keyword="initial_scale")
    min_scale: float = option(1.0, "the scale never shrinks below this.", _SCALE, keyword="min_scale")
    growth_factor: float = option(2.0, "multiply the scale by this to grow it.", _GROWTH, keyword="growth_factor")
    backoff_factor: float = option(0.5, "multiply the scale by this to shrink it.", _BACKOFF, keyword="backoff_factor")
    growth_interval: int = option(
        2000, "grow the scale after this many clean steps in a row.", _CLEAN_STEPS, keyword="growth_interval"
    )
    hysteresis: int = option(
        2, "shrink the scale after this many overflows since it last grew; 0 means 1.", _OVERFLOWS, keyword="hysteresis"
    )
    max_scale: float = option(2.0**24, "the scale never grows above this.", _SCALE, keyword="max_scale")
    max_skipped_steps: int = option(
        20, "raise after this many overflows in a row, once the scale is at its minimum; 0: never.", _STEPS
    )


@described
@dataclass(frozen=True)
class Communication:
    """Options of communication: buckets, dtypes, overlap, reduction."""

    bucket_size: int | None = option(
        None,
        "elements in a communication bucket; None: 40 * 2**20 on a GPU; on a CPU 2**20 through shared memory, else the "
        "larger of 2**22 and 2**21 times the ranks.",
        _ELEMENTS,
        keyword="reduce_bucket_size",
    )
    dtype: torch.dtype | None = option(
        None,
        "the dtype in which gradients are reduced; None: each parameter's own.",
        DTYPE,
        keyword="communication_dtype",
    )
    overlap_reductions: bool = option(True, "reduce gradients during backward.", keyword="overlap_communication")
    overlap_gathers: bool = option(
        False,
        "gather updated parameters while the next forward runs; reading a parameter waits for it.",
        keyword="overlap_allgather",
    )
    fp8: bool = option(
        False,
        f"send the gradients and updated values of parameters of {FP8_MIN_NUMEL} elements or more in fp8; sums and "
        "steps are in fp32.",
        keyword="fp8_communication",
    )
    hybrid_shard: bool = option(
        False,
        "with two process groups, shard over the inner one and replicate over the outer one; False: shard over both.",
    )
    own_communicator: bool = option(
        True,
        "on NCCL, reduce and gather over a communicator of their own, so that collectives of the model's backward "
        "can't pair up with reductions; False: use the process group's communicator.",
    )
    reduction: str = option("mean", 'average gradients over the ranks ("mean") or add them up ("sum").', _REDUCTION)
    gradient_predivide_factor: float = option(
        1.0,
        "divide gradients by this before the sum over the ranks, and the sum by world size / factor: the same average, "
        "from sums that stay in a 16-bit dtype's range (Horovod's and DeepSpeed's name).",
        _FACTOR,
    )
    reduce_scatter_with_fp32_accumulation: bool = option(
        False, "in stage 2, sum 16-bit gradients in fp32 also on NCCL, by an all-to-all (Megatron's name)."
    )
    pad_buckets_for_high_nccl_busbw: bool = option(
        False, "pad rows of more than 2**16 elements to a multiple of that (Megatron's name)."
    )

    def in_fp8(self, split: Split) -> bool:
        """Return whether a parameter travels in fp8: if ``fp8``, one of 2048 elements or more that ranks split."""
        return self.fp8 and split.owner is None and split.numel >= FP8_MIN_NUMEL and split.world_size > 1

    def factor_of_sums(self, world_size: int) -> float:
        """Return the factor that turns a sum of divided gradients into their mean or sum over the ranks."""
        return self.gradient_predivide_factor / (world_size if self.reduction == "mean" else 1)


@described
@dataclass(frozen=True)
class Diagnostics:
    """Options of diagnostics: logging, stalls, verification, infinite and NaN gradients."""

    verbose: bool = option(
        False,
        "log each skipped fp16 step, if any rank sets this. On a GPU the host then waits for the device in each step.",
        keyword="verbose",
        may_differ=True,
    )
    stall_timeout: float = option(
        60.0,
        "after waiting this many seconds, or 0.4 of the process group's timeout if that is less, log the collective "
        "and the missing ranks, once for each wait; 0: never.",
        _SECONDS,
    )
    verify_every: int = option(0, "call ``verify()`` after every ``verify_every`` steps; 0: never.", _STEPS)
    error_if_nonfinite: bool = option(
        False,
        "without fp16 parameters, raise instead of stepping if the gradient norm is inf or NaN; the host waits for it.",
    )


GROUPS: dict[str, type[LossScale] | type[Communication] | type[Diagnostics]] = {
    "loss_scale": LossScale,
    "communication": Communication,
    "diagnostics": Diagnostics,
}


@dataclass(frozen=True)
class ZeroOptions:
    """The checked options of one ``LowLevelZeroOptimizer``, which don't change after its construction."""

    stage: int = option(1, "1 shards the optimizer state, 2 the gradients too; ``partition_grad=True`` is 2.", _STAGE)
    clip_grad_norm: float = option(
        0.0,
        "clip gradients to this global L2 norm; 0: don't clip. If several optimizers train a model, each one clips its "
        "own gradients by their own norm: for one norm over all, call ``lowlevel_zero.clip_grad_norm_`` instead.",
        MAX_NORM,
    )
    cpu_offload: bool = option(
        False,
        "step on the host: fp32 masters, their gradients and the optimizer state are in host memory. Adam and AdamW "
        "use their fused kernels there, unless you made them with ``fused`` or ``foreach``.",
    )
    forced_dtype: torch.dtype | None = option(None, "convert the parameters to this dtype at construction.", DTYPE)
    master_weights: bool = option(True, "step fp32 copies of 16-bit parameters; False: step the 16-bit values.")
    backward_context: BackwardContext | None = option(
        None, "a callable that returns a context manager, in which backward runs.", _CONTEXT, may_differ=True
    )
    split: str | None = option(
        None,
        'how ranks share parameters. "elements": each rank steps a slice of every parameter; "parameters": one rank '
        'steps each parameter whole; "matrices": as many matrices of a stack `[E, m, n]` on each rank, where the ranks '
        'divide E, and other parameters whole. None: "elements" if the optimizer\'s class treats elements '
        'independently, "matrices" if it treats the matrices of stacks independently, "parameters" if it treats '
        'parameters independently. A param group\'s key "split" overrides this.',
        SPLIT,
    )
    cost: Cost | None = option(
        None,
        "for a split by parameters: a callable that returns the cost of a parameter's step, a number >= 0 in any unit. "
        "Owners are chosen so that the ranks' costs are about equal. None: the cost is the number of elements and, of "
        "matrices that the optimizer orthogonalises, also of operations, so that memory and work are balanced.",
        _COST,
        may_differ=True,
    )
    loss_scale: LossScale = LossScale()
    communication: Communication = Communication()
    diagnostics: Diagnostics = Diagnostics()

    def __post_init__(self) -> None:
        for path, value, about in self._all():
            about.check(path, value)
        scale = self.loss_scale
        if not scale.min_scale <= scale.initial_scale <= scale.max_scale:
            raise ValueError(
                "loss_scale: expected min_scale <= initial_scale <= max_scale, got "
                f"min_scale={scale.min_scale!r}, initial_scale={scale.initial_scale!r}, max_scale={scale.max_scale!r}"
            )
        if self.communication.reduce_scatter_with_fp32_accumulation and self.stage == 1:
            raise ValueError(
                "communication.reduce_scatter_with_fp32_accumulation=True: expected stage 2, which reduce-scatters, "
                "got stage 1, which all-reduces: pass stage=2 too, or leave it out"
            )

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return a master slice's dtype for a parameter's: fp32 at least, or itself without ``master_weights``."""
        return torch.promote_types(dtype, torch.float32) if self.master_weights else dtype

    def _all(self) -> Iterator[tuple[str, object, About]]:
        """Yield the path, such as ``communication.bucket_size``, the value and the ``About`` of each option."""
        for name, about in abouts(self).items():
            yield name, getattr(self, name), about
        for name, group in GROUPS.items():
            chosen = getattr(self, name)
            _check_type(name, chosen, group)
            for each, about in abouts(group).items():
                yield f"{name}.{each}", getattr(chosen, each), about

    def alike(self) -> Iterator[str]:
        """Yield ``path=value`` for each option whose value must be the same on all ranks."""
        for path, value, about in self._all():
            if not about.may_differ:
                yield f"{path}={value}"


def _check_type(name: str, group: object, expected: type) -> None:
    """Raise ``TypeError`` unless an option group is of its class."""
    if not isinstance(group, expected):
        raise TypeError(
            f"{name}: expected a lowlevel_zero.{expected.__name__}, got {type(group).__name__} {group!r:.80}: pass "
            f"{name}={expected.__name__}(...)"
        )


# ---- the keywords of ``LowLevelZeroOptimizer``, of which ColossalAI's fill fields of the groups ----


def options_of(keywords: Mapping[str, Any]) -> ZeroOptions:
    """Return the options that ``LowLevelZeroOptimizer``'s arguments, by name, choose; ignore other ``keywords``.

    Raises:
        TypeError, ValueError: a value is out of its range, or two arguments contradict each other.
    """
    own = {name: keywords[name] for name in abouts(ZeroOptions)}
    groups = {name: merged(name, keywords[name], keywords) for name in GROUPS}
    return ZeroOptions(**{**own, "stage": _stage_of(keywords["stage"], keywords["partition_grad"])}, **groups)


def _stage_of(stage: int | None, partition_grad: bool) -> int:
    """Return the stage that ``stage`` and ``partition_grad`` choose; raise if they contradict each other."""
    SWITCH("partition_grad", partition_grad)
    if stage is None:
        return 2 if partition_grad else 1
    _STAGE("stage", stage)
    if stage == 1 and partition_grad:
        raise ValueError("stage=1, partition_grad=True: expected one stage, got two: partition_grad=True is stage 2")
    return stage


def merged(name: str, given: Any, keywords: Mapping[str, Any]) -> Any:
    """Return the options ``given`` for a group, with ColossalAI's ``keywords`` filled in; raise if both choose one.

    ``name``: the group's own keyword, as in "communication". Each of the ``keywords`` is checked.
    """
    default = GROUPS[name]()
    known = {option: about for option, about in abouts(default).items() if about.keyword in keywords}
    for about in known.values():
        about.check(about.keyword, keywords[about.keyword])
    given = default if given is None else given
    _check_type(name, given, type(default))
    chosen: dict[str, Any] = {}
    for option, about in known.items():
        own, theirs, usual = keywords[about.keyword], getattr(given, option), getattr(default, option)
        if own == usual:
            continue
        about.check(f"{name}.{option}", theirs)
        if theirs != usual:
            raise ValueError(
                f"{about.keyword}={own!r}, {name}.{option}={theirs!r}: expected one of the two, which are one "
                "option, got both: leave one out"
            )
        chosen[option] = own
    return replace(given, **chosen)


def with_meanings(cls: type[T]) -> type[T]:
    """Return ``cls`` with the meanings of its constructor's options appended to its docstring; a class decorator."""
    known = {name: about.text for name, about in abouts(ZeroOptions).items()}
    for name, group in GROUPS.items():
        first, *_ = (group.__doc__ or "").partition("\n")
        known[name] = f"a ``lowlevel_zero.{group.__name__}``. {first}"
        for each, about in abouts(group).items():
            if about.keyword:
                known[about.keyword] = f"``{name}.{each}``: {about.text}"
    lines = [entry(name, known[name]) for name in inspect.signature(cls).parameters if name in known]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), *lines])
    return cls
