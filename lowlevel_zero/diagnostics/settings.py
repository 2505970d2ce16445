"""Settings of a step, such as learning rates, as lines that the ranks compare."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from itertools import chain, islice
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ..bookkeeping.parameter_store import ParameterStore
from ..communication.agreement import Digested
from .bad_numbers import LaterRead
from .verification import checksum

_MEMBERS = frozenset({"params", "param_names"})
_KERNELS = frozenset({"fused", "foreach"})  # a step makes the same numbers with either
_FEW = 16  # elements that are written out, at most; of more there is a digest
_MANY = 1000  # elements of a container that may change in place, at most, for it to be looked at in every step
_LARGE = 2**20  # bytes of an array that may change in place, at most, for it to be looked at in every step

_ADDRESSES = frozenset("OPXz&")  # among the format of a memory: it holds objects or pointers
_PLAIN = (Number, str, NoneType, torch.dtype, torch.layout, torch.memory_format, range)
_FIXED = frozenset({float, int, bool, str, NoneType})
_NAMED = (FunctionType, BuiltinFunctionType, MethodType, type)


def described(groups: Sequence[Mapping[str, Any]], experts: Collection[str]) -> Iterator[str]:
    """Yield a line for each setting of the param groups; waits for the devices of tensors among them.

    ``experts`` are the names of this rank's own parameters. As elements of a setting they aren't told.
    """
    told = _Texts(experts, waits=True).of
    for at, group in enumerate(groups):
        yield from (f"{key} of group {at}: {told(group[key])}" for key in sorted(group.keys() - _MEMBERS))


class Settings:
    """Describes and hashes the settings of param groups, for the ranks to compare at each step.

    A setting is described and hashed anew if it has been replaced since the last step, or may change in place, as
    lists, dicts and tensors may; a large one of these only if it has been replaced or counts its writes. The host
    waits for no device: the numbers of a tensor there are copied at one step and compared at the next.
    """

    def __init__(self, optim: Optimizer, parameters: ParameterStore) -> None:
        self._optim = optim
        self._parameters = parameters
        self._texts = _Texts()
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
            self._texts.experts = {record.name for record in self._parameters if record.shard_group}
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
                told = self._texts.of(value) + self._late(place, step)
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


class _Texts:
    """Tells settings as texts, which are the same on all ranks if the settings are.

    Plain values are written out, others that have bytes or elements as a digest if these are many. Of any other object
    only the type is told, since its text may have its address.

    Attributes:
        experts: the names of this rank's own parameters, which other ranks needn't have.
    """

    def __init__(self, experts: Collection[str] = (), waits: bool = False) -> None:
        self.experts = experts
        self._waits = waits  # for devices, to read tensors there
        # Checksums of long tensors, each with the tensor's version at the time.
        self._sums: MutableMapping[Tensor, tuple[int | None, str]] = WeakTensorKeyDictionary()

    def of(self, value: object, within: bool = False) -> str:
        """Return a setting as text, or a value ``within`` one."""
        if type(value) is float:
            return repr(value)
        if isinstance(value, Tensor):
            return f"a tensor{self._numbers(value)}, {tuple(value.shape)} {value.dtype}"
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name}, {self.of(value.value, True)}"
        if within and isinstance(value, str) and value in self.experts:
            return "the name of a parameter that not all ranks share"
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, (tuple, list)):
            return _short("({})", [self.of(each, True) for each in value])
        if isinstance(value, dict):
            return _short("{{{}}}", [f"{self.of(key, True)}: {self.of(each, True)}" for key, each in value.items()])
        if isinstance(value, (set, frozenset)):
            return _short("{{{}}}", sorted(self.of(each, True) for each in value))
        if isinstance(value, _NAMED):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, torch.device):
            return value.type  # each rank has an index of its own
        memory = _memory(value)
        return type(value).__name__ if memory is None else f"{type(value).__name__}{_of_memory(value, memory)}"

    def _numbers(self, value: Tensor) -> str:
        """Return the numbers of a tensor that can be read as text: a checksum of many; empty if it can't."""
        if value.is_meta or not (self._waits or value.is_cpu):
            return ""
        if value.numel() <= _FEW:
            return f" {value.tolist()}"
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
            return ""
        version = None if value.is_inference() else value._version
        known = self._sums.get(value)
        if known is None or known[0] is None or known[0] != version:
            sum_ = checksum(value.resolve_conj().resolve_neg())
            self._sums[value] = known = version, f" with checksum {sum_.item():x}"
        return known[1]


def _short(form: str, elements: Sequence[str]) -> str:
    """Return the texts of elements in ``form``, or how many there are and their digest."""
    if len(elements) <= _FEW:
        return form.format(", ".join(elements))
    return form.format(f"{len(elements)} elements with digest {_digest(chr(10).join(elements).encode())}")


def _memory(value: object) -> memoryview | None:
    """Return the memory of an object that has some, such as an array, unless there are addresses in it."""
    try:
        memory = memoryview(value)  # type: ignore[arg-type]
    except Exception:  # of any type: it is the object that answers
        return None
    return None if _ADDRESSES.intersection(memory.format) else memory


def _of_memory(value: Any, memory: memoryview) -> str:
    """Return an array's elements as text if they are few, else their digest, with its shape and type."""
    few = hasattr(value, "tolist") and memory.nbytes <= _FEW * memory.itemsize
    told = str(value.tolist()) if few else f"with digest {_digest(memory.tobytes())}"
    return f" {told}, {memory.shape} {memory.format}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _may_change(value: object) -> bool:
    """Return whether a setting may change without being replaced, and is small enough to be looked at in every step."""
    if type(value) in _FIXED:  # such as a learning rate, which a scheduler replaces in each step
        return False
    parts = list(islice(_parts(value), _MANY + 1))
    return len(parts) <= _MANY and any(map(_may_be_written, parts))


def _parts(value: object) -> Iterator[object]:
    """Yield a setting, and the values in it at any depth if it is a container."""
    yield value
    if isinstance(value, (tuple, list, dict, set, frozenset)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _parts(each)


def _may_be_written(value: object) -> bool:
    if isinstance(value, (list, dict, set, Tensor)):
        return True
    memory = None if isinstance(value, (*_PLAIN, tuple, frozenset)) else _memory(value)
    return memory is not None and not memory.readonly and memory.nbytes <= _LARGE


def _on_device(value: object) -> Iterator[Tensor]:
    """Yield the small tensors on a device in a setting."""
    for each in islice(_parts(value), _MANY):
        if isinstance(each, Tensor) and not (each.is_cpu or each.is_meta) and each.numel() <= _FEW:
            yield each
