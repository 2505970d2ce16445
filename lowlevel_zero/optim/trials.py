"""Trials: fresh optimizers of a class step small parameters, to find the inputs and the results of a step.

They are made by the class's constructor, with the options that the optimizer has recorded. The optimizer itself, and
random number generators, stay unchanged.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as _torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Options: TypeAlias = dict[str, Any]

LARGE = (16, 12, 5, 4, 3, 2)  # a shape of as many dimensions as a parameter has
_LR = 1e-3  # whatever the optimizer's is: a schedule that warms up from 0 may not have begun yet
_LARGE_LR = 0.1  # by which decay that comes with it isn't lost to rounding
_AHEAD = 10**5  # steps: some classes change their rule after so many
# Steps with gradients, and then without. Slow weights are updated in every second to tenth step, seldom later, and some
# are made in the first of these.
_USED, _UNUSED = 11, 100


_MEMBERS = ("params", "param_names")  # of param groups, beside their settings
_PLAIN = (bool, int, float, str, NoneType)


class NoProbe(Exception):
    """Raised if no second optimizer of the class can be made, or if its steps prove nothing."""


def full_name(optimizer: Optimizer) -> str:
    """Return the class's module and name, without private modules, from which torch moves classes."""
    cls = type(optimizer)
    return re.sub(r"\._[a-z]\w*\.", ".", f"{cls.__module__}.{cls.__qualname__}")


def step_is_replaced(optimizer: Optimizer) -> bool:
    """Return whether an instance has another ``step`` than its class. What schedulers and compilers add is none."""
    return "step" in vars(optimizer) and _bare(optimizer.step) is not _bare(type(optimizer).step)


def _bare(method: Any) -> Any:
    """Return the function of a method, without what torch's schedulers and compilers have put around it."""
    while True:
        if getattr(method, "_wrapped_by_lr_sched", False):
            method = method.__wrapped__
        elif hasattr(method, "_torchdynamo_orig_callable"):
            method = method._torchdynamo_orig_callable
        else:
            return getattr(method, "__func__", method)


def first_states(
    optimizer: Optimizer,
    numel: int,
    dtype: torch.dtype | None = None,
    make: Callable[[list[Tensor]], Optimizer] | None = None,
) -> list[Options]:
    """Return the state that a flat parameter of ``numel`` elements gets in its first step, for each param group.

    The parameter is one of ``dtype`` on the host; None: one like the group's first. It is a matrix of one row where the
    class takes no other. ``optimizer`` stays unchanged. ``make``: makes another; None: its class's constructor.

    Raises:
        NoProbe: no other optimizer of the class could be made.
    """
    try:
        return states_of_shape(optimizer, (numel,), dtype, make)
    except NoProbe:
        return states_of_shape(optimizer, (1, numel), dtype, make)


def states_of_shape(
    optimizer: Optimizer,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    make: Callable[[list[Tensor]], Optimizer] | None = None,
) -> list[Options]:
    """Return the state that a parameter of this ``shape`` gets in its first step; else as ``first_states``."""
    with undisturbed():
        params: list[Tensor] = [
            torch.nn.Parameter(_zeros(shape, dtype, group["params"])) for group in optimizer.param_groups
        ]
        options = [own_options(group) for group in optimizer.param_groups]
        other = make(params) if make else fresh(optimizer, options, [[p] for p in params])
        step(other, params, map(torch.zeros_like, params))
        return [other.state.get(p, {}) for p in params]


