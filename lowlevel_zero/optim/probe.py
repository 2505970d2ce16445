"""Probes: fresh optimizers of a class step small parameters and parts of them; the results must be equal.

The parts are flat slices, or some of the parameters, as the ranks would own them. The optimizers are made by the
class's constructor, with the options that the optimizer has recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import islice
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from .probe_gradients import (
    RANKS,
    SIZES,
    Gradients,
    brief,
    first_matrices,
    first_slice,
    growing,
    last_slice,
    lasting,
    orthogonal,
    randn,
    still,
)
from .trials import LARGE, LARGE_LR, Alone, step, undisturbed
from .twins import LR, Kind, NoProbe, kinds_to_try, twin, unlike_settings

# A matrix; a convolution's kernel, which some classes treat apart; and a matrix that is large enough to be quantised,
# of which its blocks of elements take all, while its slices end inside a block.
_SHAPES = ((7, 7), (5, 3, 3, 3), (176, 176))
# Parameters whose slices are single numbers, which some classes treat apart, and small ones.
_SMALL = ((3,), (), (7, 7), (5, 3, 3, 3))
_TALL_AND_WIDE = ((9, 4), (4, 9))
_MOST = 2**18  # elements of the largest parameter that is tried, if the model has one that is as large
# Stacks of matrices, of one matrix for each of two ranks, of two, and ones that end inside a block of elements.
_STACKS = ((2, 6, 5), (4, 5, 6), (2, 90, 50))
_TOLERANCE = 1e-5  # of the largest movement since the start
_ROUNDINGS = len(SIZES)  # of the element: each step rounds it
_EARLY = 3  # steps in which all parameters have gradients, after which param groups are compared
_LACKING = 4  # the step in which some have none
_HUGE, _IN_STEP = 1e4, 1  # every second gradient of parameters that ranks own is so many times as large in that step
_LATE = 96_000  # a step late in a run, which most periods divide: some classes change their rule, or act, at times
_LATER = 4  # steps around that one
_LEAST_MOVEMENT = 1e-5  # of the largest element; with less, rounding would hide a difference
# Texts about a parameter's shape, and the gap.
_SLICES_DIFFER = (
    f"a {{}} parameter and its {RANKS} flat slices differ by {{:.1e}} of the update in a probe, so its updates depend "
    "on the other elements, on the shape, or on random numbers"
)
_MATRICES_DIFFER = (
    "a {} stack of matrices and its halves differ by {:.1e} of the update in a probe, so a matrix's updates depend "
    "on the others of its stack, or on random numbers"
)
_OWNED_DIFFER = (
    "a {} parameter that is stepped beside others and without them differs by {:.1e} of the update in a probe, so its "
    "updates depend on other parameters, or on random numbers"
)


class _Trial(NamedTuple):
    """Parameters that fresh optimizers step, and the parts of them that others step, which must come out the same.

    With ``drops`` every second one has no gradient in one step. The kinds are those of ``of``, and their learning rate
    is ``lr``.
    """

    shapes: Sequence[tuple[int, ...]] | Callable[[Kind], Sequence[tuple[int, ...]]]  # of each kind
    gradients: Gradients
    cut: Callable[[Tensor], Tensor] | None = None  # returns the slice of a tensor; None: two ranks own parameters
    differ: str = _SLICES_DIFFER  # the text about a parameter's shape, and the gap
    drops: bool = False
    lr: float = LR
    of: Collection[Tensor] = ()


def probe_elements(
    optimizer: Optimizer, parameters: Collection[Tensor] = (), dtypes: Collection[torch.dtype] = ()
) -> str | None:
    """Return a text if slices step unlike whole parameters, in fp32 or ``dtypes``, or can't be tried, else None.

    If it can't be tried, the result says why. Other numbers of dimensions than usual, and large shapes, are tried if
    ``parameters`` have them. Runs in fp32, and then shortly in ``dtypes``, on the CPU. ``optimizer`` and random number
    generators stay unchanged.
    """
    outward, inward = partial(growing, noise=1.0, inward=-1), partial(growing, noise=0.1, inward=1)
    unusual = [(5, *(3,) * (dim - 1)) for dim in _dims_of(parameters) if dim not in map(len, _SMALL)]
    small = _Trial((*_SMALL, *_TALL_AND_WIDE, *unusual), lasting, last_slice)
    # Each sequence starts anew: some classes look at a gradient's angle to the weights, or whether both grow.
    large = [_Trial(_SHAPES, each, first_slice) for each in (lasting, orthogonal, outward, inward)]
    found = _tried(optimizer, *large, small)
    with suppress(NoProbe):  # by a class without decay, of which nothing moves
        found = found or _difference(optimizer, small._replace(gradients=still, lr=LARGE_LR))
    if found is None and any(p.numel() > math.prod(_SHAPES[-1]) for p in parameters):
        with suppress(NoProbe):  # which the others have given proof against
            found = _difference(optimizer, _Trial(_largest, brief, first_slice, of=parameters))
    # Rules for shapes are found in fp32; in 16 bits more shapes would only tell more roundings.
    return found or _of_dtypes(optimizer, small._replace(shapes=_SMALL), dtypes)


def probe_parameters(
    optimizer: Optimizer, parameters: Collection[Tensor], dtypes: Collection[torch.dtype] = ()
) -> str | None:
    """Step parameters apart, as two owners would, and together; return a text about a difference, or None if equal.

    Each rank steps the parameters that it owns, with nothing in the place of the others. There are two shapes of each
    number of dimensions that ``parameters`` of a kind have, and each rank has a parameter of either: some classes join
    those of one shape. Some have no gradient in one step, unless the class can't step so at all. Else as
    ``probe_elements``.
    """

    def shapes(kind: Kind) -> list[tuple[int, ...]]:  # some classes can't step other dimensions of a kind
        dims = sorted({*map(len, kind.shapes)}) or _dims_of(parameters)
        return [shape for dim in dims for shape in (LARGE[:dim], (*LARGE[1:dim], 8)[:dim]) for _ in range(2)]

    trial = _Trial(shapes, lasting, differ=_OWNED_DIFFER, of=parameters)
    try:
        found = _difference(optimizer, trial._replace(drops=True))
    except NoProbe:
        found = _tried(optimizer, trial)
    return found or _of_dtypes(optimizer, trial, dtypes)


def probe_matrices(optimizer: Optimizer, stacks: Collection[Tensor]) -> str | None:
    """Step stacks of matrices, ``[E, m, n]``, and halves of them; return a text about a difference, or None if equal.

    Kinds of parameters are tried that have some of the ``stacks``; all are if none has. In fp32 alone: in 16 bits
    halves may be rounded otherwise. Else as ``probe_elements``.
    """
    held = {p for group in optimizer.param_groups for p in group["params"]}
    in_groups = any(p in held for p in stacks)

    def shapes(kind: Kind) -> Sequence[tuple[int, ...]]:
        return _STACKS if kind.shapes or not in_groups else ()

    return _tried(optimizer, _Trial(shapes, lasting, first_matrices, _MATRICES_DIFFER, of=stacks))


def _largest(kind: Kind) -> list[tuple[int, ...]]:
    """Return the shapes of a kind's parameters with most elements, and with the largest second side; sides are halved.

    Some classes factor the second moments of matrices of which both sides are large.
    """
    shapes = sorted(shape for shape in kind.shapes if math.prod(shape)) or [(1,)]
    found: set[tuple[int, ...]] = set()
    for chosen in (max(shapes, key=math.prod), max(shapes, key=lambda shape: sorted(shape)[-2:-1])):
        sides = list(chosen)
        while math.prod(sides) > _MOST:
            sides[sides.index(max(sides))] //= 2
        found.add(tuple(sides))
    return sorted(found)


def _dims_of(parameters: Collection[Tensor]) -> list[int]:
    """Return the numbers of dimensions that ``parameters`` have."""
    return sorted({p.dim() for p in parameters})


def _difference(optimizer: Optimizer, *trials: _Trial) -> str | None:
    """Return the first difference that trials of the optimizer find, or None; raise ``NoProbe`` if they can't run."""
    with undisturbed():
        return next(filter(None, (_Comparison(optimizer, each).difference() for each in trials)), None)


