"""Twins: other optimizers of a class over small parameters, made by its constructor with recorded options."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

Options: TypeAlias = dict[str, Any]

LR = 1e-3  # whatever the optimizer's is: a schedule that warms up from 0 may not have begun yet
_MEMBERS = ("params", "param_names")  # of param groups, beside their settings
_PLAIN = (bool, int, float, str, NoneType)
_CONTAINERS = (tuple, list, dict, set, frozenset)
_FEW = 8  # texts of an attribute that may tell roles of parameters


class NoProbe(Exception):
    """Raised if no second optimizer of the class can be made, or if its steps prove nothing."""


class Kind(NamedTuple):
    """The options of a param group, and the plain attributes and states of a parameter in it.

    ``shapes`` are those of all parameters of the kind that are to be stepped.
    """

    options: Options
    attributes: Options
    states: Options
    shapes: frozenset[tuple[int, ...]] = frozenset()


# ---- another optimizer of the class ----


def fresh(
    optimizer: Optimizer,
    options: Sequence[Options],
    params: Sequence[Sequence[Tensor]],
    states: Sequence[Options] | None = None,
) -> Optimizer:
    """Make a new optimizer of the same class over ``params``, and return it; each group gets its ``options``.

    Plain attributes become those of ``optimizer``, which may record an argument under another name, unless the class
    has a ``__del__``: one of them may be the handle of what that frees. So do functions and objects of plain values, if
    there are arguments that aren't recorded.

    If the constructor fails, as one that takes no param groups, the new one is a copy of ``optimizer``, and each
    group's parameters get its ``states``, unless these are None.
    """
    try:
        made = _constructed(optimizer, options, params)
    except Exception as error:  # whatever the class raises
        if states is None:
            raise
        made = _copy(optimizer, options, params, states, error)
    train = getattr(made, "train", None)
    if callable(train):  # schedule-free ones step in that mode alone
        train()
    return made


def _constructed(optimizer: Optimizer, options: Sequence[Options], params: Sequence[Sequence[Tensor]]) -> Optimizer:
    """Return a ``fresh`` optimizer that the class's constructor has made."""
    recorded = {name.removeprefix("_"): value for name, value in vars(optimizer).items()} | optimizer.defaults
    first, names, unknown = _arguments(type(optimizer), recorded, optimizer.defaults)
    groups: Any = [{**own, "params": list(members)} for own, members in zip(options, params, strict=True)]
    wrapped = recorded.get(first)
    if isinstance(wrapped, Optimizer):
        groups = fresh(wrapped, options, params)
    made = type(optimizer)(groups, **{name: _copied(name, recorded[name]) for name in names})
    if not hasattr(type(made), "__del__"):
        for name, value in vars(optimizer).items():
            held = tree_leaves(value) if type(value) in (tuple, list, dict) else [value]  # neither states nor hooks
            follows = unknown and name.removeprefix("_") not in names and _may_follow(optimizer, made, name, held)
            if follows and not all(_is_copied(each, optimizer, set()) for each in held):
                raise NoProbe(
                    f"its constructor got {', '.join(unknown)}, which neither its defaults nor its attributes record, "
                    f"and its {name}, which may follow from that, is a {type(value).__name__}, which a probe does not "
                    "copy"
                )
            if follows or all(isinstance(each, _PLAIN) for each in held):
                vars(made)[name] = copy.deepcopy(value, {id(optimizer): made})
    return made


