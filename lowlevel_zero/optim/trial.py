"""Tries an optimizer on slices: throwaway ones of its class step a few small parameters, whole and in slices.

One steps the parameters whole; one a rank steps the flat slices of the same parameters. All must arrive at the same
values. They are made by the class's constructor, with the options that the optimizer has recorded.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as _torch_optimizer

Options: TypeAlias = dict[str, Any]

# What is stepped: a small matrix; a convolution's kernel, which some classes treat apart; and a matrix larger than the
# sizes from which some classes quantise (4,096 or 16,384 elements), which divides into their blocks of elements while
# its slices do not.
_SHAPES = ((7, 7), (5, 3, 3, 3), (176, 176))
_WORLD_SIZES = (2, 5)  # halves, and slices that end inside of blocks

# How large the gradients of each step are: small ones, usual ones, and some that any clipping would clip.
_SIZES = (0.01,) * 4 + (1.0, 1.0, 0.3, 3.0) * 5 + (1000.0,) * 4

_RELATIVE_TOLERANCE = 1e-5  # of the largest movement since the start
_ROUNDINGS = 4 * torch.finfo(torch.float32).eps  # of the element: each step rounds it once
_LEAST_MOVEMENT = 1e-5  # of the largest element; with less, rounding would hide a difference
_LEAST_LR, _TRIAL_LR = 1e-6, 1e-3  # a schedule that warms up from 0 has not begun yet
_MOST_GROUPS, _MOST_VALUES = 16, 8


class NoTrial(Exception):
    """No other optimizer of the class can be made, or what it did proves nothing."""


def try_on_slices(optimizer: Optimizer) -> str | None:
    """What tells whole parameters from their slices in a trial of ``optimizer``, None if nothing does.

    Runs in fp32 on the CPU. ``optimizer``, random number generators and global hooks stay as they are.

    Raises:
        NoTrial: it can't be tried; the message says why.
    """
    options = _options_to_try(optimizer)
    try:
        with _undisturbed():
            return _first_difference(optimizer, options)
    except NoTrial:
        raise
    except Exception as error:  # whatever a stranger's class raises: it could not be tried
        raise NoTrial(f"{type(error).__name__}: {error}") from error


def first_states(optimizer: Optimizer, numel: int, dtype: torch.dtype | None = None) -> list[Options]:
    """The state that a flat parameter of ``numel`` elements gets in its first step: one dict for each param group.

    The parameter is one of ``dtype`` on the host; None: one like the group's first. It is a matrix of one row where
    the class wants matrices. ``optimizer`` stays as it is.

    Raises:
        NoTrial: no other optimizer of the class could be made.
    """
    failure: Exception = NoTrial("no shape")
    for shape in ((numel,), (1, numel)):
        params = [[torch.nn.Parameter(_like(group, dtype).new_zeros(shape))] for group in optimizer.param_groups]
        try:
            with _undisturbed():
                other = fresh(optimizer, [_own_options(group) for group in optimizer.param_groups], params)
                _step(other, [torch.zeros_like(p) for (p,) in params])
            return [_flat(other.state.get(p, {}), shape) for (p,) in params]
        except Exception as error:  # whatever a stranger's class raises
            failure = error
    raise NoTrial(f"{type(failure).__name__}: {failure}") from failure


def fresh(optimizer: Optimizer, options: Sequence[Options], params: Sequence[Sequence[Tensor]]) -> Optimizer:
    """Another optimizer of the same class, over ``params``, of which each group has the ``options``.

    What its constructor takes is looked for among the defaults and the attributes, by name.
    """
    recorded = {name.removeprefix("_"): value for name, value in vars(optimizer).items()} | optimizer.defaults
    names = _argument_names(optimizer)
    unknown = [name for name in names if name not in recorded]
    if unknown:
        raise NoTrial(f"what its constructor got as {', '.join(unknown)} is recorded nowhere")
    groups = [{**own, "params": list(members)} for own, members in zip(options, params, strict=True)]
    return type(optimizer)(groups, **{name: _copied(name, recorded[name]) for name in names})


def _argument_names(optimizer: Optimizer) -> list[str]:
    """What a constructor takes besides the parameters; ``**kwargs`` go to the next class, then to the defaults."""
    names: list[str] = []
    for base in type(optimizer).__mro__:
        if base is Optimizer:
            names += optimizer.defaults
            break
        if "__init__" not in vars(base):
            continue
        arguments = list(inspect.signature(vars(base)["__init__"]).parameters.values())
        named = [a.name for a in arguments[1:] if a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY)]
        names += [name for name in named if name != ("params" if "params" in named else named[0])]
        if all(a.kind is not a.VAR_KEYWORD for a in arguments):
            break
    return list(dict.fromkeys(names))


def _copied(name: str, value: Any) -> Any:
    """An option that belongs to nobody else; raises ``NoTrial`` for what a trial must not copy."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().cpu().clone()
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_copied(name, item) for item in value)
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))
    if plain or (callable(value) and not isinstance(value, torch.nn.Module)):
        return value
    raise NoTrial(f"its option {name} is a {type(value).__name__}, which a trial does not copy")


def _own_options(group: Options) -> Options:
    return {name: _copied(name, value) for name, value in group.items() if name not in ("params", "param_names")}


def _like(group: Options, dtype: torch.dtype | None) -> Tensor:
    return group["params"][0] if group["params"] and dtype is None else torch.zeros(0, dtype=dtype, device="cpu")


def _flat(state: Options, shape: tuple[int, ...]) -> Options:
    like_it = {key for key, value in state.items() if isinstance(value, Tensor) and value.shape == shape}
    return {key: value.flatten() if key in like_it else value for key, value in state.items()}


