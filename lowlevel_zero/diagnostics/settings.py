"""Settings of a step, such as learning rates, as lines that the ranks compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Number
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..communication.agreement import Digested
from .bad_numbers import LaterRead

_MEMBERS = frozenset({"params", "param_names"})
_KERNELS = frozenset({"fused", "foreach"})  # a step makes the same numbers with either
_FEW = 16  # elements of a tensor or a container that counts as a setting, at most


def described(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each setting of the param groups; waits for the devices of tensors among them."""
    for at, group in enumerate(groups):
        yield from (f"{key} of group {at}: {_told(group[key])}" for key in sorted(group.keys() - _MEMBERS))


class Settings:
    """Describes and hashes the settings of param groups, for the ranks to compare at each step.

    A setting is described and hashed anew if it has been replaced since the last step, or may change in place, as
    lists, dicts and tensors may. The host waits for no device: the numbers of a tensor there are copied at one step
    and compared at the next.
    """

    def __init__(self, optim: Optimizer) -> None:
        self._optim = optim
        self._keys: list[str] = []
        self._names: list[str | None] = []  # by place among the keys; None: ranks don't compare it
        self._values: list[Any] = []
        self._described: dict[str, str] = {}  # in the order of names
        self._in_place: set[int] = set()  # places of values that may change in place
        self._on_device: dict[int, LaterRead] = {}  # by place, the numbers of a device's tensors
        self._told = Digested()

    def at(self, step: int, others: Mapping[str, Any]) -> Digested:
        """Describe settings that changed; return the digest of all of them and ``others``. Doesn't communicate."""
        groups = self._optim.param_groups
        keys = [*others, *chain.from_iterable(groups)]
        values = [*others.values(), *chain.from_iterable(map(dict.values, groups))]
        if keys != self._keys:
            own = (_name(key, at) for at, group in enumerate(groups) for key in group)
            self._keys, self._names, self._values = keys, [*others, *own], [_NONE] * len(keys)
            self._described, self._in_place = dict.fromkeys(sorted(filter(None, self._names)), ""), set()
        changed = [place for place, value in enumerate(values) if value is not self._values[place]]
        self._values = values
        if changed or self._in_place:
            self._describe(self._in_place.union(changed), step)
        return self._told

    def _describe(self, places: Iterable[int], step: int) -> None:
        """Describe the settings at some places again, and hash all of them if one has changed."""
        others = False
        for place in places:
            name, value = self._names[place], self._values[place]
            if name is not None:
                (self._in_place.add if _may_change(value) else self._in_place.discard)(place)
                told = _told(value, waits=False) + self._late(place, step)
                others |= told != self._described[name]
                self._described[name] = told
        if others:
            self._told = Digested.of(self._described)

    def _late(self, place: int, step: int) -> str:
        """Start copying a setting's numbers from its device; return as text its numbers of the step before, if any."""
        before = self._on_device.pop(place, None)
        tensors = list(_on_device(self._values[place]))
        if tensors:
            now = tensors[0].detach() if len(tensors) == 1 else torch.cat([each.detach().flatten() for each in tensors])
            self._on_device[place] = LaterRead(now, step)
        known = before is not None and before.step == step - 1
        return f", {before.read().tolist()} at the step before" if before is not None and known else ""


_NONE = object()


def _name(key: str, at: int) -> str | None:
    return None if key in _MEMBERS or key in _KERNELS else f"{key} of group {at}"


def _told(value: object, waits: bool = True) -> str:
    """Return a setting as text: its value if that is plain and small, else its type; ``waits``: on a device, too."""
    if type(value) is float:
        return repr(value)
    if isinstance(value, Tensor):
        read = value.numel() <= _FEW and not value.is_meta and (waits or value.is_cpu)
        return f"a tensor{f' {value.tolist()}' if read else ''}, {tuple(value.shape)} {value.dtype}"
    if isinstance(value, (tuple, list)) and len(value) <= _FEW:
        return f"({', '.join(_told_within(each, waits) for each in value)})"
    if isinstance(value, dict) and len(value) <= _FEW:
        return f"{{{', '.join(f'{key}: {_told_within(each, waits)}' for key, each in value.items())}}}"
    return repr(value) if isinstance(value, (Number, str, NoneType, torch.dtype)) else type(value).__name__


def _told_within(value: object, waits: bool) -> str:
    """Return an element of a setting as text; any string as ``str``, since it may be the name of an expert."""
    return "str" if isinstance(value, str) else _told(value, waits)


def _may_change(value: object) -> bool:
    """Return whether a setting may change without being replaced."""
    return isinstance(value, (list, dict, Tensor)) or (isinstance(value, tuple) and any(map(_may_change, value)))


def _on_device(value: object) -> Iterator[Tensor]:
    """Yield the small tensors on a device in a setting, which may be one or a list or tuple of values."""
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _on_device(each)
    elif isinstance(value, Tensor) and not (value.is_cpu or value.is_meta) and value.numel() <= _FEW:
        yield value
