"""Refuses optimizers that keep parameters, or tensors for them, elsewhere than where slices replace them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves


def check_no_list_of_its_own(optimizer: Optimizer, trained: Sequence[Tensor]) -> None:
    """Raise ``TypeError`` if an optimizer keeps parameters outside of its param groups, which will hold slices.

    It may keep their ids as well, as keys of a dict, and either of them in containers at any depth. A list of a tensor
    for each parameter goes by their places, which change, and by their shapes, which slices don't have.
    """
    params, ids = set(trained), set(map(id, trained))
    groups = {id(optimizer.param_groups), *map(id, optimizer.param_groups)}  # which it may have under other names
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    for name, value in vars(optimizer).items():
        for each in _contents(value, set(groups)) if name != "state" else ():
            if (isinstance(each, Tensor) and each in params) or (type(each) is int and each in ids):
                raise TypeError(
                    f"optimizer: expected {type(optimizer).__name__} to find its parameters in param_groups, where "
                    f"slices replace them, found a separate list in .{name}: let it loop over param_groups"
                )
        held = tree_leaves(value) if isinstance(value, (list, tuple)) and id(value) not in groups else ()
        if [getattr(each, "shape", None) for each in held] == shapes:
            raise TypeError(
                f"optimizer: expected {type(optimizer).__name__} to keep the tensors of each parameter p in its "
                f"state[p], which is split as p is, found a tensor for each place in .{name}: put them into the state"
            )


def _contents(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the leaves and dict keys of nested containers, or ``value`` itself; skip containers that are ``seen``."""
    if not isinstance(value, (list, tuple, set, frozenset, dict)):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for each in chain(value, value.values() if isinstance(value, dict) else ()):
            yield from _contents(each, seen)