def missing_in(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], keys: Mapping[int, Collection[str]]
) -> str | None:
    """Return the key that a fresh optimizer lacks to step with these saved ``groups`` and states, or None.

    None: nothing, or it could not be tried. ``keys``: by group, those of one parameter's state.
    """
    with suppress(NoProbe), undisturbed():
        params: list[Tensor] = [torch.nn.Parameter(torch.zeros(LARGE[:1], device="cpu")) for _ in groups]
        pairs = zip(optimizer.param_groups, groups, strict=True)
        other = fresh(optimizer, [own_options({**own, **saved}) for own, saved in pairs], [[p] for p in params])
        step(other, params, map(torch.zeros_like, params))
        held, zeros = other.state_dict()["state"], torch.zeros(LARGE[:1], device="cpu")
        states = {at: {key: held.get(at, {}).get(key, zeros) for key in own} for at, own in keys.items()}
        saved = [{**own_options(group), "params": [at]} for at, group in enumerate(groups)]
        try:
            other.load_state_dict({"state": states, "param_groups": saved})
            step(other, params, map(torch.zeros_like, params))
        except KeyError as missing:
            return str(missing)
    return None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype | None, likes: Sequence[Tensor]) -> Tensor:
    return likes[0].new_zeros(shape) if likes and dtype is None else torch.zeros(shape, dtype=dtype, device="cpu")


def fails_without_gradients(optimizer: Optimizer, empty: bool) -> bool:
    """Return whether a fresh optimizer of this class fails on groups without gradients, or sets them otherwise.

    They are ``empty``, or have a parameter each. False if no optimizer can be made.
    """
    try:
        with undisturbed():
            options = [own_options(group) for group in optimizer.param_groups]
            params: list[Tensor] = [torch.nn.Parameter(torch.ones(LARGE[:2], device="cpu")) for _ in options]
            filled, other = (fresh(optimizer, options, [[p] for p in params]) for _ in range(2))
            for group in other.param_groups if empty else ():
                group["params"] = []
            with suppress(Exception):  # whatever the class raises
                other.step()
                step(filled, params, map(torch.ones_like, params))
                return unlike_settings(filled, other) is not None
            return True
    except NoProbe:
        return False


