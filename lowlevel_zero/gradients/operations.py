"""The kind of each torch operator on ``p.grad``, derived from its schema and tags, and its performer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..bookkeeping.sharded_parameter import Handle

_aten = torch.ops.aten

Args: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
# It is called with an operator and its arguments.
Performer: TypeAlias = Callable[[Any, Args, Keywords], Any]


class Kind(Enum):
    """The way in which an operator treats a sharded gradient among its arguments."""

    NORM = "takes the norm of a tensor, or of each in a list"
    SCALE = "multiplies or divides a tensor, or each in a list"
    ZERO = "makes a tensor, or each in a list, zeros"
    DETACH = "gives the same values without a graph"
    DETACH_IN_PLACE = "drops a graph"
    VIEW = "gives other views of a tensor's memory"
    LIKE = "makes a new tensor of its shape, dtype or device"
    ELEMENTS = "writes each element of its first argument by itself"
    WRITE = "writes to arguments"
    READ = "reads arguments"
    MEMORY = "changes the shape or the memory of a tensor in place"
    COLLECTIVE = "sends tensors to other ranks"
    SCALER = "is GradScaler's look for overflows"


_NAMED: dict[Any, Kind] = {
    _aten.linalg_vector_norm.default: Kind.NORM,
    _aten._foreach_norm.Scalar: Kind.NORM,
    _aten.zero_.default: Kind.ZERO,
    _aten._foreach_zero_.default: Kind.ZERO,
    _aten.detach.default: Kind.DETACH,
    _aten.detach_.default: Kind.DETACH_IN_PLACE,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: Kind.SCALER,
}
for _in_place in (_aten.mul_, _aten.div_, _aten._foreach_mul_, _aten._foreach_div_):
    _NAMED |= {_in_place.Scalar: Kind.SCALE, _in_place.Tensor: Kind.SCALE}
# Operators that write each element by itself, and that not every version of torch tags as pointwise.
_BY_ELEMENTS = {"copy_", "fill_", "masked_fill_", "abs_"}


_PERFORMERS: dict[Kind, Performer] = {}


def performs(kind: Kind) -> Callable[[Performer], Performer]:
    """Return a decorator that registers a function as the performer of one kind of operators."""

    def enter(performer: Performer) -> Performer:
        _PERFORMERS[kind] = performer
        return performer

    return enter


def perform(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Perform an operator on sharded gradients by the function that is registered for its kind."""
    return _PERFORMERS[kind_of(func)](func, args, kwargs)


@cache
def kind_of(func: Any) -> Kind:
    """Return the kind of an operator, from a table, or else from its tags and schema."""
    if func in _NAMED:
        return _NAMED[func]
    if "c10d" in func.namespace:
        return Kind.COLLECTIVE
    name = name_of(func)
    if torch.Tag.inplace_view in func.tags:
        return Kind.MEMORY
    if func.is_view:
        return Kind.VIEW
    if func.namespace == "aten" and (name.endswith("_like") or name.startswith("new_")):
        return Kind.LIKE
    if not written_arguments(func):
        return Kind.READ
    elements = torch.Tag.pointwise in func.tags or name in _BY_ELEMENTS or name.startswith("_foreach_")
    return Kind.ELEMENTS if elements and written_arguments(func) == ((0, "self"),) else Kind.WRITE


def name_of(func: Any) -> str:
    """Return an operator's name without its namespace and overload."""
    name: str = func._schema.name
    return name.split("::")[-1]


def number_in(value: Any) -> float | None:
    """Return the number that an argument is; None: it is something else, or the host would have to wait for it."""
    if isinstance(value, Tensor) and not isinstance(value, Handle) and value.dim() == 0 and value.is_cpu:
        value = value.item()
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that an operator writes to."""
    named = enumerate(func._schema.arguments)
    return tuple((at, each.name) for at, each in named if each.alias_info is not None and each.alias_info.is_write)


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``change`` to each tensor in ``value``, also in lists, tuples and dicts, and return the result."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(change, each) for each in value])
    if isinstance(value, dict):
        return {name: mapped(change, each) for name, each in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, within lists, tuples and dicts too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)
