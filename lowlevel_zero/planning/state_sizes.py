"""How large an optimizer's state is, found out by letting a throwaway one step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim.probe import NoProbe, first_states
from ..partition import ELEMENTWISE

# An optimizer, or what makes one of parameters (a class, a partial), or the name of one of torch's.
OptimizerLike: TypeAlias = str | Optimizer | Callable[[Any], Optimizer]

_MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    **{known.__name__.lower(): known for known in ELEMENTWISE},
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
NAMES = tuple(_MAKERS)

_TRIED = 97  # elements of the parameter that is stepped: no other number that a state might have


class StateSize(NamedTuple):
    """Bytes of the state that one parameter gets in its first step.

    Attributes:
        per_element: of what has one number an element, as moments have.
        per_parameter: of all else, as a step counter.
    """

    per_element: int
    per_parameter: int

    def of(self, numel: int) -> int:
        """Bytes of a slice of so many elements."""
        return numel * self.per_element + self.per_parameter


def state_sizes(optimizer: OptimizerLike, dtype: torch.dtype) -> list[StateSize]:
    """The size of the state of a ``dtype`` parameter in each of the optimizer's param groups.

    Args:
        optimizer: one of any class, over any parameters, or none yet (it stays as it is); or what makes one,
            called with a list of parameters; or a name, one of ``NAMES`` (of which ``sgd`` is without momentum).

    Raises:
        TypeError: ``optimizer`` is none of these.
        ValueError: a name that isn't known, or an optimizer that can't be tried.
    """
    made = optimizer if isinstance(optimizer, Optimizer) else _made(optimizer, dtype)
    try:
        return [_size(state) for state in first_states(made, _TRIED, dtype)]
    except NoProbe as failure:
        raise ValueError(f"optimizer: the state of {type(made).__name__} can't be found out: {failure}") from failure


def _made(maker: object, dtype: torch.dtype) -> Optimizer:
    make = _MAKERS.get(maker.lower()) if isinstance(maker, str) else maker
    if make is None:
        raise ValueError(f"optimizer: expected one of {', '.join(NAMES)}, got {maker!r}")
    if not callable(make):
        raise TypeError(f"optimizer: expected an optimizer, its class or one of {', '.join(NAMES)}, got {maker!r}")
    try:
        made = make([nn.Parameter(torch.zeros(_TRIED, dtype=dtype, device="cpu"))])
    except Exception as error:  # whatever another's class raises
        raise ValueError(
            f"optimizer: {maker!r} could not be made of parameters alone ({error}): pass an optimizer, or a function "
            "of the parameters that returns one"
        ) from error
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer: expected {maker!r} to return a torch.optim.Optimizer, got {type(made).__name__}")
    return made


def _size(state: dict[str, Any]) -> StateSize:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    by_element = [tensor for tensor in tensors if tensor.numel() == _TRIED]
    others = sum(tensor.nbytes for tensor in tensors) - sum(tensor.nbytes for tensor in by_element)
    return StateSize(sum(tensor.element_size() for tensor in by_element), others)