# What is compared


def _first_difference(optimizer: Optimizer, options: list[Options]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    starts = [0.02 * _randn(shape, generator) * _ramp(shape) for shape in _SHAPES * len(options)]
    whole = _made(optimizer, options, starts)
    ranks_of = {
        size: [_made(optimizer, options, [_rows(start, size)[rank] for start in starts]) for rank in range(size)]
        for size in _WORLD_SIZES
    }
    for number, grads in enumerate(_gradients(starts, generator), start=1):
        _step(whole, grads)
        for size, ranks in ranks_of.items():
            for rank, one in enumerate(ranks):
                _step(one, [_rows(grad, size)[rank] for grad in grads])
            difference = _difference(whole, ranks, starts)
            if difference is not None:
                cause = "so its updates depend on the other elements, on the shape, or on random numbers"
                return f"{difference} in step {number} of a trial, {cause}"
    for param, start in zip(_params(whole), starts, strict=True):
        if (param.detach() - start).abs().amax() <= _LEAST_MOVEMENT * start.abs().amax():
            raise NoTrial(f"{len(_SIZES)} steps hardly moved a trial's parameter, which proves nothing")
    return None


def _difference(whole: Optimizer, ranks: list[Optimizer], starts: list[Tensor]) -> str | None:
    for param, start, *slices in zip(_params(whole), starts, *map(_params, ranks), strict=True):
        value = param.detach()
        joined = torch.cat([one.detach() for one in slices])[: value.numel()].view_as(value)
        movement, gap = (value - start).abs().amax(), (value - joined).abs()
        if not (movement + gap.amax()).isfinite():
            raise NoTrial("a trial's parameters became infinite or NaN")
        if (gap > _RELATIVE_TOLERANCE * movement + _ROUNDINGS * value.abs()).any():
            share, shape = float(gap.amax() / movement), tuple(value.shape)
            return f"a {shape} parameter and its {len(ranks)} flat slices differ by {share:.1e} of the update"
    return None


def _made(optimizer: Optimizer, options: list[Options], values: list[Tensor]) -> Optimizer:
    params = [torch.nn.Parameter(value.clone()) for value in values]
    each = len(_SHAPES)
    return fresh(optimizer, options, [params[first : first + each] for first in range(0, len(params), each)])


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _step(optimizer: Optimizer, grads: list[Tensor]) -> None:
    for param, grad in zip(_params(optimizer), grads, strict=True):
        param.grad = grad.clone()  # some optimizers write into it
    optimizer.step()


def _rows(tensor: Tensor, world_size: int) -> Tensor:
    """``[world_size, s]``: one flat slice a rank, the last one padded with zeros."""
    missing = -tensor.numel() % world_size
    return torch.nn.functional.pad(tensor.flatten(), (0, missing)).view(world_size, -1)


# What is stepped, and with which options


def _gradients(starts: list[Tensor], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """A lasting direction of rank 2, so that momenta build up, and noise of full rank."""
    directions = [_direction(start.shape, generator) for start in starts]
    for number, size in enumerate(_SIZES):
        grads = [d + 0.5 * _randn(d.shape, generator) for d in directions]
        for grad in grads:
            grad.mul_(size * _ramp(grad.shape).flip(0))
            grad[0].mul_(number % 5 != 3)  # a row without gradients, as an embedding has
        yield grads


def _direction(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    rows, columns = shape[0], math.prod(shape[1:])
    return (_randn((rows, 2), generator) @ _randn((2, columns), generator)).view(*shape)


def _randn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _ramp(shape: Sequence[int]) -> Tensor:
    """From 0.2 to 3 along the flat tensor."""
    return torch.linspace(0.2, 3, math.prod(shape), dtype=torch.float32, device="cpu").view(*shape)


def _options_to_try(optimizer: Optimizer) -> list[Options]:
    """Those of groups that differ in more than the size of a number; a learning rate of next to nothing is raised.

    An option that takes many values is a group's name or number, and switches nothing.
    """
    groups = list(map(_own_options, optimizer.param_groups))
    values: defaultdict[str, set[Any]] = defaultdict(set)
    for name, value in (item for group in groups for item in group.items()):
        values[name].add(_kind(value))
    switches = [name for name, seen in values.items() if len(seen) <= _MOST_VALUES]
    kinds: dict[tuple[Any, ...], Options] = {}
    for group in groups:
        kinds.setdefault(tuple(_kind(group.get(name)) for name in switches), group)
    tried = list(kinds.values())[:_MOST_GROUPS]
    for group in tried:
        lr = group.get("lr")
        if isinstance(lr, (int, float, Tensor)) and lr < _LEAST_LR:
            group["lr"] = torch.full_like(lr, _TRIAL_LR) if isinstance(lr, Tensor) else _TRIAL_LR
    return copy.deepcopy(tried)


def _kind(value: Any) -> Any:
    """Of a real number its sign (weight decay or none), of anything else what it says."""
    if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1):
        return int(value > 0) - int(value < 0)
    if isinstance(value, (tuple, list)):
        return tuple(_kind(item) for item in value)
    return repr(value)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Puts back the random number generators, and keeps out warnings, global step hooks, a default device."""
    python_state = random.getstate()
    with torch.random.fork_rng([]), torch.device("cpu"), _without_global_hooks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python_state)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    registries: list[dict[int, Callable[..., Any]]] = [
        _torch_optimizer._global_optimizer_pre_hooks,
        _torch_optimizer._global_optimizer_post_hooks,
    ]
    kept = [dict(registry) for registry in registries]
    for registry in registries:
        registry.clear()
    try:
        yield
    finally:
        for registry, hooks in zip(registries, kept, strict=True):
            registry.update(hooks)
