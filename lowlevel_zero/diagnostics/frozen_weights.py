"""Finds writes of frozen weights, and trained weights that were replaced, for the ranks to compare in a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor, nn

from ..bookkeeping.module_names import joined, named_modules, parameter_names
from ..bookkeeping.parameter_store import ParameterStore
from .untrained import is_due

REPLACED = " (replaced by another tensor)"


class Written(NamedTuple):
    """A weight that was written or replaced since the ranks compared it last, with how often, as records tell it."""

    name: str
    shard_group: int
    writes: int


@dataclass(slots=True, eq=False, repr=False)
class _Place:
    """The place of a parameter in a module, which isn't kept alive."""

    module: ReferenceType[nn.Module]
    key: str
    name: str
    shard_group: int
    trained: Tensor | None  # the parameter of the optimizer's that was there; None: a frozen one was
    address: int = 0  # where the frozen one begins, and how often it has been written
    version: int = 0


class FrozenWeights:
    """Looks for frozen weights, of param groups or of the model, that were written since the look before.

    A look takes about 1.5 microseconds for each parameter. It is due before steps 1, 2, 3, 5, 9, ... and then before
    one in 64, the same ones on all ranks. What this package trains has records, which tell writes in every step; of the
    optimizer's own a look finds that the model has another tensor in their place, as after ``load_state_dict`` with
    ``assign=True``.

    Args:
        model: the module that was given, or None.
        alive: returns all optimizers of this process.
    """

    def __init__(self, model: nn.Module | None, parameters: ParameterStore, alive: Callable[[], Sequence[Any]]) -> None:
        self._alive = alive
        self._found: list[tuple[_Place, Tensor]] = []
        seen: set[int] = set()  # ids, since a tensor's hash takes two calls
        self._places = [] if model is None else list(_places(model, parameters, seen))
        self._others = nn.Module()  # holds those of param groups that the model hasn't
        named = parameter_names(parameters.groups, None)
        self._others._parameters.update({name: p for p, name in named.items() if id(p) not in seen})  # type: ignore[misc]
        self._places += _places(self._others, parameters, seen)

    def look(self, steps: int) -> list[Written]:
        """Return the weights that were written or replaced, if a look is due after ``steps`` steps."""
        self._found = []
        if not is_due(steps):
            return []
        for place in self._places:
            p = _held(place)
            if p is None or p is place.trained:
                continue
            if place.trained is not None or (not p.requires_grad and _mark(p) != (place.address, place.version)):
                self._found.append((place, p))
        if self._found:
            trained = {record.p for each in self._alive() for record in each.sharded_parameters.records}
            self._found = [(place, p) for place, p in self._found if p not in trained]
        return [_written(place, p) for place, p in self._found]

    def note(self) -> None:
        """Note that the ranks have compared the findings of the last look."""
        for place, p in self._found:
            place.trained = None
            place.address, place.version = _mark(p)
        self._found = []

    def named(self, names: Collection[str]) -> Iterator[tuple[Tensor, str]]:
        """Yield the frozen weights that have one of ``names``."""
        for place in self._places:
            p = _held(place)
            if place.name in names and place.trained is None and p is not None:
                yield p, place.name


def _places(model: nn.Module, parameters: ParameterStore, seen: set[int]) -> Iterator[_Place]:
    """Yield the first places of the optimizer's parameters and of frozen ones, and add the ids of all to ``seen``."""
    for name, _, module in named_modules(model):
        for key, p in module._parameters.items():
            if p is None or id(p) in seen:
                continue
            seen.add(id(p))
            record = parameters.find(p)
            if record is not None:
                yield _Place(ref(module), key, record.name, record.shard_group, p)
            elif not p.requires_grad:
                yield _Place(ref(module), key, joined(name, key), parameters.shard_group_of(p), None, *_mark(p))


def _held(place: _Place) -> Tensor | None:
    """Return the parameter in a place; None if there is none any more."""
    module = place.module()
    try:
        return None if module is None else module._parameters[place.key]
    except KeyError:  # it has been deleted
        return None


def _written(place: _Place, p: Tensor) -> Written:
    if place.trained is not None:
        return Written(place.name + REPLACED, place.shard_group, 1)
    address, version = _mark(p)
    return Written(place.name, place.shard_group, 1 if address != place.address else abs(version - place.version))


def _mark(p: Tensor) -> tuple[int, int]:
    """Return where a tensor begins, and how often it was written; zeros for one that tells neither."""
    try:
        return p.data_ptr(), p._version
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own, or one of inference mode
        return 0, 0
