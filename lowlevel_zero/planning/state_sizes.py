"""The size of an optimizer's state, which another optimizer of its class shows by a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from ..layout.held import state_tensors
from ..optim.probe import NoProbe, first_states
from ..optim.quantised import block_size
from ..partition import ELEMENTWISE

# An optimizer, or what makes one of parameters (a class, a partial), or the name of one of torch's.
Maker: TypeAlias = Callable[[Any], Optimizer]
OptimizerLike: TypeAlias = str | Optimizer | Maker

_MAKERS: dict[str, Maker] = {
    **{known.__name__.lower(): known for known in ELEMENTWISE},
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
NAMES = tuple(_MAKERS)

_MOST = 2**16  # elements of a slice that is stepped, unless it is to end in a block; small ones may have other states
_MORE = 97  # of another one, or so many blocks


def made_optimizer(optimizer: OptimizerLike) -> tuple[Optimizer, Maker | None]:
    """Return an optimizer, made by its class, a function or its name if need be, and what makes another of parameters.

    Raises:
        TypeError: it is none of these.
        ValueError: a name that isn't known, or one that can't be made.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer, None
    make = _MAKERS.get(optimizer.lower()) if isinstance(optimizer, str) else optimizer
    if make is None:
        raise ValueError(f"optimizer: expected one of {', '.join(NAMES)}, got {optimizer!r}")
    if not callable(make):
        raise TypeError(f"optimizer: expected an optimizer, its class or one of {', '.join(NAMES)}, got {optimizer!r}")
    try:
        made = make([nn.Parameter(torch.zeros(_MORE, device="cpu"))])
    except Exception as error:  # whatever another's class raises
        raise ValueError(
            f"optimizer: {optimizer!r} could not be made of parameters alone ({error}): pass an optimizer, or a "
            "function of the parameters that returns one"
        ) from error
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"optimizer: expected {optimizer!r} to return a torch.optim.Optimizer, got {type(made).__name__}"
        )
    return made, make


def state_bytes(optimizer: Optimizer, make: Maker | None, dtype: torch.dtype, numel: int) -> list[int]:
    """Return the bytes of a ``dtype`` slice's state, of ``numel`` elements, in each of the optimizer's param groups.

    Two of its size, or smaller, are stepped: what they differ by is per element, the rest per parameter. They end in a
    block of elements where the slice does, since an 8-bit optimizer quantises the states of some sizes alone.

    Raises:
        ValueError: no other optimizer of the class can be made.
    """
    block = block_size(optimizer)
    tried, more = min(numel, _MOST + numel % block), _MORE * block
    try:
        states, larger = (first_states(optimizer, count, dtype, make) for count in (tried, tried + more))
    except NoProbe as failure:
        kind = type(optimizer).__name__
        raise ValueError(
            f"optimizer: the state of {kind} can't be found out ({failure}): pass a function of the parameters that "
            "returns one"
        ) from failure
    sizes = ((_size(state), _size(other)) for state, other in zip(states, larger, strict=True))
    return [size + (other - size) * (numel - tried) // more for size, other in sizes]


def _size(state: Mapping[str, Any]) -> int:
    """Return the bytes of one parameter's state, without bitsandbytes' tables, which parameters share."""
    own = {key: value for key, value in state.items() if not key.startswith("qmap")}
    return sum(tensor.nbytes for tensor in state_tensors(own))
