"""Tries an optimizer on slices: throwaway twins step a few small parameters, whole and in slices.

One twin steps the parameters whole; more twins step the flat slices of the same parameters, one twin a rank. All
must arrive at the same values.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

Options: TypeAlias = dict[str, Any]

# What a trial steps: a small matrix; a convolution's kernel, which some classes treat apart; and a matrix
# larger than the sizes from which some classes quantise (4,096 or 16,384 elements), which divides into their
# blocks of elements while its slices do not.
_SHAPES = ((7, 7), (5, 3, 3, 3), (176, 176))
_WORLD_SIZES = (2, 5)  # halves, and slices that end inside of blocks

# How large the gradients of each step are: small ones, usual ones, and some that any clipping would clip.
_SIZES = (0.01,) * 4 + (1.0, 1.0, 0.3, 3.0) * 5 + (1000.0,) * 4

_RELATIVE_TOLERANCE = 1e-5  # of the largest movement since the start
_ROUNDINGS = 4 * torch.finfo(torch.float32).eps  # of the element: each step rounds it once
_LEAST_MOVEMENT = 1e-5  # of the largest element; with less, rounding would hide a difference

_CAUSES = "so its updates depend on the other elements, on the shape, or on random numbers"

_LEAST_LR, _TRIAL_LR = 1e-6, 1e-3  # a schedule that warms up from 0 has not begun yet
_MOST_GROUPS, _MOST_VALUES = 16, 8
_MOST_COPIED_ELEMENTS = 1 << 16


class NoTrial(Exception):
    """No twin can be made, or what it did proves nothing."""


def try_on_slices(optimizer: Optimizer) -> str | None:
    """What tells whole parameters from their slices in a trial of ``optimizer``, None if nothing does.

    Twins are copies first, then made by the constructor; they run on the CPU first, then on the parameters'
    device. ``optimizer`` stays as it is, and only small tensors of it are copied.

    Raises:
        NoTrial: no way of trying it worked; the message says what was tried and what came of it.
    """
    failures = []
    for device, build in itertools.product(_trial_devices(optimizer), (_copied, _rebuilt)):
        try:
            with _undisturbed(device):
                return _first_difference(optimizer, build, device)
        except Exception as error:  # whatever a stranger's class raises: it could not be tried this way
            failures.append((f"{build.__name__.strip('_')} on {device}", error))
    told = "; ".join(f"{how}: {type(error).__name__}: {error}" for how, error in failures)
    raise NoTrial(told) from failures[0][1]


def first_states(optimizer: Optimizer, numel: int, dtype: torch.dtype | None = None) -> list[dict[str, Any]]:
    """The state that a flat parameter of ``numel`` elements gets in its first step: one dict for each param group.

    The parameter is one of ``dtype`` on the host; None: one like the group's first.

    Found out by twins, as above, with a matrix of one row where the class wants matrices; ``optimizer`` stays as it
    is, and has not been asked for more than its options.

    Raises:
        NoTrial: no twin could be made.
    """
    with _SmallTensorsOnly():
        options = copy.deepcopy([_without_params(group) for group in optimizer.param_groups])
    likes = [
        group["params"][0] if group["params"] and dtype is None else torch.zeros(0, dtype=dtype)
        for group in optimizer.param_groups
    ]
    for build, shape in itertools.product((_copied, _rebuilt), ((numel,), (1, numel))):
        params: list[Tensor] = [torch.nn.Parameter(like.new_zeros(shape)) for like in likes]
        groups = [{**copy.deepcopy(own), "params": [p]} for own, p in zip(options, params, strict=True)]
        try:
            with _undisturbed(likes[0].device):
                twin = _Twin(build(optimizer, groups), params)
                twin.step([torch.zeros_like(p) for p in params])
            return [_flat(twin.optimizer.state.get(p, {}), shape) for p in params]
        except Exception as error:  # whatever a stranger's class raises
            failure = error
    raise NoTrial(f"{type(failure).__name__}: {failure}") from failure


def _flat(state: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    like_it = {key for key, value in state.items() if isinstance(value, Tensor) and value.shape == shape}
    return {key: value.flatten() if key in like_it else value for key, value in state.items()}


class _Twin(NamedTuple):
    """A throwaway optimizer and what it steps."""

    optimizer: Optimizer
    params: list[Tensor]  # fp32 leaves: one of each shape for every group tried

    def step(self, grads: list[Tensor]) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()  # some optimizers write into it
        type(self.optimizer).step(self.optimizer)  # a scheduler's patch of the instance steps the original


_Build: TypeAlias = Callable[[Optimizer, list[Options]], Optimizer]


def _first_difference(optimizer: Optimizer, build: _Build, device: torch.device) -> str | None:
    """What tells the whole parameters from their slices, None if nothing does."""
    options = _trial_options(optimizer, device)
    generator = torch.Generator().manual_seed(0)
    starts = [value.to(device) for value in _starting_values(len(options), generator)]
    whole = _twin(optimizer, build, options, starts)
    ranks_of = {size: _twins_of_ranks(optimizer, build, options, starts, size) for size in _WORLD_SIZES}
    for number, grads in enumerate(_gradients(starts, generator), start=1):
        whole.step(grads)
        for ranks in ranks_of.values():
            _step_ranks(ranks, grads)
            difference = _difference(whole, ranks, starts)
            if difference is not None:
                return f"{difference} in step {number} of a trial, {_CAUSES}"
    _check_that_all_moved(whole.params, starts)
    return None


def _twin(optimizer: Optimizer, build: _Build, options: list[Options], values: list[Tensor]) -> _Twin:
    params: list[Tensor] = [torch.nn.Parameter(value.clone()) for value in values]
    each = len(_SHAPES)
    shares = [params[first : first + each] for first in range(0, len(params), each)]
    groups = [{**copy.deepcopy(own), "params": share} for own, share in zip(options, shares, strict=True)]
    return _Twin(build(optimizer, groups), params)


def _twins_of_ranks(
    optimizer: Optimizer, build: _Build, options: list[Options], starts: list[Tensor], world_size: int
) -> list[_Twin]:
    """One twin a rank, as in training: what sums over its parameters, sums over one rank's slices only."""
    rows = [_rows(start, world_size) for start in starts]
    return [_twin(optimizer, build, options, [row[rank] for row in rows]) for rank in range(world_size)]


