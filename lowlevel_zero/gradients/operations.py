"""Torch operators and their arguments: names, numbers, tensors, and the arguments that are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from ..bookkeeping.sharded_parameter import Handle

T = TypeVar("T")
Args: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]


def name_of(func: Any) -> str:
    """Return an operator's name without its namespace and overload."""
    name: str = func._schema.name
    return name.split("::")[-1]


def number_in(value: Any) -> float | None:
    """Return an argument's number, also of a 0-d tensor on the host; None for bools, device tensors and all else."""
    if isinstance(value, Tensor) and not isinstance(value, Handle) and value.dim() == 0 and value.is_cpu:
        value = value.item()
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that an operator writes to."""
    named = enumerate(func._schema.arguments)
    return tuple((at, each.name) for at, each in named if each.alias_info is not None and each.alias_info.is_write)


def mapped(change: Callable[[Tensor], Any], value: T) -> T:
    """Return ``value`` with ``change`` applied to each tensor in it, in new lists, tuples and dicts."""
    found: Any = value
    if isinstance(value, Tensor):
        found = change(value)
    elif isinstance(value, (list, tuple)):
        found = type(value)([mapped(change, each) for each in value])
    elif isinstance(value, dict):
        found = {name: mapped(change, each) for name, each in value.items()}
    return found  # type: ignore[no-any-return]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, within lists, tuples and dicts too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)
