"""Decides whether an optimizer may be stepped on slices of its parameters.

ZeRO hands every rank a flat slice of each parameter. That trains the same model only if the optimizer is
*elementwise*: an element's update follows from that element, its own gradients and the options alone; or if the ranks
step it together. Some classes are known by name; any other is tried.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .trial import NoTrial, try_on_slices

_ELEMENTWISE_NAMES = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
_ELEMENTWISE = {getattr(torch.optim, name) for name in _ELEMENTWISE_NAMES if hasattr(torch.optim, name)}

# Classes of others, by their full names: they hold compiled kernels, which a trial can't copy or make again.
_ELSEWHERE = {
    "colossalai.nn.optimizer.cpu_adam.CPUAdam",
    "colossalai.nn.optimizer.fused_adam.FusedAdam",
    "colossalai.nn.optimizer.fused_sgd.FusedSGD",
    "colossalai.nn.optimizer.hybrid_adam.HybridAdam",
}

MUON = "torch.optim.Muon"  # torch 2.9 and later

# Classes that aren't, but whose steps the ranks take together: whole_steps.py says how.
TOGETHER = {MUON, "lowlevel_zero.optim.lamb.Lamb", "colossalai.nn.optimizer.lamb.Lamb"}

_FACTORED = "it factors second moments of a matrix into those of rows and columns, and a slice ends inside a row"
_ORTHOGONAL = "it orthogonalises the update of a whole matrix"
_TRUST_RATIO = "it scales an update by norms of the whole tensor"
_WHOLE_MODEL = "it estimates its step size from sums over the whole model"
_PRECONDITIONED = "it preconditions a matrix with statistics of its rows and columns"
_LOW_RANK = "it projects the gradient of a whole matrix to a low rank"
_BLOCKWISE = "it shares statistics within blocks of elements, which do not end where the slices end"
_SHARDED = "it shards its state itself: wrap the optimizer inside it instead"

_ANY_OTHER = "an elementwise optimizer, such as torch.optim.AdamW"


class _Refused(NamedTuple):
    """Classes that cannot be stepped on slices.

    Attributes:
        names: of the class or of one of its bases, in any case, matched whole.
        reason: why not.
        remedy: what to use instead.
    """

    names: str
    reason: str
    remedy: str = _ANY_OTHER


_NEVER = (
    _Refused(r"lbfgs", "it needs a closure and takes inner products over the whole model"),
    _Refused(r"sparseadam", "it needs sparse gradients, and slices of gradients are dense"),
    _Refused(r"zeroredundancyoptimizer|lowlevelzerooptimizer|deepspeedzerooptimizer.*", _SHARDED),
)
_NOT_ELEMENTWISE = (
    _Refused(r".*adafactor.*|came|sm3.*|adalomo", _FACTORED),
    _Refused(
        r".*muon.*|.*scion|dion\d?",
        _ORTHOGONAL,
        "torch.optim.Muon itself (torch 2.9 or later), which the ranks step together",
    ),
    _Refused(
        r".*(lamb|lars)(8bit|32bit)?|larc",
        _TRUST_RATIO,
        "lowlevel_zero.optim.Lamb, which the ranks step together",
    ),
    _Refused(r".*novograd.*|nero|fromage|adam_?mini|adahessian", "it keeps one second moment for many elements"),
    _Refused(r".*prodigy.*|dadapt.*", _WHOLE_MODEL),
    _Refused(r".*shampoo.*|soap.*|.*k_?fac.*|psgd.*|kron.*|adafisher.*", _PRECONDITIONED),
    _Refused(r".*galore.*|apollo.*|.*lowrank.*", _LOW_RANK),
    _Refused(r".*(4bit|8bit|fp8).*", _BLOCKWISE),
)


def check_elementwise(optimizer: Optimizer, *, assume_elementwise: bool = False) -> None:
    """Return if ``optimizer`` may be stepped on flat slices of its parameters, raise if not.

    The classes of ``torch.optim`` are decided by name, and so are ColossalAI's, our own and known classes that are not
    elementwise; those whose steps the ranks can take together may be. All others, subclasses of torch's included, are
    tried on twins with the same options. ``optimizer``, its parameters, state, options and hooks stay as they are, and
    only small tensors of it are copied. Random number generators stay as they are, too. The same optimizer gets the
    same answer on every rank.

    Args:
        optimizer: with parameters of any dtype and device; none is read. A trial is in fp32 and runs on the
            CPU, or on the parameters' own device if the class does not work there.
        assume_elementwise: skip the names and the trial; the caller answers for it. LBFGS, SparseAdam,
            optimizers that shard their state themselves, and ``differentiable=True`` cannot work, and stay
            refused.

    Raises:
        TypeError: ``optimizer`` is no optimizer, is not elementwise, or could not be tried. The message says
            which optimizer, what was seen, and what to do.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    _refuse_what_never_works(optimizer)
    if assume_elementwise or type(optimizer) in _ELEMENTWISE or full_name(optimizer) in _ELSEWHERE | TOGETHER:
        return
    listed = _listed(optimizer, _NOT_ELEMENTWISE)
    if listed is not None:
        raise TypeError(_refusal(optimizer, listed.reason, listed.remedy))
    _refuse_what_a_trial_refutes(optimizer)