def writes_without_gradients(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer``'s class writes parameters that have no gradient, as slow weights are written.

    True where it can't be tried.
    """
    try:
        with undisturbed():
            torch.manual_seed(0)
            kinds = kinds_to_try(optimizer, _LARGE_LR)
            params: list[Tensor] = [
                torch.nn.Parameter(torch.randn(LARGE[:2], device="cpu")) for _ in range(2 * len(kinds))
            ]
            other = twin(optimizer, kinds, params)
            for number in range(_USED + _UNUSED):
                if number == _USED:
                    before = [p.detach().clone() for p in params]
                used = [number < _USED or not at % 2 for at in range(len(params))]
                step(other, params, [torch.randn_like(p) if of else None for p, of in zip(params, used, strict=True)])
            return any(not torch.equal(p, old) for p, old in zip(params[1::2], before[1::2], strict=True))
    except NoProbe:
        return True


# ---- later steps of a run ----


def counters(optimizer: Optimizer) -> dict[tuple[int, Any], float]:
    """Return the numbers that an optimizer keeps, by what holds them and under which key."""
    return {(id(holder), key): float(value) for holder, key, value in _numbers(optimizer)}


def skip_ahead(optimizer: Optimizer, before: Mapping[tuple[int, Any], float]) -> None:
    """Add ``_AHEAD`` to whatever has gone up by one since ``before``, a step ago: it counts steps."""
    for holder, key, value in list(_numbers(optimizer)):
        if float(value) == before.get((id(holder), key), value) + 1:
            holder[key] = value + _AHEAD


def _numbers(optimizer: Optimizer) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """Yield each number that an optimizer keeps, with the dict that holds it and its key."""
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    holders: list[dict[Any, Any]] = [vars(optimizer), optimizer.state, *optimizer.param_groups, *states]
    for holder in holders:
        for key, value in holder.items():
            if type(value) in (int, float) or (isinstance(value, Tensor) and value.dim() == 0):
                yield holder, key, value


# ---- another optimizer of the class ----


def fresh(optimizer: Optimizer, options: Sequence[Options], params: Sequence[Sequence[Tensor]]) -> Optimizer:
    """Make a new optimizer of the same class over ``params``, and return it; each group gets its ``options``.

    The constructor's arguments are looked up by name among the defaults and the attributes. An argument that is found
    in neither takes its default. The first one are the groups, or another optimizer over them, which ``optimizer``
    wraps. Plain attributes become those of ``optimizer``, which may record an argument under another name, unless the
    class has a ``__del__``: one of them may be the handle of what that frees.
    """
    recorded = {name.removeprefix("_"): value for name, value in vars(optimizer).items()} | optimizer.defaults
    arguments = list(inspect.signature(type(optimizer)).parameters.values())
    named = {each.name: each for each in arguments if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    first = "params" if "params" in named else next(iter(named), "params")
    named.pop(first, None)
    unknown = [name for name, each in named.items() if name not in recorded and each.default is each.empty]
    if unknown:
        raise NoProbe(f"its constructor got {', '.join(unknown)}, which neither its defaults nor its attributes record")
    names = [name for name in named if name in recorded]
    if any(each.kind is each.VAR_KEYWORD for each in arguments):
        taken = _taken_names(type(optimizer))
        names += [name for name in optimizer.defaults if name not in names and (taken is None or name in taken)]
    wrapped = recorded.get(first)
    groups: Any = [{**own, "params": list(members)} for own, members in zip(options, params, strict=True)]
    if isinstance(wrapped, Optimizer):
        groups = fresh(wrapped, options, params)
    made = type(optimizer)(groups, **{name: _copied(name, recorded[name]) for name in names})
    if not hasattr(type(made), "__del__"):
        vars(made).update((name, copy.deepcopy(value)) for name, value in vars(optimizer).items() if _is_plain(value))
    train = getattr(made, "train", None)
    if callable(train):  # schedule-free ones step in that mode alone
        train()
    return made


def _taken_names(cls: type[Optimizer]) -> set[str] | None:
    """Return the names of arguments that a class's constructor takes or hands on to its bases'; None: any name."""
    names: set[str] = set()
    for init in (vars(each)["__init__"] for each in cls.__mro__ if "__init__" in vars(each)):
        if init is Optimizer.__init__:
            return None
        arguments = inspect.signature(init).parameters
        names |= arguments.keys()
        if all(each.kind is not each.VAR_KEYWORD for each in arguments.values()):
            break
    return names


def _is_plain(value: Any) -> bool:
    """Return whether an attribute is a number, a string, None, or a container of these."""
    if type(value) in (tuple, list, dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _PLAIN)


def _copied(name: str, value: Any) -> Any:
    """Return a copy of an option; raises ``NoProbe`` for objects that must not be copied."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().cpu().clone()
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_copied(name, item) for item in value)
    if type(value) is dict:
        return {key: _copied(name, item) for key, item in value.items()}
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))
    if plain or (callable(value) and not isinstance(value, torch.nn.Module)):
        return value
    raise NoProbe(f"its option {name} is a {type(value).__name__}, which a probe does not copy")


def own_options(group: Mapping[str, Any]) -> Options:
    return {name: _copied(name, value) for name, value in group.items() if name not in _MEMBERS}


class Kind(NamedTuple):
    """The options of a param group, and the plain attributes of a parameter in it."""

    options: Options
    attributes: Options


def unlike_settings(*optimizers: Optimizer) -> str | None:
    """Return the first key under which param groups have different numbers, or None."""
    first, *others = [list(map(_told, each.param_groups)) for each in optimizers]
    pairs = [pair for other in others for pair in zip(first, other, strict=True)]
    return next((key for one, other in pairs for key in one | other if one.get(key) != other.get(key)), None)


