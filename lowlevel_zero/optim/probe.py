"""Probes: fresh optimizers of a class step small parameters and parts of them; the results must be equal.

The parts are flat slices, or some of the parameters, as the ranks would own them. The optimizers are made by the
class's constructor, with the options that the optimizer has recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from numbers import Number
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from .trials import (
    LARGE,
    NoProbe,
    counters,
    kinds_to_try,
    refuse_communication,
    skip_ahead,
    step,
    twin,
    undisturbed,
    unlike_settings,
)

# Yields the gradients of one step after the other for the whole parameters that it is given, as they are then.
Gradients: TypeAlias = Callable[[Sequence[Tensor], torch.Generator], Iterator[list[Tensor]]]
# What ``counters`` has told.
Counters: TypeAlias = dict[tuple[int, Any], float]

# A matrix; a convolution's kernel, which some classes treat apart; and a matrix that is large enough to be quantised,
# of which its blocks of elements take all, while its slices end inside a block.
_SHAPES = ((7, 7), (5, 3, 3, 3), (176, 176))
# Parameters whose slices are single numbers, which some classes treat apart, and small ones.
_SMALL = ((3,), (), (7, 7), (5, 3, 3, 3))
_RANKS = 3  # of which the first one's slices are tried, and the last one's of small parameters; they end inside rows
_SIZES = (0.01, 0.01, 0.01, 1.0, 0.3, 3.0, 1.0, 1.0, 1000.0, 1000.0, 1.0, 1.0)  # of the gradients of each step
_ALONG = 0.003  # less than the angle at which AdamP begins, for the largest parameter of ``_SHAPES``
_TOLERANCE = 1e-5  # of the largest movement since the start
_ROUNDINGS = len(_SIZES)  # of the element: each step rounds it
_EARLY = 3  # steps in which all parameters have gradients, after which param groups are compared
_LATER = 4  # steps late in a run
_LEAST_MOVEMENT = 1e-5  # of the largest element; with less, rounding would hide a difference


def probe_elements(optimizer: Optimizer, dtypes: Collection[torch.dtype] = ()) -> str | None:
    """Compare slices with whole parameters under fresh optimizers, and describe a difference; None: they are equal.

    If it can't be tried, the result says why. Runs in fp32, and then shortly in ``dtypes``, on the CPU. ``optimizer``
    and random number generators stay unchanged.
    """
    return _tried(_first_difference, optimizer) or _of_dtypes(_last_difference, optimizer, dtypes)


def probe_parameters(optimizer: Optimizer, dims: Sequence[int], dtypes: Collection[torch.dtype] = ()) -> str | None:
    """Compare parameters that two ranks own with ones stepped together, and describe a difference; None: equal.

    Each rank steps the parameters that it owns, with nothing in the place of the others. The parameters have these
    numbers of dimensions. Some have no gradient in one step, unless the class can't step so at all. Else as
    ``probe_elements``.
    """
    try:
        with undisturbed():
            refuse_communication(optimizer)
            found = _difference_of_owned(optimizer, dims, drops=True)
    except NoProbe:
        found = _tried(partial(_difference_of_owned, dims=dims, drops=False), optimizer)
    return found or _of_dtypes(partial(_difference_of_owned, dims=dims, drops=False), optimizer, dtypes)


def _tried(difference: Callable[[Optimizer], str | None], optimizer: Optimizer) -> str | None:
    """Return the difference that a trial of the optimizer finds, or why it could not be tried; None for none."""
    try:
        with undisturbed():
            refuse_communication(optimizer)
            return difference(optimizer)
    except NoProbe as failure:
        return f"it could not be tried ({failure})"


def _of_dtypes(
    difference: Callable[..., str | None], optimizer: Optimizer, dtypes: Collection[torch.dtype]
) -> str | None:
    """Return the first difference in one of ``dtypes``, for which some classes have other rules, or None.

    One that can't be tried, as where numbers are too large for fp16, tells nothing.
    """
    for dtype in dtypes:
        with suppress(NoProbe), undisturbed():
            before = torch.get_rng_state()
            found = difference(optimizer, dtype=dtype)
            if found is not None:
                return f"in {dtype}, {found}"
            if not torch.equal(before, torch.get_rng_state()):  # a rounding that is drawn isn't told from any other
                return f"it draws random numbers for {dtype}"
    return None


# ---- comparisons ----


def _first_difference(optimizer: Optimizer) -> str | None:
    """Compare slices with whole parameters under several kinds of gradients; describe the first difference, or None.

    Each sequence starts anew: some classes look at a gradient's angle to the weights, or whether both grow.
    """
    differences = (_difference(optimizer, each) for each in (_lasting, _orthogonal, _outward, _inward))
    return next(filter(None, differences), None) or _last_difference(optimizer)


def _last_difference(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> str | None:
    """Compare the last rank's slices of small parameters with the whole ones, and describe a difference, or None."""
    return _difference(optimizer, _lasting, _SMALL, _last_slice, dtype)


