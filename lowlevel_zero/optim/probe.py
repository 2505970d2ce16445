"""Probes: fresh optimizers of a class step small parameters and parts of them; the results must be equal.

The parts are flat slices, or some of the parameters, as the ranks would own them. The optimizers are made by the
class's constructor, with the options that the optimizer has recorded.
"""

from __future__ import annotations

import inspect
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

Options: TypeAlias = dict[str, Any]
# Yields the gradients of one step after the other for the whole parameters that it is given, as they are then.
Gradients: TypeAlias = Callable[[Sequence[Tensor], torch.Generator], Iterator[list[Tensor]]]

# A matrix; a convolution's kernel, which some classes treat apart; and a matrix that is large enough to be quantised,
# of which its blocks of elements take all, while its slices end inside a block.
_SHAPES = ((7, 7), (5, 3, 3, 3), (176, 176))
_LARGE = (16, 12, 5, 4, 3, 2)  # a shape of as many dimensions as a parameter has
_RANKS = 3  # of which the first one's slices are tried; they end inside rows
_LR = 1e-3  # whatever the optimizer's is: a schedule that warms up from 0 may not have begun yet
_SIZES = (0.01, 0.01, 0.01, 1.0, 0.3, 3.0, 1.0, 1.0, 1000.0, 1000.0, 1.0, 1.0)  # of the gradients of each step
_ALONG = 0.003  # less than the angle at which AdamP begins, for the largest parameter of ``_SHAPES``
_TOLERANCE = 1e-5  # of the largest movement since the start
_ROUNDINGS = len(_SIZES) * torch.finfo(torch.float32).eps  # of the element: each step rounds it
_LEAST_MOVEMENT = 1e-5  # of the largest element; with less, rounding would hide a difference


class NoProbe(Exception):
    """Raised if no second optimizer of the class can be made, or if its steps prove nothing."""


def probe_elements(optimizer: Optimizer) -> str | None:
    """Compare slices with whole parameters under fresh optimizers, and describe a difference; None: they are equal.

    If it can't be tried, the result says why. Runs in fp32 on the CPU. ``optimizer`` and random number generators stay
    unchanged.
    """
    return _tried(_first_difference, optimizer)


def probe_parameters(optimizer: Optimizer, dims: Sequence[int]) -> str | None:
    """Compare parameters that two ranks own with ones stepped together, and describe a difference; None: equal.

    Each rank steps the parameters that it owns, with nothing in the place of the others. The parameters have these
    numbers of dimensions. Some have no gradient in one step, unless the class can't step so at all. Else as
    ``probe_elements``.
    """
    try:
        with _undisturbed():
            return _difference_of_owned(optimizer, dims, drops=True)
    except NoProbe:
        return _tried(partial(_difference_of_owned, dims=dims, drops=False), optimizer)


def needs_a_parameter(optimizer: Optimizer) -> bool:
    """Return whether a fresh optimizer of this class fails to step empty param groups; False if none can be made."""
    try:
        with _undisturbed():
            options = [_own_options(group) for group in optimizer.param_groups]
            matrix = torch.zeros(_LARGE[:2], device="cpu")
            other = _fresh(optimizer, options, [[torch.nn.Parameter(matrix)] for _ in options])
            for group in other.param_groups:
                group["params"] = []
            with suppress(Exception):  # whatever the class raises
                other.step()
                return False
            return True
    except NoProbe:
        return False


def _tried(difference: Callable[[Optimizer], str | None], optimizer: Optimizer) -> str | None:
    try:
        with _undisturbed():
            return difference(optimizer)
    except NoProbe as failure:
        return f"it could not be tried ({failure})"


def full_name(optimizer: Optimizer) -> str:
    """Return the class's module and name, without private modules, from which torch moves classes."""
    cls = type(optimizer)
    return re.sub(r"\._[a-z]\w*\.", ".", f"{cls.__module__}.{cls.__qualname__}")


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
    with _undisturbed():
        params: list[Tensor] = [
            torch.nn.Parameter(_zeros(shape, dtype, group["params"])) for group in optimizer.param_groups
        ]
        options = [_own_options(group) for group in optimizer.param_groups]
        other = make(params) if make else _fresh(optimizer, options, [[p] for p in params])
        _step(other, params, map(torch.zeros_like, params))
        return [other.state.get(p, {}) for p in params]


def missing_in(
    optimizer: Optimizer, numel: int, groups: Sequence[Mapping[str, Any]], states: Mapping[int, Options]
) -> str | None:
    """Return the key that a fresh optimizer lacks to step with these saved ``groups`` and ``states``, or None.

    None: nothing, or it could not be tried. ``states`` are those of one parameter of ``numel`` elements in each group
    that has one.
    """
    try:
        with _undisturbed():
            params: list[Tensor] = [torch.nn.Parameter(torch.zeros(numel, device="cpu")) for _ in groups]
            options = [_own_options(group) for group in optimizer.param_groups]
            other = _fresh(optimizer, options, [[p] for p in params])
            _step(other, params, map(torch.zeros_like, params))
            saved = [{**_own_options(group), "params": [at]} for at, group in enumerate(groups)]
            try:
                other.load_state_dict({"state": dict(states), "param_groups": saved})
                _step(other, params, map(torch.zeros_like, params))
            except KeyError as missing:
                return str(missing)
    except NoProbe:
        pass
    return None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype | None, likes: Sequence[Tensor]) -> Tensor:
    return likes[0].new_zeros(shape) if likes and dtype is None else torch.zeros(shape, dtype=dtype, device="cpu")