def _rows(tensor: Tensor, world_size: int) -> Tensor:
    """[world_size, s]: one flat slice a rank, the last one padded with zeros."""
    missing = -tensor.numel() % world_size
    return torch.nn.functional.pad(tensor.flatten(), (0, missing)).view(world_size, -1)


def _step_ranks(ranks: list[_Twin], grads: list[Tensor]) -> None:
    rows = [_rows(grad, len(ranks)) for grad in grads]
    for rank, twin in enumerate(ranks):
        twin.step([row[rank] for row in rows])


def _difference(whole: _Twin, ranks: list[_Twin], starts: list[Tensor]) -> str | None:
    for param, start, *slices in zip(whole.params, starts, *(twin.params for twin in ranks), strict=True):
        value = param.detach()
        joined = torch.cat([one.detach() for one in slices])[: value.numel()].view_as(value)
        movement, gap = (value - start).abs().amax(), (value - joined).abs()
        if not (movement + gap.amax()).isfinite():
            raise NoTrial("a trial's parameters became infinite or NaN")
        if (gap > _RELATIVE_TOLERANCE * movement + _ROUNDINGS * value.abs()).any():
            share, shape = float(gap.amax() / movement), tuple(value.shape)
            return f"a {shape} parameter and its {len(ranks)} flat slices differ by {share:.1e} of the update"
    return None