def _copy(
    optimizer: Optimizer,
    options: Sequence[Options],
    params: Sequence[Sequence[Tensor]],
    states: Sequence[Options],
    error: Exception,
) -> Optimizer:
    """Return a copy of ``optimizer`` with other groups, whose parameters have these ``states``.

    Raises:
        NoProbe: it holds more than numbers, text and functions, so its constructor's ``error`` counts.
    """
    cls, held = type(optimizer), vars(optimizer)
    own = {name: each for name, each in held.items() if not (_is_of_torch(name) or callable(getattr(cls, name, None)))}
    others = [name for name, each in own.items() if not _is_copied(each, optimizer, set())]
    others += [name for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks") if held.get(name)]
    others += ["state" for state in held.get("state", {}).values() if _plain_states(state) != state]
    if others or hasattr(cls, "__del__"):
        if isinstance(error, NoProbe):
            raise error
        raise NoProbe(
            f"its constructor takes no param groups ({type(error).__name__}: {error}), and its "
            f"{[*others, '__del__'][0]} can't be copied"
        )
    made = cls.__new__(cls)
    vars(made).update(copy.deepcopy(own, {id(optimizer): made}))
    groups = [{**each, "params": list(members)} for each, members in zip(options, params, strict=True)]
    Optimizer.__init__(made, groups, {name: _copied(name, each) for name, each in optimizer.defaults.items()})
    for state, members in zip(states, params, strict=True):
        for p in members if state else ():
            made.state[p].update(copy.deepcopy(state))
    return made


def _is_of_torch(name: str) -> bool:
    """Return whether an attribute is one that torch gives to all optimizers."""
    return name.startswith("_optimizer_") or name in ("defaults", "state", "param_groups")


def with_one_each(optimizer: Optimizer, params: Sequence[Tensor]) -> Optimizer:
    """Return a fresh optimizer of the class with the groups of ``optimizer``, each over one of ``params``."""
    return fresh(optimizer, [own_options(group) for group in optimizer.param_groups], [[p] for p in params])


def twin(
    optimizer: Optimizer,
    kinds: Sequence[Kind],
    params: Sequence[Tensor],
    counts: Sequence[int],
    whole: Sequence[Tensor] | None = None,
) -> Optimizer:
    """Return a fresh optimizer over ``params``, of which as many as ``counts`` tells are of each kind, in their order.

    Attributes of a parameter's shape are those of ``whole``, of which ``params`` may be slices; None: of ``params``.
    """
    kind_of = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    for p, of, kind in zip(params, whole or params, kind_of, strict=True):
        vars(p).update({name: _shaped(each, of) for name, each in kind.attributes.items()})
    groups = [params[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]
    return fresh(optimizer, [own_options(kind.options) for kind in kinds], groups, [kind.states for kind in kinds])


def _may_follow(optimizer: Optimizer, made: Optimizer, name: str, held: Sequence[Any]) -> bool:
    """Return whether an attribute that has ``held`` may follow from an argument that its twin ``made`` lacks.

    Those that hold parameters or optimizers are made of the twin's own. What all instances share has no choice in it,
    and methods that are replaced on the instance aren't the class's.
    """
    shared = vars(made).get(name) is vars(optimizer)[name]
    if _is_of_torch(name) or shared or callable(getattr(type(optimizer), name, None)):
        return False
    return not any(isinstance(each, (Tensor, Optimizer)) for each in held)


def _is_copied(value: Any, optimizer: Optimizer | None, seen: set[tuple[int, bool]]) -> bool:
    """Return whether a value is made of numbers, text, functions, and methods of ``optimizer`` alone.

    A function that holds the optimizer, as a lambda does that reads ``self``, would step with its settings. What is
    ``seen`` is being looked at, as an object that holds a method of its own.
    """
    if isinstance(value, (Optimizer, Tensor)):
        return value is optimizer
    if isinstance(value, (*_PLAIN, torch.dtype, torch.device, type, BuiltinFunctionType)):
        return True
    look = id(value), optimizer is None
    if look in seen:
        return True
    seen.add(look)
    if isinstance(value, FunctionType):
        return all(_is_copied(each, None, seen) for each in _held_by(value))
    if isinstance(value, MethodType):
        return _is_copied(value.__self__, optimizer, seen)
    if isinstance(value, partial):
        return all(_is_copied(each, optimizer, seen) for each in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(_is_copied(each, optimizer, seen) for each in value)
    if isinstance(value, dict) and any(isinstance(key, Tensor) for key in value):
        return False
    own = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return own is not None and all(_is_copied(each, optimizer, seen) for each in own.values())


def _held_by(function: FunctionType) -> Iterator[Any]:
    """Yield the default values of a function, and the variables around it that have a value."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _arguments(
    cls: type[Optimizer], recorded: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[str, list[str], list[str]]:
    """Return the names of a constructor's first, its ``recorded`` and its other arguments, which take their defaults.

    The first one are the groups, or another optimizer over them.

    Raises:
        NoProbe: an argument that isn't recorded has no default.
    """
    arguments = list(inspect.signature(cls).parameters.values())
    named = {each.name: each for each in arguments if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    first = "params" if "params" in named else next(iter(named), "params")
    named.pop(first, None)
    unknown = [name for name in named if name not in recorded]
    needed = [name for name in unknown if named[name].default is inspect.Parameter.empty]
    if needed:
        raise NoProbe(f"its constructor got {', '.join(needed)}, which neither its defaults nor its attributes record")
    names = [name for name in named if name in recorded]
    if any(each.kind is each.VAR_KEYWORD for each in arguments):
        taken = _taken_names(cls)
        names += [name for name in defaults if name not in names and (taken is None or name in taken)]
    return first, names, unknown


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


# ---- options ----


def own_options(group: Mapping[str, Any]) -> Options:
    """Return copies of a param group's settings; raise ``NoProbe`` for objects that must not be copied."""
    return {name: _copied(name, value) for name, value in group.items() if name not in _MEMBERS}


def _copied(name: str, option: Any) -> Any:
    """Return a copy of an option; raise ``NoProbe`` unless it holds only numbers, text, dtypes and functions.

    A twin isn't ``capturable``: trials step on the host, where torch's classes refuse that.
    """
    if name == "capturable":
        return False

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.detach().cpu().clone()
        plain = isinstance(value, (*_PLAIN, torch.dtype, torch.device))
        if plain or (callable(value) and not isinstance(value, torch.nn.Module)):
            return value
        raise NoProbe(f"its option {name} is a {type(value).__name__}, which a probe does not copy")

    return tree_map(copied, option)


def unlike_settings(*optimizers: Optimizer) -> str | None:
    """Return the first key whose numbers or text differ between the optimizers' param groups, or None."""
    first, *others = [list(map(_told, each.param_groups)) for each in optimizers]
    pairs = [pair for other in others for pair in zip(first, other, strict=True)]
    return next((key for one, other in pairs for key in one | other if one.get(key) != other.get(key)), None)


def _told(group: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the ``repr`` of each number, text and tensor in a param group's settings, by setting."""
    settings = {key: tree_leaves(value) for key, value in group.items() if key not in _MEMBERS}
    return {key: [repr(each) for each in own if isinstance(each, (*_PLAIN, Tensor))] for key, own in settings.items()}


# ---- kinds of parameters ----


def kinds_to_try(optimizer: Optimizer, lr: float = LR, parameters: Collection[Tensor] = ()) -> list[Kind]:
    """Return examples of each kind of parameters; parameters that differ only in numbers or names are of one kind.

    Attributes and states that have few texts tell kinds, too: they are roles, not names. A kind's examples are the
    first, and those with the least and the largest of each number that differs: a threshold may bind for some alone.
    Their learning rate is ``lr``, and their shapes are those of their kind among ``parameters``.
    """
    wanted = set(parameters)
    kinds: dict[tuple[str, str], list[Kind]] = {}
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    held = vars(optimizer).get("state", {})  # a class may look it up in a way of its own
    roles = _roles(map(_attributes, everything)), _roles(_plain_states(held.get(p)) for p in everything)
    for group in optimizer.param_groups:
        options = own_options(group)
        if "lr" in options:
            options["lr"] = 0 * options["lr"] + lr  # a tensor, where it is one
        kind = {name: bool(value) if isinstance(value, (float, Tensor)) else value for name, value in options.items()}
        told = repr(sorted(kind.items()))
        for p in group["params"] or [torch.empty(0, device="cpu")]:
            own = _attributes(p), _plain_states(held.get(p))
            marks = [
                sorted((name, _mark(value, name in names)) for name, value in of.items())
                for of, names in zip(own, roles, strict=True)
            ]
            shapes = frozenset([tuple(p.shape)] if p in wanted else [])
            kinds.setdefault((told, repr(marks)), []).append(Kind(options, *own, shapes))
    return [example for alike in kinds.values() for example in _examples(alike)]


def _examples(alike: Sequence[Kind]) -> list[Kind]:
    """Return the first of the kinds ``alike``, and those with the least and the largest value of each number.

    They get the shapes of all.
    """
    chosen = {0}
    told = [(each.options, each.attributes, each.states) for each in alike]
    for at, of in enumerate(told[0]):
        for name in of:
            values = [each[at][name] for each in told]
            numbers = [value for value in values if type(value) in (int, float)]
            chosen |= {values.index(extreme) for extreme in (min(numbers), max(numbers))} if numbers else set()
    shapes = frozenset().union(*(each.shapes for each in alike))
    return [alike[number]._replace(shapes=shapes) for number in sorted(chosen)]


def _roles(attributes: Iterable[Options]) -> set[str]:
    """Return the names of the attributes that have few texts, or containers, and fewer than there are parameters."""
    told: dict[str, list[str]] = {}
    for name, value in ((name, value) for each in attributes for name, value in each.items()):
        if isinstance(value, (str, *_CONTAINERS)):
            told.setdefault(name, []).append(repr(value))
    return {name for name, texts in told.items() if len({*texts}) <= min(_FEW, len(texts) - 1)}


def _mark(value: Any, is_role: bool) -> str:
    """Return a text by which attributes tell kinds apart."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of {'its shape' if value.dim() else 'none'}"
    return repr(value if is_role else bool(value))


def _attributes(p: Tensor) -> Options:
    """Return a parameter's plain attributes, containers of plain ones, and tensors of one element or of its shape.

    Numbers that are 0 are 1 instead: nothing moves by a factor of 0.
    """
    found = {name: value for name, value in vars(p).items() if _is_plain(value)}
    found = {
        name: 1 if isinstance(value, (int, float)) and value == 0 and value is not False else value
        for name, value in found.items()
    }
    for name, value in vars(p).items():
        if isinstance(value, Tensor) and value.shape == p.shape and p.dim():
            found[name] = value
        elif isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
            number = value.detach().cpu().flatten()[0].clone()
            found[name] = number if number or number.dtype == torch.bool else torch.ones_like(number)
    return found


def _plain_states(state: Any) -> Options:
    """Return the numbers and texts in the state of a parameter, which a constructor may have put there."""
    return {name: each for name, each in state.items() if isinstance(each, _PLAIN)} if isinstance(state, dict) else {}


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number or text, or a container of nothing else."""
    if type(value) in _CONTAINERS:
        return all(_is_plain(each) for each in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, _PLAIN)


def _shaped(value: Any, like: Tensor) -> Any:
    """Return a copy of an attribute; for a tensor of its parameter's shape, one of the shape of ``like`` instead."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return copy.deepcopy(value)
    places = torch.arange(like.numel(), device="cpu").view(like.shape)
    return places % 2 == 0 if value.dtype == torch.bool else (1 + places % 3).to(value.dtype)