def _tried(optimizer: Optimizer, *trials: _Trial) -> str | None:
    """Return the first difference that trials of the optimizer find, or why they can't run; None for none."""
    try:
        return _difference(optimizer, *trials)
    except NoProbe as failure:
        return f"it could not be tried ({failure})"


def _of_dtypes(optimizer: Optimizer, trial: _Trial, dtypes: Collection[torch.dtype]) -> str | None:
    """Return the first difference that ``trial`` finds in ``dtypes``, or that random numbers are drawn, or None.

    One that can't be tried, as where numbers are too large for fp16, tells nothing.
    """
    for dtype in dtypes:
        with suppress(NoProbe), undisturbed():
            before = torch.get_rng_state()
            found = _Comparison(optimizer, trial, dtype).difference()
            if found is not None:
                return f"in {dtype}, {found}"
            if not torch.equal(before, torch.get_rng_state()):  # a rounding that is drawn isn't told from any other
                return f"it draws random numbers for {dtype}"
    return None


# ---- comparisons ----


class _Part(NamedTuple):
    """Parameters that one optimizer steps: all of them, every second one, or slices."""

    optimizer: Optimizer
    params: Sequence[Tensor]
    places: slice = slice(None)  # of these among all parameters
    cut: Callable[[Tensor], Tensor] | None = None  # returns the slice of a tensor; None: the parameters are whole

    def of(self, tensors: Sequence[Any]) -> list[Any]:
        """Return this part's entries of ``tensors``, which has one for each parameter; slices of them if ``cut``."""
        own = tensors[self.places]
        return list(own) if self.cut is None else [self.cut(each) for each in own]


