"""The size of an optimizer's state, which another optimizer of its class shows by a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..bookkeeping.storages import tensors_in
from ..optim.quantised import block_size
from ..optim.trials import states_of_shape
from ..optim.twins import NoProbe
from ..partition import ELEMENTWISE

# An optimizer, or what makes one of parameters (a class, a partial), or the name of one of torch's.
Maker: TypeAlias = Callable[[Any], Optimizer]
OptimizerLike: TypeAlias = str | Optimizer | Maker

_MAKERS: dict[str, Maker] = {
    **{known.__name__.lower(): known for known in ELEMENTWISE},
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
NAMES = tuple(_MAKERS)

_MOST = 2**16  # elements of a slice that an 8-bit optimizer steps, beside those that are left of a block
_MORE = 97  # elements, or blocks, by which the larger slice is larger
# Sides of small matrices: six of them determine the six terms of a size.
_SIDES = ((16, 16), (24, 16), (32, 16), (16, 24), (16, 32), (24, 24))


def made_optimizer(optimizer: OptimizerLike) -> tuple[Optimizer, Maker | None]:
    """Return a given optimizer and None; else one made over a small parameter, and the function that makes others.

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
    error = None
    for shape in ((_MORE,), _SIDES[0]):  # some classes take matrices alone
        try:
            made = make([nn.Parameter(torch.zeros(shape, device="cpu"))])
        except Exception as raised:  # whatever another's class raises
            error = error or raised
            continue
        if isinstance(made, Optimizer):
            return made, make
        raise TypeError(
            f"optimizer: expected {optimizer!r} to return a torch.optim.Optimizer, got {type(made).__name__}: pass a "
            "function that returns one"
        )
    raise ValueError(
        f"optimizer: {optimizer!r} could not be made of parameters alone ({error}): pass an optimizer, or a function "
        "of the parameters that returns one"
    ) from error


class StateSizes:
    """The bytes of the states that an optimizer keeps, as a step of others of its class shows.

    The optimizer stays as it is. ``make`` returns another one over given parameters; None: the class is called.
    """

    def __init__(self, optimizer: Optimizer, make: Maker | None) -> None:
        self.optimizer = optimizer
        self._make = make
        self._block = block_size(optimizer)
        self._known: dict[tuple[torch.dtype, tuple[int, ...]], list[int]] = {}

    def of_slice(self, dtype: torch.dtype, numel: int) -> list[int]:
        """Return the bytes of the state of a flat slice in each param group.

        Two slices are stepped, and their difference is what an element takes. An 8-bit optimizer quantises the states
        of some sizes alone: there the two are of the slice's size, or smaller, and end in a block of elements where it
        does.

        Raises:
            ValueError: no other optimizer of the class can be made.
        """
        block = self._block
        tried, more = _MORE if block == 1 else min(numel, _MOST + numel % block), _MORE * block
        sizes, larger = self._of_shape(dtype, (tried,)), self._of_shape(dtype, (tried + more,))
        return [size + (other - size) * (numel - tried) // more for size, other in zip(sizes, larger, strict=True)]

    def of_parameter(self, dtype: torch.dtype, shape: torch.Size) -> list[int]:
        """Return the bytes of the state of a whole parameter in each param group; raise as ``of_slice``.

        The state of a large matrix follows from those of small ones: an optimizer keeps tensors of the matrix' shape,
        of its rows or columns, or squares of them.
        """
        if len(shape) < 2:
            return self.of_slice(dtype, shape.numel())
        if shape.numel() <= _MOST:
            return self._of_shape(dtype, tuple(shape))
        small = [self._of_shape(dtype, (first, *shape[1:-1], last)) for first, last in _SIDES]
        per_term = torch.linalg.solve(_terms(_SIDES), torch.tensor(small, dtype=torch.float64, device="cpu"))
        sizes: list[float] = (_terms([(shape[0], shape[-1])]) @ per_term)[0].tolist()
        return [round(size) for size in sizes]

    def _of_shape(self, dtype: torch.dtype, shape: tuple[int, ...]) -> list[int]:
        """Return the bytes of the state of a parameter of this ``shape`` in each param group."""
        if (dtype, shape) not in self._known:
            try:
                states = states_of_shape(self.optimizer, shape, dtype, self._make)
            except NoProbe as failure:
                if len(shape) == 1:  # some classes take matrices alone
                    return self._of_shape(dtype, (1, *shape))
                raise ValueError(
                    f"optimizer: the state of {type(self.optimizer).__name__} can't be found out ({failure}): pass a "
                    "function of the parameters that returns one"
                ) from failure
            self._known[dtype, shape] = [_size(state) for state in states]
        return self._known[dtype, shape]


def _terms(sides: Sequence[tuple[int, int]]) -> Tensor:
    """Return a row for each pair of sides: 1, each side, their product, and each side's square."""
    rows = [(1, first, last, first * last, first * first, last * last) for first, last in sides]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def _size(state: Mapping[str, Any]) -> int:
    """Return the bytes of one parameter's state, without bitsandbytes' tables, which parameters share."""
    own = {key: value for key, value in state.items() if not key.startswith("qmap")}
    return sum(tensor.nbytes for tensor in tensors_in(own))
