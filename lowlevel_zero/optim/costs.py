"""Costs: measures of a parameter that decide which rank owns it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..options import Cost, Takes
from ..partition import Costs

# Classes, or packages, that orthogonalise the updates of matrices.
ORTHOGONALISING = r".*muon.*|.*scion|dion\d?"
# The key of a param group that says whether Muon steps it; an elementwise rule steps the others (Jordan's name).
_USES_MUON = "use_muon"
_NEWTON_SCHULZ_STEPS = 5
_COST = Takes("a finite number >= 0", (int, float), lambda cost: 0 <= cost < math.inf)


def orthogonalises(optimizer: Optimizer) -> bool:
    """Return whether the name of the optimizer's class, a base or a package says that it orthogonalises updates."""
    names = ((cls.__name__, cls.__module__.partition(".")[0]) for cls in type(optimizer).__mro__)
    return any(re.fullmatch(ORTHOGONALISING, name, re.IGNORECASE) for both in names for name in both)


def costs_of(optimizer: Optimizer, group: Mapping[str, Any], p: Tensor, name: str, given: Cost | None) -> Costs:
    """Return ``(given(p),)``, or else the estimated cost of a parameter's step and its number of elements.

    ``group`` has the settings of its param group. Its values aren't looked at.

    Raises:
        TypeError, ValueError: ``given`` returns anything but a finite number >= 0.
    """
    if given is not None:
        cost = given(p)
        _COST(f"cost of {name}", cost)
        return (cost,)
    if orthogonalises(optimizer) and group.get(_USES_MUON, True):
        return _operations(p.shape), p.numel()
    return p.numel(), p.numel()


def _operations(shape: tuple[int, ...]) -> int:
    """Return the number of multiplications in Newton-Schulz for a tensor of ``shape``; its elements if below 2-D.

    A tensor of three dimensions is a stack of matrices. One of more is a matrix with a row for each first index.
    """
    if len(shape) < 2:
        return math.prod(shape)
    stack, rows, columns = shape if len(shape) == 3 else (1, shape[0], math.prod(shape[1:]))
    least, most = sorted((rows, columns))
    return stack * _NEWTON_SCHULZ_STEPS * least * least * (2 * most + least)