def _owned(part: _Part, rank: int) -> _Part:
    """Cut a part's optimizer to every second parameter, copied with its state, and return it as ``rank``'s part."""
    optimizer, places = part.optimizer, slice(rank, None, 2)
    states = {p: optimizer.state.pop(p, None) for p in part.params}
    own: dict[Tensor, Tensor] = {}
    for p in part.params[places]:
        own[p] = torch.nn.Parameter(p.detach().clone())
        vars(own[p]).update(vars(p))
        if states[p] is not None:
            optimizer.state[own[p]] = states[p]
    for group in optimizer.param_groups:
        group["params"] = [own[p] for p in group["params"] if p in own]
    return _Part(optimizer, list(own.values()), places)


class _Comparison:
    """The parameters of a trial under one fresh optimizer, and parts of them under others, with the same gradients."""

    def __init__(self, optimizer: Optimizer, trial: _Trial, dtype: torch.dtype = torch.float32) -> None:
        self._trial, self._dtype = trial, dtype
        self._generator, kinds = torch.Generator().manual_seed(0), kinds_to_try(optimizer, trial.lr, trial.of)
        shapes = [trial.shapes(kind) if callable(trial.shapes) else trial.shapes for kind in kinds]
        self._starts = [(0.02 * randn(shape, self._generator)).to(dtype) for own in shapes for shape in own]

        def part(cut: Callable[[Tensor], Tensor] | None = None) -> _Part:
            values = self._starts if cut is None else map(cut, self._starts)
            params: list[Tensor] = [torch.nn.Parameter(value.clone()) for value in values]
            return _Part(twin(optimizer, kinds, params, [*map(len, shapes)], self._starts), params, cut=cut)

        self._whole = part()
        self._parts = [part(trial.cut)] if trial.cut else [_owned(part(), rank) for rank in range(2)]
        self._optimizers = [each.optimizer for each in (self._whole, *self._parts)]
        self._unlike: list[str | None] = []

    def difference(self) -> str | None:
        """Step the whole and its parts, early and then late in a run; return a text about a difference, or None."""
        self._run(drops=self._trial.drops)
        found = self._found()
        if found is None:
            with suppress(Exception):  # of counters that stand for more than a number of steps
                before = [[float(value) for *_, value in _numbers(each)] for each in self._optimizers]
                self._run(1)
                for each, numbers in zip(self._optimizers, before, strict=True):
                    _skip_ahead(each, numbers)
                self._run(_LATER)
                found = self._found()
        return found

    def _run(self, steps: int | None = None, drops: bool = False) -> None:
        """Step the whole and its parts, ``steps`` times or to the end, and note group settings that differ early."""
        sequence = self._trial.gradients(self._whole.params, self._generator)
        for number, each in enumerate(islice(sequence, steps)):
            lacking = drops and number == _LACKING
            if number == _IN_STEP and drops:
                each = [grad * _HUGE if at % 2 else grad for at, grad in enumerate(each)]
            grads = [None if lacking and at % 2 else grad.to(self._dtype) for at, grad in enumerate(each)]
            with nullcontext() if self._unlike else Alone():  # type: ignore[no-untyped-call]
                for part in (self._whole, *self._parts):
                    step(part.optimizer, part.params, part.of(grads))
            if len(self._unlike) < _EARLY:
                self._unlike.append(unlike_settings(*self._optimizers))

    def _found(self) -> str | None:
        """Return a text about values or settings that differ in the parts, or a state that can't be split, or None."""
        whole, cut = self._whole, self._trial.cut
        for part in self._parts:
            of_whole = (whole.params[part.places], self._starts[part.places], part.of(whole.params))
            for param, start, expected, own in zip(*of_whole, part.params, strict=True):
                gap = _gap(expected, own, param, start)
                if gap is not None:
                    return self._trial.differ.format(tuple(param.shape), gap)
        if any(map(_rested, whole.params, self._starts)):
            raise NoProbe(f"{len(SIZES)} of its steps hardly moved small parameters: is its lr 0, or too small?")
        states = _states_apart((*self._parts, whole)) if cut else _states_of_some(whole)
        key = next(filter(None, self._unlike), None)
        setting = f"it sets {key!r} of its param groups, which wouldn't be alike on all ranks" if key else None
        return states or _wrong_state(whole.optimizer) or setting


