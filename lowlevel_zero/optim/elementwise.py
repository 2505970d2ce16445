"""Decides whether an optimizer may be stepped on slices of its parameters.

ZeRO hands every rank a flat slice of each parameter. That trains the same model only if the optimizer is
*elementwise*: an element's update follows from that element, its own gradients and the options alone; or if the ranks
step it together (``whole_steps.py``). Some classes are known by name; any other is probed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ..partition import ELEMENTWISE
from .overrides import check_overrides
from .probe import probe
from .quantised import check_unstepped, is_known
from .whole_steps import WHOLE_STEPS, check_matrices, full_name

# Elementwise classes of others, by their full names: they hold compiled kernels, which a probe can't make again.
_ELSEWHERE = {
    "colossalai.nn.optimizer.cpu_adam.CPUAdam",
    "colossalai.nn.optimizer.fused_adam.FusedAdam",
    "colossalai.nn.optimizer.fused_sgd.FusedSGD",
    "colossalai.nn.optimizer.hybrid_adam.HybridAdam",
}
# The base of all classes of bitsandbytes, whatever their states.
_32_BITS_TOO = "Optimizer8bit"


class _Refused(NamedTuple):
    """Classes that cannot be stepped on slices.

    Attributes:
        names: of the class, of its package or of one of its bases, in any case, matched whole.
        reason: why not.
        remedy: what to use instead.
        never: not even where the caller assumes that they can.
    """

    names: str
    reason: str
    remedy: str = "an elementwise optimizer, such as torch.optim.AdamW"
    never: bool = False


_REFUSED = (
    _Refused("lbfgs", "it needs a closure and takes inner products over the whole model", never=True),
    _Refused("sparseadam", "it needs sparse gradients, and slices of gradients are dense", never=True),
    _Refused(
        r"zeroredundancyoptimizer|lowlevelzerooptimizer|deepspeedzerooptimizer.*",
        "it shards its state itself: wrap the optimizer inside it instead",
        never=True,
    ),
    _Refused(
        r".*adafactor.*|came|sm3.*|adalomo",
        "it factors second moments of a matrix into those of rows and columns, and a slice ends inside a row",
    ),
    _Refused(
        r".*muon.*|.*scion|dion\d?",
        "it orthogonalises the update of a whole matrix",
        "torch.optim.Muon itself (torch 2.9 or later), which the ranks step together",
    ),
    _Refused(
        r".*(lamb|lars)(8bit|32bit)?|larc",
        "it scales an update by norms of the whole tensor",
        "lowlevel_zero.optim.Lamb, which the ranks step together",
    ),
    _Refused(r".*novograd.*|nero|fromage|adam_?mini|adahessian", "it keeps one second moment for many elements"),
    _Refused(r".*prodigy.*|dadapt.*|mechan(ic|ize).*", "it estimates its step size from sums over the whole model"),
    # A probe is too short to see these switch.
    _Refused("swats", "it switches to SGD late in a run, at a rate that it takes from inner products of whole tensors"),
    _Refused(
        r".*shampoo.*|soap.*|.*k_?fac.*|psgd.*|kron.*|adafisher.*",
        "it preconditions a matrix with statistics of its rows and columns",
    ),
    _Refused(
        r".*galore.*|apollo.*|.*lowrank.*",
        "it is GaLore or its like, which projects the gradient of a whole matrix to a low rank",
    ),
    _Refused(
        r".*(4bit|8bit|fp8).*",
        "it shares statistics within blocks of elements, which do not end where the slices end",
    ),
)


def check_steps_slices(
    optimizer: Optimizer, parameters: Sequence[Tensor], names: Mapping[Tensor, str], assume_elementwise: bool
) -> None:
    """Raise unless ``optimizer`` may be stepped on slices of ``parameters``, which are named in ``names``."""
    check_matrices(optimizer, parameters, names)
    check_unstepped(optimizer, parameters, names)
    check_overrides(optimizer, parameters, names)
    check_elementwise(optimizer, assume_elementwise=assume_elementwise)


def check_elementwise(optimizer: Optimizer, *, assume_elementwise: bool = False) -> None:
    """Return if ``optimizer`` may be stepped on flat slices of its parameters, raise if not.

    The classes of ``torch.optim`` are decided by name, and so are ColossalAI's, our own and known classes that are not
    elementwise; those whose steps the ranks can take together may be. All others, subclasses of torch's included, are
    probed: others of the class step small fresh parameters. ``optimizer``, its parameters, state, options and hooks
    stay as they are, and so do random number generators. The same optimizer gets the same answer on every rank.

    Args:
        optimizer: with parameters of any dtype and device; none is read.
        assume_elementwise: skip the names and the probe; the caller answers for it. LBFGS, SparseAdam,
            optimizers that shard their state themselves, and ``differentiable=True`` cannot work, and stay
            refused.

    Raises:
        TypeError: ``optimizer`` is no optimizer, is not elementwise, or could not be tried. The message says
            which optimizer, what was seen, and what to do.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    refused = _why_not(optimizer, assume_elementwise)
    if refused is not None:
        remedy = f"Use {refused.remedy}"
        if not refused.never:
            remedy += (
                ", or pass assume_elementwise=True if you know that an element's update depends on that element "
                "and its own gradients alone, or accept that this optimizer trains differently on slices"
            )
        name = full_name(optimizer)
        raise TypeError(f"{name} cannot be stepped on slices of its parameters: {refused.reason}. {remedy}.")


def _why_not(optimizer: Optimizer, assume_elementwise: bool) -> _Refused | None:
    listed = _listed(optimizer)
    if listed is not None and listed.never:
        return listed
    if any(group.get("differentiable") for group in optimizer.param_groups):
        reason = "it is differentiable=True, and no autograd graph leads from its slices to the model"
        return _Refused("", reason, never=True)
    known = type(optimizer) in ELEMENTWISE or full_name(optimizer) in _ELSEWHERE | WHOLE_STEPS.keys()
    if assume_elementwise or known or is_known(optimizer):
        return None
    difference = None if listed else probe(optimizer)
    return listed if difference is None else _Refused("", difference)


def _listed(optimizer: Optimizer) -> _Refused | None:
    """The entry that a class is in, by its name or the name of one of its bases."""
    for cls, entry in itertools.product(type(optimizer).__mro__, _REFUSED):
        if cls.__name__ == _32_BITS_TOO:
            continue
        package = cls.__module__.partition(".")[0]
        if any(re.fullmatch(entry.names, name, re.IGNORECASE) for name in (cls.__name__, package)):
            inherited = f"it is a {cls.__name__}, and {entry.reason}"
            return entry if cls is type(optimizer) else entry._replace(reason=inherited)
    return None
