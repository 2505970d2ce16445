"""Chooses how an optimizer's parameters are split between the ranks: by elements, or by parameters.

By elements every rank steps a flat slice of each parameter. That trains the same model only if the optimizer is
*elementwise*: an element's update follows from that element, its own gradients and the options alone. By parameters one
rank steps a parameter whole. That trains the same model if the update of a parameter follows from that parameter alone.
Some classes are known by name; any other is probed.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..options import SPLIT, Cost, ZeroOptions
from ..partition import BY_ELEMENTS, BY_MATRICES, BY_PARAMETERS, ELEMENTWISE, Choice
from .costs import ORTHOGONALISING, costs_of
from .overrides import check_overrides
from .own_lists import check_no_list_of_its_own
from .probe import probe_elements, probe_matrices, probe_parameters
from .quantised import check_unstepped, is_known
from .trials import full_name, step_is_replaced, writes_without_gradients

# Elementwise classes of others, by their full names: they hold compiled kernels, which a probe can't make again.
_ELSEWHERE = {
    "apex.optimizers.fused_adam.FusedAdam",
    "colossalai.nn.optimizer.cpu_adam.CPUAdam",
    "colossalai.nn.optimizer.fused_adam.FusedAdam",
    "colossalai.nn.optimizer.fused_sgd.FusedSGD",
    "colossalai.nn.optimizer.hybrid_adam.HybridAdam",
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
    "deepspeed.ops.adam.fused_adam.FusedAdam",
}
STACK_DIMS = 3  # of a stack of matrices
# The base of all classes of bitsandbytes, whatever their states.
_32_BITS_TOO = "Optimizer8bit"


class _Listed(NamedTuple):
    """An entry for classes that aren't elementwise."""

    names: str  # of the class, of its package or of one of its bases, in any case, matched whole
    reason: str  # why not
    remedy: str = "an optimizer that steps each parameter by itself, such as torch.optim.AdamW"  # where no split helps
    by_parameters: bool = True  # a rank may own parameters whole, if a probe agrees
    never: bool = False  # refused even if the caller chooses a split


_LISTED = (
    _Listed("lbfgs", "it needs a closure and takes inner products over the whole model", never=True),
    _Listed("sparseadam", "it needs sparse gradients, and reduced gradients are dense", never=True),
    _Listed(
        r"zeroredundancyoptimizer|lowlevelzerooptimizer|deepspeedzerooptimizer.*",
        "it shards its state itself: wrap the optimizer inside it instead",
        never=True,
    ),
    _Listed(r"adahessian|sophiah", "it differentiates gradients, and reduced ones have no graph", never=True),
    _Listed(
        r".*prodigy.*|dadapt.*|mechan(ic|ize).*",
        "it estimates its step size from sums over the whole model",
        by_parameters=False,
    ),
    # Decay is so small that a probe hardly sees it.
    _Listed("adams", "it divides weight decay by a mean over the whole model", by_parameters=False),
    # A probe is too short to see it switch.
    _Listed("swats", "it switches all parameters to SGD late in a run, at a rate taken from them", by_parameters=False),
    _Listed(
        r".*adafactor.*|came|sm3.*|adalomo",
        "it factors second moments of a matrix into those of rows and columns, and a slice ends inside a row",
    ),
    _Listed(ORTHOGONALISING, "it orthogonalises the update of a whole matrix"),
    _Listed(r".*(lamb|lars)(8bit|32bit)?|larc", "it scales an update by norms of the whole tensor"),
    _Listed(r".*novograd.*|nero|fromage|adam_?mini", "it keeps one second moment for many elements"),
    _Listed(
        r".*shampoo.*|soap.*|.*k_?fac.*|psgd.*|kron.*|adafisher.*",
        "it preconditions a matrix with statistics of its rows and columns",
    ),
    _Listed(
        r".*galore.*|apollo.*|.*lowrank.*",
        "it is GaLore or its like, which projects the gradient of a whole matrix to a low rank",
    ),
    _Listed(
        r".*(4bit|8bit|fp8).*",
        "it shares statistics within blocks of elements, which do not end where the slices end",
    ),
)


def check_and_choose(
    optimizer: Optimizer, parameters: Sequence[Tensor], names: Mapping[Tensor, str], options: ZeroOptions
) -> dict[Tensor, Choice]:
    """Return the split chosen for each parameter; raise if ``optimizer``, or its state or override, can't be split."""
    if not parameters:  # a class may take no group without any
        return {}
    dtypes = of_16_bits(options.master_dtype(options.forced_dtype or p.dtype) for p in parameters)
    splits = choose_splits(optimizer, options.split, parameters, dtypes)
    check_unstepped(optimizer, parameters, names)
    check_overrides(optimizer, parameters, names)
    wanted = set(parameters)
    return {
        p: choice_of(optimizer, group, by, p, names[p], options.cost)
        for group, by in zip(optimizer.param_groups, splits, strict=True)
        for p in group["params"]
        if p in wanted
    }