def _check_that_all_moved(params: list[Tensor], starts: list[Tensor]) -> None:
    for param, start in zip(params, starts, strict=True):
        if (param.detach() - start).abs().amax() <= _LEAST_MOVEMENT * start.abs().amax():
            raise NoTrial(f"{len(_SIZES)} steps hardly moved a trial's parameter, which proves nothing")


# What a trial steps, and with which options


def _starting_values(groups: int, generator: torch.Generator) -> Iterator[Tensor]:
    """As small as a network's weights; they grow along the parameter, so that its slices differ in norm."""
    for shape in _SHAPES * groups:
        yield 0.02 * _randn(shape, generator) * _ramp(shape)


def _gradients(starts: list[Tensor], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """A lasting direction of rank 2, so that momenta build up, and noise of full rank."""
    directions = [_direction(start.shape, generator) for start in starts]
    for number, size in enumerate(_SIZES):
        grads = [d + 0.5 * _randn(d.shape, generator) for d in directions]
        for grad in grads:
            grad.mul_(size * _ramp(grad.shape).flip(0))
            grad[0].mul_(number % 5 != 3)  # a row without gradients, as an embedding has
        yield [grad.to(start.device) for grad, start in zip(grads, starts, strict=True)]


def _direction(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    rows, columns = shape[0], math.prod(shape[1:])
    return (_randn((rows, 2), generator) @ _randn((2, columns), generator)).view(*shape)


def _randn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _ramp(shape: Sequence[int]) -> Tensor:
    """From 0.2 to 3 along the flat tensor."""
    return torch.linspace(0.2, 3, math.prod(shape), dtype=torch.float32, device="cpu").view(*shape)


def _trial_options(optimizer: Optimizer, device: torch.device) -> list[Options]:
    """The options of the groups that are worth a trial, as copies, ready for a twin on ``device``."""
    with _SmallTensorsOnly():
        groups = [_without_params(group) for group in optimizer.param_groups]
        groups = copy.deepcopy([groups[index] for index in _distinct(groups)])
    for group in groups:
        group.update({name: _moved(value, device) for name, value in group.items()})
        if "lr" in group:
            group["lr"] = _trial_lr(group["lr"])
    return groups


def _without_params(group: Options) -> Options:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _distinct(groups: list[Options]) -> list[int]:
    """Indices of groups that differ in more than the size of a number.

    An option that takes many values is a group's name or number, and switches nothing.
    """
    kinds = [{name: _kind(value) for name, value in group.items()} for group in groups]
    values: defaultdict[str, set[Any]] = defaultdict(set)
    for kind in kinds:
        for name, value in kind.items():
            values[name].add(value)
    switches = sorted(name for name, seen in values.items() if len(seen) <= _MOST_VALUES)
    first: dict[tuple[Any, ...], int] = {}
    for index, kind in enumerate(kinds):
        first.setdefault(tuple(kind.get(name) for name in switches), index)
    return list(first.values())[:_MOST_GROUPS]


def _kind(value: Any) -> Any:
    """Of a real number its sign (weight decay or none), of anything else what it says."""
    if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1):
        return int(value > 0) - int(value < 0)
    if isinstance(value, (tuple, list)):
        return tuple(_kind(item) for item in value)
    return repr(value)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device) for item in value)
    return value


def _trial_lr(lr: Any) -> Any:
    """``lr``, or where a schedule has it at next to nothing, a usual one of the same type."""
    if not isinstance(lr, (int, float, Tensor)) or lr >= _LEAST_LR:
        return lr
    return torch.full_like(lr, _TRIAL_LR) if isinstance(lr, Tensor) else _TRIAL_LR


# How a twin is made