def _refuse_what_never_works(optimizer: Optimizer) -> None:
    listed = _listed(optimizer, _NEVER)
    reason = None if listed is None else listed.reason
    if reason is None and any(group.get("differentiable") for group in optimizer.param_groups):
        reason = "it is differentiable=True, and no autograd graph leads from its slices to the model"
    if reason is not None:
        raise TypeError(_refusal(optimizer, reason, can_assume=False))


def _refuse_what_a_trial_refutes(optimizer: Optimizer) -> None:
    try:
        difference = try_on_slices(optimizer)
    except NoTrial as failure:
        raise TypeError(_refusal(optimizer, f"it could not be tried ({failure})")) from failure
    if difference is not None:
        raise TypeError(_refusal(optimizer, difference))


def _listed(optimizer: Optimizer, table: tuple[_Refused, ...]) -> _Refused | None:
    """The entry that a class is in, by its name or the name of one of its bases."""
    for cls, entry in itertools.product(type(optimizer).__mro__, table):
        if re.fullmatch(entry.names, cls.__name__, re.IGNORECASE):
            inherited = f"it is a {cls.__name__}, and {entry.reason}"
            return entry if cls is type(optimizer) else entry._replace(reason=inherited)
    return None


def _refusal(optimizer: Optimizer, reason: str, remedy: str = _ANY_OTHER, *, can_assume: bool = True) -> str:
    remedy = f"Use {remedy}"
    if can_assume:
        remedy += (
            ", or pass assume_elementwise=True if you know that an element's update depends on that element "
            "and its own gradients alone, or accept that this optimizer trains differently on slices"
        )
    return f"{full_name(optimizer)} cannot be stepped on slices of its parameters: {reason}. {remedy}."


def check_matrices(optimizer: Optimizer, parameters: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
    """Raise if ``optimizer`` steps matrices alone, for the first parameter that isn't one."""
    others = [p for p in parameters if p.dim() != 2]
    if others and full_name(optimizer) == MUON:
        raise ValueError(
            f"{names[others[0]]}: expected a matrix, which Muon steps, got shape {tuple(others[0].shape)}: "
            "give what isn't one to an optimizer of its own, such as torch.optim.AdamW"
        )


def full_name(optimizer: Optimizer) -> str:
    """Of its class, with the module, but for private ones: torch moves its classes out of them."""
    cls = type(optimizer)
    return re.sub(r"\._[a-z]\w*\.", ".", f"{cls.__module__}.{cls.__qualname__}")