# ---- another optimizer of the class ----


def _fresh(optimizer: Optimizer, options: Sequence[Options], params: Sequence[Sequence[Tensor]]) -> Optimizer:
    """Make a new optimizer of the same class over ``params``, and return it; each group gets its ``options``.

    The constructor's arguments are looked up by name among the defaults and the attributes. An argument that is found
    in neither takes its default.
    """
    recorded = {name.removeprefix("_"): value for name, value in vars(optimizer).items()} | optimizer.defaults
    arguments = list(inspect.signature(type(optimizer)).parameters.values())
    named = {each.name: each for each in arguments if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    named.pop("params" if "params" in named else next(iter(named)))
    unknown = [name for name, each in named.items() if name not in recorded and each.default is each.empty]
    if unknown:
        raise NoProbe(f"its constructor got {', '.join(unknown)}, which neither its defaults nor its attributes record")
    names = [name for name in named if name in recorded]
    if any(each.kind is each.VAR_KEYWORD for each in arguments):
        names += [name for name in optimizer.defaults if name not in names]
    groups = [{**own, "params": list(members)} for own, members in zip(options, params, strict=True)]
    fresh = type(optimizer)(groups, **{name: _copied(name, recorded[name]) for name in names})
    train = getattr(fresh, "train", None)
    if callable(train):  # schedule-free ones step in that mode alone
        train()
    return fresh


def _copied(name: str, value: Any) -> Any:
    """Return a copy of an option; raises ``NoProbe`` for objects that must not be copied."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().cpu().clone()
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_copied(name, item) for item in value)
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))
    if plain or (callable(value) and not isinstance(value, torch.nn.Module)):
        return value
    raise NoProbe(f"its option {name} is a {type(value).__name__}, which a probe does not copy")


def _own_options(group: Mapping[str, Any]) -> Options:
    return {name: _copied(name, value) for name, value in group.items() if name not in ("params", "param_names")}


def _options_to_try(optimizer: Optimizer) -> list[Options]:
    """Return one param group's options for each kind: groups that differ only in numbers count as one."""
    kinds: dict[str, Options] = {}
    for group in map(_own_options, optimizer.param_groups):
        if "lr" in group:
            group["lr"] = 0 * group["lr"] + _LR  # a tensor, where it is one
        kind = {name: bool(value) if isinstance(value, (float, Tensor)) else value for name, value in group.items()}
        kinds.setdefault(repr(sorted(kind.items())), group)
    return list(kinds.values())


# ---- comparisons ----


def _first_difference(optimizer: Optimizer) -> str | None:
    """Compare slices with whole parameters under several kinds of gradients; describe the first difference, or None.

    Each sequence starts anew: some classes look at a gradient's angle to the weights, or whether both grow.
    """
    differences = (_difference(optimizer, gradients) for gradients in (_lasting, _orthogonal, _outward))
    return next(filter(None, differences), None)


def _difference(optimizer: Optimizer, gradients: Gradients) -> str | None:
    """Step whole parameters and slices of them with the same ``gradients``, and describe a difference, or None."""
    options = _options_to_try(optimizer)
    generator = torch.Generator().manual_seed(0)
    starts = [0.02 * _randn(shape, generator) for _ in options for shape in _SHAPES]
    wholes = [torch.nn.Parameter(start.clone()) for start in starts]
    slices = [torch.nn.Parameter(_first_slice(start).clone()) for start in starts]
    whole, sliced = (_fresh(optimizer, _options_to_try(optimizer), _by_group(params)) for params in (wholes, slices))
    for grads in gradients(wholes, generator):
        _step(whole, wholes, grads)
        _step(sliced, slices, map(_first_slice, grads))
    for start, param, own in zip(starts, wholes, slices, strict=True):
        gap = _gap(_first_slice(param.detach()), own, param, start)
        if gap is not None:
            return (
                f"a {tuple(param.shape)} parameter and its {_RANKS} flat slices differ by {gap:.1e} "
                "of the update in a probe, so its updates depend on the other elements, on the shape, or on random "
                "numbers"
            )
    return None


def _gap(expected: Tensor, got: Tensor, param: Tensor, start: Tensor) -> float | None:
    """Return two results' difference as a share of ``param``'s movement; None if rounding; raise if that is unclear."""
    movement, gap = (param - start).abs().amax(), (expected - got).abs()
    if not (movement + gap.amax()).isfinite():
        raise NoProbe("a probe's parameters became infinite or NaN")
    if (gap > _TOLERANCE * movement + _ROUNDINGS * expected.abs()).any():
        return float(gap.amax() / movement)
    if movement <= _LEAST_MOVEMENT * start.abs().amax():
        raise NoProbe(f"{len(_SIZES)} steps hardly moved a probe's parameter, which proves nothing")
    return None


def _difference_of_owned(optimizer: Optimizer, dims: Sequence[int], drops: bool) -> str | None:
    """Step parameters together, and split over two simulated owners, and describe a difference, or None.

    There are two of each number of dimensions. With ``drops`` a rank's parameters have no gradients in one step.
    """
    options = _options_to_try(optimizer)
    shapes = [shape for dim in dims for shape in (_LARGE[:dim], (*_LARGE[1:dim], 8)[:dim])]
    generator = torch.Generator().manual_seed(0)
    starts = [0.02 * _randn(shape, generator) for _ in options for shape in shapes]
    wholes: list[Tensor] = [torch.nn.Parameter(start.clone()) for start in starts]
    owned: list[list[Tensor]] = [[torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2)]
    whole, *ranks = (
        _fresh(optimizer, _options_to_try(optimizer), _by_group(params, len(shapes))) for params in (wholes, *owned)
    )
    for rank, (each, params) in enumerate(zip(ranks, owned, strict=True)):
        _take_over(each, params, rank)
    for number, grads in enumerate(_lasting(wholes, generator)):
        given = [None if drops and number == 4 and at % 2 else grad for at, grad in enumerate(grads)]
        _step(whole, wholes, given)
        for rank, (each, params) in enumerate(zip(ranks, owned, strict=True)):
            _step(each, params[rank::2], given[rank::2])
    for at, (start, param) in enumerate(zip(starts, wholes, strict=True)):
        gap = _gap(param.detach(), owned[at % 2][at].detach(), param, start)
        if gap is not None:
            return (
                f"a {tuple(param.shape)} parameter that is stepped beside others and without them differs by {gap:.1e} "
                "of the update in a probe, so its updates depend on other parameters, or on random numbers"
            )
    return None


def _take_over(optimizer: Optimizer, params: list[Tensor], rank: int) -> None:
    """Turn an optimizer into one rank's: keep every second parameter, as a copy with its state, and drop the others."""
    own: dict[Tensor, Tensor] = {}
    for at, param in enumerate(params):
        state = optimizer.state.pop(param, None)
        if at % 2 == rank:
            own[param] = params[at] = torch.nn.Parameter(param.detach().clone())
            if state is not None:
                optimizer.state[params[at]] = state
    for group in optimizer.param_groups:
        group["params"] = [own[param] for param in group["params"] if param in own]


def _by_group(params: Sequence[Tensor], count: int = len(_SHAPES)) -> list[Sequence[Tensor]]:
    return [params[first : first + count] for first in range(0, len(params), count)]


def _step(optimizer: Optimizer, params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()  # some optimizers write into it
    optimizer.step()


def _first_slice(tensor: Tensor) -> Tensor:
    return tensor.flatten()[: -(-tensor.numel() // _RANKS)]


def _lasting(weights: Sequence[Tensor], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Yield noisy gradients with a constant direction, so that momenta build up.

    In some steps a row has none, as an embedding's.
    """
    directions = [_randn(weight.shape, generator) for weight in weights]
    for number, size in enumerate(_SIZES):
        grads = [size * (direction + 0.5 * _randn(direction.shape, generator)) for direction in directions]
        for grad in grads:
            if grad.dim():
                grad[0].mul_(number % 5 != 3)
        yield grads


def _orthogonal(weights: Sequence[Tensor], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Yield gradients that are nearly orthogonal to the weights, row by row; the first one is random.

    AdamP and SGDP remove the part that is parallel to the weights (Heo et al., 2021).
    """
    for number in range(len(_SIZES)):
        yield [_randn(w.shape, generator) if number == 0 else _across(w.detach(), generator) for w in weights]


def _across(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random gradient that has ``_ALONG`` of its size in the weight's direction, in each row."""
    rows, noise = weight.flatten(1), _randn(weight.shape, generator).flatten(1)
    unit = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    across: Tensor = noise - (noise * unit).sum(1, keepdim=True) * unit
    across.add_(unit * torch.linalg.vector_norm(across, dim=1, keepdim=True), alpha=_ALONG)
    return across.view(weight.shape)


def _outward(weights: Sequence[Tensor], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Yield gradients that grow, and lead the weights away from zero: some step sizes follow the growth of norms."""
    for number in range(len(_SIZES)):
        yield [2**number * (_randn(w.shape, generator) - w.detach() / w.detach().std()) for w in weights]


def _randn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Run the body without effect on random number generators, and turn its exceptions into ``NoProbe``.

    Whatever another's class raises in it is a ``NoProbe``. Steps that their class compiles, which takes minutes, run as
    they are written; torch before 2.6 compiles them.
    """
    python_state = random.getstate()
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