def of_16_bits(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Return the distinct 16-bit dtypes among ``dtypes``, sorted by name."""
    return sorted({dtype for dtype in dtypes if dtype.itemsize == 2}, key=str)


def choice_of(
    optimizer: Optimizer, group: Mapping[str, Any], by: str, p: Tensor, name: str, cost: Cost | None
) -> Choice:
    """Return a parameter's ``Choice``: its elements, ``by``, costs unless by elements, and the shape of a stack."""
    costs = costs_of(optimizer, group, p, name, cost) if by != BY_ELEMENTS else ()
    is_stack = by == BY_MATRICES and p.dim() == STACK_DIMS and p.numel() > 0
    in_order = is_stack and (len(p) == 1 or p.stride(0) * len(p) == p.numel())  # one matrix behind the other in memory
    return Choice(p.numel(), by, costs, stack=tuple(p.shape) if in_order else ())


def choose_splits(
    optimizer: Optimizer,
    chosen: str | None = None,
    parameters: Sequence[Tensor] | None = None,
    dtypes: Collection[torch.dtype] = (),
) -> list[str]:
    """Return how to split each param group, by a name of ``partition.py``; raise ``TypeError`` if none is exact.

    A group's own key ``"split"`` comes first, then what is ``chosen`` for all, then what is known of the class or shown
    by a probe, in which others of the class step small fresh parameters. ``optimizer`` and random number generators
    stay as they are. (What a class counts for all of its instances goes on.) All ranks get the same answer.
    ``parameters`` are those that are to be stepped: by default the groups'. ``dtypes`` are the 16-bit ones that are to
    be stepped.

    Raises:
        TypeError: ``optimizer`` treats neither elements nor parameters independently, keeps a list of parameters, or
            could not be tried. The message says which optimizer, what was seen, and what to do.
        ValueError: a group's ``"split"`` is something else.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    asked = [group.get("split", chosen) for group in optimizer.param_groups]
    for at, split in enumerate(asked):
        SPLIT(f"split of param group {at}", split)
    listed = _listed(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        listed = _Listed("", "it is differentiable=True, and no autograd graph leads to the model", never=True)
    if listed is None or not listed.never:
        listed = _listed_by_methods(optimizer) or listed
    if listed is not None and listed.never:
        raise TypeError(f"{full_name(optimizer)} cannot be sharded: {listed.reason}. Use {listed.remedy}.")
    if parameters is None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    check_no_list_of_its_own(optimizer, parameters)  # a probe would find what depends on it, and not tell why
    found = _found(optimizer, listed, parameters, dtypes) if None in asked else ""
    stacks = _stacks(parameters) if BY_MATRICES in asked and not is_elementwise(optimizer) else []
    apart = probe_matrices(optimizer, stacks) if stacks else None
    if apart is not None:
        raise TypeError(
            f"split={BY_MATRICES!r}: expected an optimizer that steps each matrix of a stack by itself, got "
            f"{full_name(optimizer)}: {apart}. Use split={BY_PARAMETERS!r}"
        )
    return [split or found for split in asked]


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the class is known as elementwise and to skip unused parameters, and ``step`` isn't replaced."""
    if step_is_replaced(optimizer):
        return False
    return type(optimizer) in ELEMENTWISE or full_name(optimizer) in _ELSEWHERE or is_known(optimizer)


def may_write_unused(optimizer: Optimizer) -> bool:
    """Return whether steps may write parameters without gradients, as known or tried; True if ``step`` is replaced."""
    if step_is_replaced(optimizer):
        return True
    skips = is_elementwise(optimizer) or type(optimizer).__module__.startswith("torch.optim")
    return not skips and writes_without_gradients(optimizer)


def _stacks(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.dim() == STACK_DIMS]


def _found(
    optimizer: Optimizer, listed: _Listed | None, parameters: Sequence[Tensor], dtypes: Collection[torch.dtype]
) -> str:
    """Return the split that an optimizer's class needs, by name or by probes; raise ``TypeError`` if neither fits."""
    if is_elementwise(optimizer):
        return BY_ELEMENTS
    by_elements = listed.reason if listed else probe_elements(optimizer, parameters, dtypes)
    if by_elements is None:
        return BY_ELEMENTS
    refused = listed is not None and not listed.by_parameters
    by_parameters = by_elements if refused else probe_parameters(optimizer, parameters, dtypes)
    if by_parameters is None:
        stacks = _stacks(parameters)
        return BY_MATRICES if stacks and probe_matrices(optimizer, stacks) is None else BY_PARAMETERS
    both = by_elements if refused else f"{by_elements}; and of whole parameters that ranks own, {by_parameters}"
    remedy = listed.remedy if listed else _Listed("", "").remedy
    raise TypeError(
        f"{full_name(optimizer)} cannot be sharded: {both}. Use {remedy}, or pass split='elements' or "
        "split='parameters' if you know that it steps each element, or each parameter, by itself, or accept that it "
        "trains differently"
    )


def _listed_by_methods(optimizer: Optimizer) -> _Listed | None:
    """Return an entry if ``step`` is replaced or needs a closure, or a wrapped optimizer has the states; else None.

    An instance whose step was replaced may be sharded if the caller chooses its split.
    """
    if step_is_replaced(optimizer):
        reason = "its step was replaced on the instance, where a trial can't see it"
        return _Listed("", reason, "a subclass with that step", by_parameters=False)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        reason = "its step needs a closure, which may run backwards whose gradients aren't summed over the ranks"
        return _Listed("", reason, never=True)
    wrapped = next((each for each in vars(optimizer).values() if isinstance(each, Optimizer)), None)
    own = type(optimizer).state_dict is not Optimizer.state_dict
    if own and wrapped is not None and wrapped.state is not optimizer.state:
        reason = f"it wraps another optimizer, {type(wrapped).__name__}, whose states its own state dict alone has"
        return _Listed("", reason, never=True)
    return None


def _listed(optimizer: Optimizer) -> _Listed | None:
    """Return the list's entry for a class, found by the name of the class, of its package or of a base; None: none."""
    for cls, entry in itertools.product(type(optimizer).__mro__, _LISTED):
        if cls.__name__ == _32_BITS_TOO:
            continue
        package = cls.__module__.partition(".")[0]
        if any(re.fullmatch(entry.names, name, re.IGNORECASE) for name in (cls.__name__, package)):
            inherited = f"it is a {cls.__name__}, and {entry.reason}"
            return entry if cls is type(optimizer) else entry._replace(reason=inherited)
    return None