def _skip_ahead(optimizer: Optimizer, before: Sequence[float]) -> None:
    """Set each number that has gone up by one since ``before``, a step ago, to shortly before ``_LATE``.

    Whether it is read before or after it goes up, some of ``_LATER`` steps then read a multiple of most periods.
    """
    for (holder, key, value), former in zip(_numbers(optimizer), before, strict=True):
        if float(value) == former + 1:
            holder[key] = value + round(_LATE - _LATER // 2 - float(value))


def _numbers(optimizer: Optimizer) -> list[tuple[dict[Any, Any], Any, Any]]:
    """Return the numbers that an optimizer keeps, each with the dict that holds it and its key.

    A state that has more than one element for some parameter is a number for none.
    """
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    tensors = [(key, value) for state in states for key, value in state.items() if isinstance(value, Tensor)]
    large = {key for key, value in tensors if value.numel() != 1}
    holders: list[dict[Any, Any]] = [vars(optimizer), optimizer.state, *optimizer.param_groups]
    return [
        (holder, key, value)
        for holder in (*holders, *states)
        for key, value in holder.items()
        if type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1 and key not in large)
    ]


@torch.no_grad()
def _gap(expected: Tensor, got: Tensor, param: Tensor, start: Tensor) -> float | None:
    """Return how far two results differ, as a share of ``param``'s movement; None if by roundings alone.

    Raises:
        NoProbe: the parameter became infinite or NaN, which proves nothing.
    """
    movement, gap = (param - start).abs().amax(), (expected - got).abs()
    if not (movement + gap.amax()).isfinite():
        raise NoProbe("its steps of small parameters ended in infinity or NaN: is its lr too large?")
    if (gap > _TOLERANCE * movement + _ROUNDINGS * torch.finfo(param.dtype).eps * expected.abs()).any():
        return float(gap.amax() / movement)
    return None


@torch.no_grad()
def _rested(param: Tensor, start: Tensor) -> bool:
    """Return whether a parameter hardly moved, which proves nothing."""
    return bool((param - start).abs().amax() <= _LEAST_MOVEMENT * start.abs().amax())


# ---- states ----


def _states_apart(parts: Sequence[_Part]) -> str | None:
    """Return a text about a state that can't be sliced (another shape; in a list, dict or object), or None if all can.

    Single numbers are alike on all ranks. Tensors in lists and dicts can't be told from those that are, and objects
    may hold tensors. Where no other tensor has the parameter's shape, neither can a tensor of the shape (1,) be told.
    """
    for param, optimizer in ((param, part.optimizer) for part in parts for param in part.params):
        state = optimizer.state.get(param, {})
        shapes = {key: value.shape for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
        if {*shapes.values()} == {(1,)} and param.numel() > 1:
            return f"its state {next(iter(shapes))!r} has a tensor of the shape (1,), which can't be told from a slice"
        for key, value in state.items():
            others = [leaf for leaf in tree_leaves(value) if not _is_single(leaf)]
            if any(each is not value or not isinstance(each, Tensor) or each.shape != param.shape for each in others):
                apart = "has tensors in a list, dict or object, or of another shape, which can't be sliced"
                return f"its state {key!r} {apart}"
    return None


def _states_of_some(whole: _Part) -> str | None:
    """Return a text about a state that one of two parameters of a kind alone has, or None."""
    keys = [whole.optimizer.state.get(p, {}).keys() for p in whole.params]
    if keys[::2] == keys[1::2]:
        return None
    return "it keeps a state with one parameter that others of the same kind lack, and owners change"


def _wrong_state(optimizer: Optimizer) -> str | None:
    """Return a text about one tensor under two keys, or about tensors or objects of no parameter, or None.

    Of those under other keys than parameters each rank has a part. A tensor under two keys is two after loading.
    """
    for key, value in optimizer.state.items():
        if isinstance(key, Tensor):
            names: dict[Tensor, str] = {}
            for name, each in value.items():
                first = names.setdefault(each, name) if isinstance(each, Tensor) else name
                if first != name:
                    return f"its states {first!r} and {name!r} are one tensor, which would be two when they are loaded"
        elif not all(map(_is_single, tree_leaves(value))):
            return f"its state {key!r}, which is of no parameter, has tensors or objects, which differ between ranks"
    return None


def _is_single(leaf: object) -> bool:
    """Return whether a value among states is None, a number, text, a dtype or device, or a tensor of one element."""
    if isinstance(leaf, Tensor):
        return leaf.numel() <= 1
    return leaf is None or isinstance(leaf, (Number, str, bytes, torch.dtype, torch.device))
