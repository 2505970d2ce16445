"""Whatever tensors an object leads to: the account of what a library keeps, without knowing where it keeps it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

_ELSEWHERE = (ModuleType, type, CodeType, FrameType, BuiltinFunctionType)


def reachable_tensors(*roots: Any) -> Iterator[Tensor]:
    """Every tensor that can be reached from ``roots`` through Python objects, with its gradient, each once.

    Modules, classes and functions' globals lead to what is not the object's own, and are left out.
    """
    seen: set[int] = set()
    waiting = list(roots)
    kept = []  # ids stay good as long as their objects live
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _ELSEWHERE):
            continue
        seen.add(id(each))
        kept.append(each)
        if isinstance(each, Tensor):
            yield each
            if each.is_leaf and each.grad is not None:
                waiting.append(each.grad)
        waiting += _inside(each)


def _inside(each: Any) -> list[Any]:
    if isinstance(each, FunctionType):
        return [*(each.__closure__ or ()), *(each.__defaults__ or ())]
    if isinstance(each, MethodType):
        return [each.__self__, each.__func__]
    return gc.get_referents(each)