def _told(group: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the numbers of each setting of a param group as text."""
    settings = {key: tree_leaves(value) for key, value in group.items() if key not in _MEMBERS}
    return {key: [repr(each) for each in own if isinstance(each, (*_PLAIN, Tensor))] for key, own in settings.items()}


def kinds_to_try(optimizer: Optimizer, lr: float = _LR) -> list[Kind]:
    """Return examples of each kind of parameters; parameters that differ only in numbers or names are of one kind.

    A kind's examples are the first, and those with the least and the largest of each number that differs: a threshold
    may bind for some alone. Their learning rate is ``lr``.
    """
    kinds: dict[tuple[str, str], list[Kind]] = {}
    for group in optimizer.param_groups:
        options = own_options(group)
        if "lr" in options:
            options["lr"] = 0 * options["lr"] + lr  # a tensor, where it is one
        kind = {name: bool(value) if isinstance(value, (float, Tensor)) else value for name, value in options.items()}
        told = repr(sorted(kind.items()))
        for attributes in [*map(_attributes, group["params"])] or [{}]:
            marks = sorted((name, bool(value)) for name, value in attributes.items())
            kinds.setdefault((told, repr(marks)), []).append(Kind(options, attributes))
    return [example for alike in kinds.values() for example in _examples(alike)]


def _examples(alike: Sequence[Kind]) -> list[Kind]:
    """Return the first of these kinds, and those with the least and the largest of each number."""
    chosen = {0}
    for at, of in enumerate(alike[0]):
        for name in of:
            values = [each[at][name] for each in alike]
            numbers = [value for value in values if type(value) in (int, float)]
            chosen |= {values.index(extreme) for extreme in (min(numbers), max(numbers))} if numbers else set()
    return [alike[number] for number in sorted(chosen)]


def _attributes(p: Tensor) -> Options:
    """Return the plain attributes of a parameter, with 1 for numbers that are 0: nothing moves by a factor of 0."""
    plain = {name: value for name, value in vars(p).items() if isinstance(value, _PLAIN)}
    return {name: 1 if value == 0 and value is not False else value for name, value in plain.items()}


def twin(optimizer: Optimizer, kinds: Sequence[Kind], params: Sequence[Tensor]) -> Optimizer:
    """Return a new optimizer of the class over ``params``, as many for each kind, which get its attributes."""
    count = len(params) // len(kinds)
    groups = [params[first : first + count] for first in range(0, len(params), count)]
    for kind, members in zip(kinds, groups, strict=True):
        for p in members:
            vars(p).update(kind.attributes)
    return fresh(optimizer, [own_options(kind.options) for kind in kinds], groups)


def step(optimizer: Optimizer, params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()  # some optimizers write into it
    optimizer.step()


def refuse_communication(optimizer: Optimizer) -> None:
    """Raise ``NoProbe`` if a first step of a fresh optimizer communicates.

    All ranks try the same numbers, of which a mean over the ranks changes none.
    """
    params: list[Tensor] = [torch.nn.Parameter(torch.ones(LARGE[:2], device="cpu")) for _ in range(2)]
    other = fresh(optimizer, [own_options(optimizer.param_groups[0])], [params])
    try:
        with _Alone():  # type: ignore[no-untyped-call]
            step(other, params, map(torch.ones_like, params))
    except NoProbe:
        raise
    except Exception:  # it takes no such shape, which a comparison finds
        return


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ``NoProbe`` where an operation communicates."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            raise NoProbe("its step communicates by itself")
        return function(*args, **(kwargs or {}))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run the body without effect on random number generators, and turn its exceptions into ``NoProbe``.

    Whatever another's class raises in it is a ``NoProbe``. Steps that their class compiles, which takes minutes, run as
    they are written; torch before 2.6 compiles them. The program's hooks on the steps of all optimizers don't run.
    """
    python_state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    hooks: list[Any] = [_torch_optimizer._global_optimizer_pre_hooks, _torch_optimizer._global_optimizer_post_hooks]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    stance = getattr(torch.compiler, "set_stance", lambda _: nullcontext())
    try:
        with torch.random.fork_rng([]), torch.device("cpu"), warnings.catch_warnings(), stance("force_eager"):
            warnings.simplefilter("ignore")
            yield
    except NoProbe:
        raise
    except Exception as error:  # whatever another's class raises
        raise NoProbe(f"{type(error).__name__}: {error}") from error
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        for each, own in zip(hooks, kept, strict=True):
            each.update(own)
