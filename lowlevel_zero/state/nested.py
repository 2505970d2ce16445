"""States that hold tensors in lists and dicts: flattened to tensors by name for checkpoints, and nested again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_map, tree_map_with_path

State = dict[str, Any]

_STANDS_FOR = "lowlevel_zero: tensor "  # stands in a list or dict in place of a tensor, followed by its name


def flattened(state: Mapping[str, Any]) -> State:
    """Return ``state`` with tensors in lists and dicts moved to the top level, and their names left in place."""
    tensors: State = {}

    def taken_out(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or len(path) == 1:
            return leaf
        name = f"{path[0].key}{keystr(path[1:])}"
        tensors[name] = leaf
        return _STANDS_FOR + name

    found: State = tree_map_with_path(taken_out, dict(state))
    return found | tensors


def nested(flat: Mapping[str, Any]) -> State:
    """Return the state that ``flattened`` was given: the inverse."""
    put_back: set[str] = set()

    def restored(leaf: Any) -> Any:
        if isinstance(leaf, str) and leaf.startswith(_STANDS_FOR):
            name = leaf.removeprefix(_STANDS_FOR)
            put_back.add(name)
            return flat[name]
        return leaf

    whole: State = tree_map(restored, dict(flat))
    return {key: value for key, value in whole.items() if key not in put_back}