def _copied(optimizer: Optimizer, groups: list[Options]) -> Optimizer:
    """A twin that has all the attributes of ``optimizer``, copied, but its own parameters and no state.

    This comes first: it keeps whatever the constructor was told. It fails on classes whose constructor fills
    the state, and on those that hold their parameters elsewhere too.
    """
    cls, attributes = type(optimizer), vars(optimizer)
    if hasattr(cls, "__del__") or not {"param_groups", "state"} <= attributes.keys():
        raise NoTrial("it owns more than its attributes")
    if any(isinstance(value, (bool, str)) for state in optimizer.state.values() for value in _items(state)):
        raise NoTrial("its state tells parameters apart")
    twin: Optimizer = cls.__new__(cls)
    with _SmallTensorsOnly():
        kept = copy.deepcopy(_attributes_to_keep(optimizer), {id(optimizer): twin})
    vars(twin).update(kept, param_groups=groups)
    return twin


def _attributes_to_keep(optimizer: Optimizer) -> Options:
    """Without parameters, their states, and the hooks that others registered."""
    kept = {name: value for name, value in vars(optimizer).items() if name != "param_groups"}
    for name, value in kept.items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            kept[name] = OrderedDict((k, hook) for k, hook in value.items() if _is_method_of(hook, optimizer))
    states = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    return {**kept, "state": defaultdict(dict, states)}


def _items(state: Any) -> Iterable[Any]:
    return state.values() if isinstance(state, dict) else ()


def _is_method_of(function: Any, owner: object) -> bool:
    return getattr(function, "__self__", None) is owner


def _rebuilt(optimizer: Optimizer, groups: list[Options]) -> Optimizer:
    """A twin made by the constructor, with the arguments that the defaults or the attributes recorded."""
    recorded = {name.removeprefix("_"): value for name, value in vars(optimizer).items()} | optimizer.defaults
    names = _argument_names(type(optimizer))
    unknown = [name for name in names if name not in recorded]
    if unknown:
        raise NoTrial(f"what its constructor got as {', '.join(unknown)} is recorded nowhere")
    with _SmallTensorsOnly():
        arguments = copy.deepcopy({name: recorded[name] for name in names})
    return type(optimizer)(groups, **arguments)


def _argument_names(cls: type) -> list[str]:
    """What a constructor takes besides ``self`` and the parameters; ``**kwargs`` go to the next class."""
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        arguments = list(inspect.signature(vars(base)["__init__"]).parameters.values())
        named = [a for a in arguments if a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY)]
        names += [a.name for a in named[2:]]
        if all(a.kind is not a.VAR_KEYWORD for a in arguments):
            break
    return list(dict.fromkeys(names))


class _SmallTensorsOnly(TorchFunctionMode):
    """Lets ``copy.deepcopy`` copy small tensors (a step count, a learning rate), but no model."""

    def __init__(self) -> None:
        super().__init__()
        self._left = _MOST_COPIED_ELEMENTS

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Options | None = None
    ) -> Any:
        self._left -= sum(arg.numel() for arg in args if isinstance(arg, Tensor))
        if self._left < 0:
            raise NoTrial("its options or attributes hold large tensors, which a trial does not copy")
        return func(*args, **(kwargs or {}))


# Where a trial runs


def _trial_devices(optimizer: Optimizer) -> list[torch.device]:
    """The CPU, then the parameters' device for classes that run only there."""
    devices = {param.device: None for group in optimizer.param_groups for param in group["params"]}
    return [torch.device("cpu"), *(device for device in devices if device.type not in ("cpu", "meta"))][:2]


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Puts back the random number generators, and keeps out warnings, global step hooks, a default device."""
    python_state = random.getstate()
    devices = [] if device.type == "cpu" else [device]
    fork = torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type)
    with fork, device, _without_global_step_hooks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python_state)


@contextmanager
def _without_global_step_hooks() -> Iterator[None]:
    module = sys.modules[Optimizer.__module__]
    registries = [getattr(module, f"_global_optimizer_{when}_hooks", {}) for when in ("pre", "post")]
    kept = [dict(registry) for registry in registries]
    for registry in registries:
        registry.clear()
    try:
        yield
    finally:
        for registry, hooks in zip(registries, kept, strict=True):
            registry.update(hooks)