def _difference(
    optimizer: Optimizer,
    gradients: Gradients,
    shapes: Sequence[tuple[int, ...]] = _SHAPES,
    cut: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> str | None:
    """Step whole parameters and slices of them with the same ``gradients``, and describe a difference, or None.

    ``cut``: returns the slice of a tensor; None: it is the first.
    """
    cut = cut or _first_slice
    kinds = kinds_to_try(optimizer)
    generator = torch.Generator().manual_seed(0)
    starts = [(0.02 * _randn(shape, generator)).to(dtype) for _ in kinds for shape in shapes]
    wholes = [torch.nn.Parameter(start.clone()) for start in starts]
    slices = [torch.nn.Parameter(cut(start).clone()) for start in starts]
    whole, sliced = (twin(optimizer, kinds, params) for params in (wholes, slices))

    unlike: list[str | None] = []

    def run(steps: int | None = None) -> list[Counters]:
        for each in islice(gradients(wholes, generator), steps):
            grads = [grad.to(dtype) for grad in each]
            before = [counters(whole), counters(sliced)]
            step(whole, wholes, grads)
            step(sliced, slices, map(cut, grads))
            unlike.append(unlike_settings(whole, sliced) if len(unlike) < _EARLY else None)
        return before

    def compare() -> str | None:
        for start, param, own in zip(starts, wholes, slices, strict=True):
            gap = _gap(cut(param.detach()), own, param, start)
            if gap is not None:
                return (
                    f"a {tuple(param.shape)} parameter and its {_RANKS} flat slices differ by {gap:.1e} "
                    "of the update in a probe, so its updates depend on the other elements, on the shape, or on random "
                    "numbers"
                )
            key = _state_apart(sliced.state.get(own, {}), own) or _state_apart(whole.state.get(param, {}), param)
            if key is not None:
                return (
                    f"its state {key!r} has tensors in a list, dict or object, or of another shape, which can't be "
                    "sliced"
                )
        return _wrong_state(whole) or _of_settings(unlike)

    return _soon_or_late([whole, sliced], run, compare)


def _state_apart(state: Mapping[str, Any], param: Tensor) -> str | None:
    """Return the first key under which a state has tensors that aren't of the parameter's shape, or objects, or None.

    Single numbers are alike on all ranks. Tensors in lists and dicts can't be told from those that are, and objects
    may hold tensors.
    """
    for key, value in state.items():
        others = [leaf for leaf in tree_leaves(value) if not _is_single(leaf)]
        if any(each is not value or not isinstance(each, Tensor) or each.shape != param.shape for each in others):
            return key
    return None


def _wrong_state(optimizer: Optimizer) -> str | None:
    """Return a text about states that no split can keep, or None.

    Of those under other keys than parameters each rank has a part. A tensor under two keys is two after loading.
    """
    for key, value in optimizer.state.items():
        if isinstance(key, Tensor):
            names: dict[int, str] = {}
            for name, each in value.items():
                first = names.setdefault(id(each), name)
                if first != name and isinstance(each, Tensor):
                    return f"its states {first!r} and {name!r} are one tensor, which would be two when they are loaded"
        elif not all(map(_is_single, tree_leaves(value))):
            return f"its state {key!r}, which is of no parameter, has tensors or objects, which differ between ranks"
    return None


def _is_single(leaf: object) -> bool:
    """Return whether a value among states is a number or text, which is alike on all ranks."""
    if isinstance(leaf, Tensor):
        return leaf.numel() <= 1
    return leaf is None or isinstance(leaf, (Number, str, bytes, torch.dtype, torch.device))


def _of_settings(unlike: Sequence[str | None]) -> str | None:
    """Return a text about a setting that some ranks would make otherwise, or None."""
    key = next(filter(None, unlike), None)
    return f"it sets {key!r} of its param groups, which wouldn't be alike on all ranks" if key else None


def _soon_or_late(
    optimizers: Sequence[Optimizer], run: Callable[[int | None], list[Counters]], compare: Callable[[], str | None]
) -> str | None:
    """Return what ``compare`` finds after a run from the start, or after some steps late in a long one."""
    before = run(None)
    found = compare()
    if found is None:
        with suppress(Exception):  # of counters that stand for more than a number of steps
            for each, counted in zip(optimizers, before, strict=True):
                skip_ahead(each, counted)
            run(_LATER)
            found = compare()
    return found


def _gap(expected: Tensor, got: Tensor, param: Tensor, start: Tensor) -> float | None:
    """Return how far two results differ, as a share of ``param``'s movement; None if by roundings alone.

    Raises:
        NoProbe: the parameter hardly moved, or became infinite or NaN, which proves nothing.
    """
    movement, gap = (param - start).abs().amax(), (expected - got).abs()
    if not (movement + gap.amax()).isfinite():
        raise NoProbe("a probe's parameters became infinite or NaN")
    if (gap > _TOLERANCE * movement + _ROUNDINGS * torch.finfo(param.dtype).eps * expected.abs()).any():
        return float(gap.amax() / movement)
    if movement <= _LEAST_MOVEMENT * start.abs().amax():
        raise NoProbe(f"{len(_SIZES)} steps hardly moved a probe's parameter, which proves nothing")
    return None


def _difference_of_owned(
    optimizer: Optimizer, dims: Sequence[int], drops: bool, dtype: torch.dtype = torch.float32
) -> str | None:
    """Step parameters by one optimizer, and each half of them by one of two, and describe a difference, or None.

    There are two of each number of dimensions. With ``drops`` a rank's parameters have no gradients in one step.
    """
    kinds = kinds_to_try(optimizer)
    shapes = [shape for dim in dims for shape in (LARGE[:dim], (*LARGE[1:dim], 8)[:dim])]
    generator = torch.Generator().manual_seed(0)
    starts = [(0.02 * _randn(shape, generator)).to(dtype) for _ in kinds for shape in shapes]
    wholes: list[Tensor] = [torch.nn.Parameter(start.clone()) for start in starts]
    owned: list[list[Tensor]] = [[torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2)]
    whole, *ranks = (twin(optimizer, kinds, params) for params in (wholes, *owned))
    for rank, (each, params) in enumerate(zip(ranks, owned, strict=True)):
        _take_over(each, params, rank)

    unlike: list[str | None] = []

    def run(steps: int | None = None) -> list[Counters]:
        for number, grads in enumerate(islice(_lasting(wholes, generator), steps)):
            given = [None if drops and number == 4 and at % 2 else grad.to(dtype) for at, grad in enumerate(grads)]
            before = [counters(each) for each in (whole, *ranks)]
            step(whole, wholes, given)
            for rank, (each, params) in enumerate(zip(ranks, owned, strict=True)):
                step(each, params[rank::2], given[rank::2])
            unlike.append(unlike_settings(whole, *ranks) if len(unlike) < _EARLY else None)
        return before

    def compare() -> str | None:
        for at, (start, param) in enumerate(zip(starts, wholes, strict=True)):
            gap = _gap(param.detach(), owned[at % 2][at].detach(), param, start)
            if gap is not None:
                return (
                    f"a {tuple(param.shape)} parameter that is stepped beside others and without them differs by "
                    f"{gap:.1e} of the update in a probe, so its updates depend on other parameters, or on random "
                    "numbers"
                )
            if not at % 2 and whole.state.get(param, {}).keys() != whole.state.get(wholes[at + 1], {}).keys():
                return "it keeps a state with one parameter that others of the same kind lack, and owners change"
        return _wrong_state(whole) or _of_settings(unlike)

    return _soon_or_late([whole, *ranks], run, compare)


def _take_over(optimizer: Optimizer, params: list[Tensor], rank: int) -> None:
    """Turn an optimizer into one rank's: keep every second parameter, as a copy with its state, and drop the others."""
    own: dict[Tensor, Tensor] = {}
    for at, param in enumerate(params):
        state = optimizer.state.pop(param, None)
        if at % 2 == rank:
            own[param] = params[at] = torch.nn.Parameter(param.detach().clone())
            vars(params[at]).update(vars(param))
            if state is not None:
                optimizer.state[params[at]] = state
    for group in optimizer.param_groups:
        group["params"] = [own[param] for param in group["params"] if param in own]


def _first_slice(tensor: Tensor) -> Tensor:
    return tensor.flatten()[: -(-tensor.numel() // _RANKS)]


def _last_slice(tensor: Tensor) -> Tensor:
    """Return the slice of the last rank that has one."""
    size = len(_first_slice(tensor))
    return tensor.flatten()[(tensor.numel() - 1) // size * size :]


def _lasting(weights: Sequence[Tensor], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Yield noisy gradients with a constant direction, so that momenta build up.

    In some steps the first slice has none, as rows of an embedding. A scalar's direction outweighs the noise, or steps
    of one size could end where they began.
    """
    directions = [_randn(weight.shape, generator) for weight in weights]
    directions = [each + each.sign() if each.dim() == 0 else each for each in directions]
    for number, size in enumerate(_SIZES):
        grads = [size * (direction + 0.5 * _randn(direction.shape, generator)) for direction in directions]
        for grad in grads:
            if grad.dim():
                _first_slice(grad).mul_(number % 5 != 3)
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
        yield [2**number * _ramp(w) * (_randn(w.shape, generator) - _unit(w)) for w in weights]


def _inward(weights: Sequence[Tensor], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Yield gradients that grow, and lead the weights towards zero first: some step sizes follow the fall of norms."""
    for number in range(len(_SIZES)):
        yield [2**number * _ramp(w) * (0.1 * _randn(w.shape, generator) + _unit(w)) for w in weights]


def _unit(weight: Tensor) -> Tensor:
    return weight.detach() / weight.detach().std()


def _ramp(weight: Tensor) -> Tensor:
    """Return factors that rise along the elements: slices move by other shares of their norms than the whole does."""
    return torch.linspace(0.1, 1, weight.numel(), dtype=torch.float32, device="cpu").view(weight.shape)


def _randn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
