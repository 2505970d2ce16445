"""Dispatch: torch's operations on sharded gradients; each function performs the operators of one kind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial, reduce
from itertools import chain
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

from ..bookkeeping.gradient_store import Edit, GradientStore
from ..bookkeeping.sharded_parameter import ShardedParameter
from . import refusals
from .of_optimizer import Change, OptimizerGradients
from .operations import Args, Keywords, mapped, name_of, number_in, tensors_in, written_arguments
from .sharded_gradient import ShardedGradient, ViewOfGradient, Wholes

# It is called with an operator and its arguments.
Performer: TypeAlias = Callable[[Any, Args, Keywords], Any]

_SHOWN = 4  # numbers of a list in a message


def make_handles(records: Iterable[ShardedParameter], gradients: OptimizerGradients) -> None:
    """Set each record's ``ShardedGradient`` handles, which it shows as ``p.grad`` and ``p32.grad`` later."""
    for record in records:
        record.handle = ShardedGradient(record, record.p, gradients)
        record.slice_handle = ShardedGradient(record, record.p32, gradients)


def _is_sharded(value: object) -> TypeGuard[ShardedGradient]:
    return isinstance(value, ShardedGradient)


# ---- whole gradients ----


def _whole(value: Any, wholes: Wholes) -> Any:
    """Return arguments with whole gradients, of ``wholes`` or gathered, in place of sharded ones. Communicates."""
    return mapped(lambda each: each.whole_in(wholes) if _is_sharded(each) else each, value)


def _read(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Gather whole gradients, and return the operator's result on them; nothing is written back. Communicates."""
    wholes: Wholes = {}
    return func(*_whole(args, wholes), **_whole(kwargs, wholes))


def _write(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Gather whole gradients, call the operator on them, and write the changes to this rank's slices. Communicates."""
    wholes: Wholes = {}
    given, keywords = _whole(args, wholes), _whole(kwargs, wholes)
    written = list(zip(_written(func, args, kwargs), _written(func, given, keywords), strict=True))
    before = {each.root(): wholes[each.root()].clone() for each, _ in written if _is_sharded(each)}
    results = func(*given, **keywords)
    for root, earlier in before.items():
        root.write_changes(earlier, wholes[root], _edit_text(func, args, kwargs))
    _note_history(before, args, kwargs)
    return mapped(lambda result: next((each for each, whole in written if whole is result), result), results)


def _written(func: Any, args: Args, kwargs: Keywords) -> Iterator[Tensor]:
    for at, name in written_arguments(func):
        yield from tensors_in(args[at] if at < len(args) else kwargs.get(name))


def _note_history(written: Iterable[ShardedGradient], args: Args, kwargs: Keywords) -> None:
    """Keep written gradients from being reused next step, if autograd records the operation."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in((args, kwargs))):
        for each in written:
            each.note_history()


def _like(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Return the operator's result on empty tensors, since it reads shape and dtype alone. Doesn't communicate."""
    return func(*mapped(lambda each: _empty(each, each.device) if _is_sharded(each) else each, args), **kwargs)


def _empty(like: Tensor, device: torch.device | str) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _view(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Return views of a sharded gradient, through which reads and writes go to it. Doesn't communicate."""
    of = args[0]
    if not _is_sharded(of):
        return _read(func, args, kwargs)

    def look(whole: Tensor) -> Any:
        return func(whole, *args[1:], **kwargs)

    likes = look(_empty(of, "meta"))
    if isinstance(likes, Tensor):
        return ViewOfGradient(of, likes, look)

    def one(at: int, whole: Tensor) -> Any:
        return look(whole)[at]

    return [ViewOfGradient(of, like, partial(one, at)) for at, like in enumerate(likes)]


# ---- this rank's slices ----


def _targets(args: Args) -> tuple[bool, Sequence[Tensor], list[ShardedGradient]]:
    """Return whether the first argument is a list, its tensors, and the sharded gradients among them."""
    listed = isinstance(args[0], (list, tuple))
    targets = args[0] if listed else args[:1]
    return listed, targets, [each for each in targets if _is_sharded(each)]


def _by_elements(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Finish reductions, and run the operator on this rank's slices; for views, on whole gradients. Communicates."""
    listed, targets, sharded = _targets(args)
    beside = [*args[1:], *kwargs.values()]
    if not sharded:
        return _read(func, args, kwargs)
    if any(each.live() is None for each in sharded) or (
        listed and any(isinstance(each, Tensor) and each.dim() for each in beside)
    ):
        return _write(func, args, kwargs)
    edits: dict[ShardedParameter, list[Edit]] = {}
    for at, target in enumerate(targets):
        if _is_sharded(target):
            record, _ = target.edited()
            own = partial(_part, target, record)
            mine = _others(args, [at]) if listed else args[1:]
            edits.setdefault(record, []).append(partial(_edit, func, listed, mapped(own, mine), mapped(own, kwargs)))
    return _change_together(func, args, kwargs, partial(GradientStore.edit, edits=edits))


def _others(args: Args, places: Sequence[int]) -> list[Any]:
    """Return the arguments behind the list ``args[0]``, for its tensors at ``places`` alone."""
    count = len(args[0])
    lists = [isinstance(each, (list, tuple)) and len(each) == count for each in args[1:]]
    return [[each[at] for at in places] if cut else each for each, cut in zip(args[1:], lists, strict=True)]


def _part(target: ShardedGradient, record: ShardedParameter, value: Tensor) -> Tensor:
    """Return ``value`` at this rank's slice of ``target``, or whole if 0-d; raise for a wrong shape. Communicates."""
    start, stop = record.split.span(record.rank)
    if _is_sharded(value):
        if value.is_of_slice == target.is_of_slice and _is_split_alike(record, value):
            return value.to_local()[: stop - start]
        value = value.whole_in({})
    if value.dim() == 0:
        return value
    try:
        return target.own_part(value.expand(target.shape))
    except RuntimeError as error:
        raise refusals.SHAPE(target.name_of_parameter, tuple(target.shape), tuple(value.shape)) from error


def _is_split_alike(record: ShardedParameter, value: ShardedGradient) -> bool:
    other, _ = value.root().held()
    if value.live() is None or (other.split, other.rank) != (record.split, record.rank):
        return False
    return (other.view.shape, other.view.stride()) == (record.view.shape, record.view.stride())


def _edit(func: Any, listed: bool, parts: Sequence[Any], keywords: Keywords, own: Tensor) -> None:
    """Call the operator on ``own``, in a list if ``listed``, with other arguments moved to its device and dtype."""

    def beside(part: Tensor) -> Tensor:
        return part.to(own) if part.is_floating_point() and part.dim() else part.to(own.device)

    func([own] if listed else own, *mapped(beside, parts), **mapped(beside, keywords))


def _edit_text(func: Any, args: Args, kwargs: Keywords) -> str:
    """Return an operator's name and the numbers among its arguments, which the ranks compare.

    Three digits are enough to tell ranks whose numbers differ, as of ``max_norm``, and let them differ by rounding.
    Numbers that a rank writes to its slice, by ``p32.grad``, may differ.
    """
    if any(_is_sharded(each) and each.is_of_slice for each in tensors_in(args)):
        return name_of(func)
    lists = (each if isinstance(each, (list, tuple)) else [each] for each in (*args[1:], *kwargs.values()))
    numbers = [f"{number:.3g}" for each in chain.from_iterable(lists) if (number := number_in(each)) is not None]
    if len(numbers) > _SHOWN:  # one for each of many gradients
        digest = hashlib.sha256(" ".join(numbers).encode()).hexdigest()[:8]
        numbers[_SHOWN:] = [f"and {len(numbers) - _SHOWN} more ({digest})"]
    return " ".join([name_of(func), *numbers])


def _scale(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Multiply or divide gradients by one number, noted for a whole bucket; other factors by elements. Communicates."""
    _, _, sharded = _targets(args)
    factor = args[1]
    one = factor.numel() == 1 and not _is_sharded(factor) if isinstance(factor, Tensor) else factor != 0
    if kwargs or not one or not sharded or any(each.live() is None for each in sharded):
        return _by_elements(func, args, kwargs)
    if isinstance(factor, Tensor):  # in 16 bits a reciprocal would lose digits, or be inf
        dtypes = (each.dtype for each in (factor, *sharded))
        factor = factor.detach().reshape(()).to(reduce(torch.promote_types, dtypes, torch.float32))
    factor = 1.0 / factor if name_of(func).endswith("div_") else factor
    return _change_together(func, args, kwargs, partial(GradientStore.multiply, factor=factor))


def _zero(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Finish reductions, and set gradients to zeros; of a view, through the whole gradient. Communicates."""
    if any(_is_sharded(each) and each.live() is None for each in tensors_in(args)):
        return _write(func, args, kwargs)
    return _change_together(func, args, kwargs, GradientStore.zero)


def _change_together(func: Any, args: Args, kwargs: Keywords, change: Change) -> Any:
    """Apply ``func`` to plain targets, and ``change`` to sharded ones, once for each optimizer. Communicates.

    Returns ``args[0]``, or None if it is a list; raises if a sharded gradient was cleared.
    """
    listed, targets, sharded = _targets(args)
    plain = [at for at, each in enumerate(targets) if not _is_sharded(each)]
    if plain:
        func([targets[at] for at in plain], *_others(args, plain), **kwargs)
    for gradients, records in _by_optimizer(sharded).items():
        gradients.change(records, _edit_text(func, args, kwargs), change)
    for each in sharded:
        each.edited()  # finishing reductions may have found that it was cleared
        each.keep_current()
    _note_history(sharded, args, kwargs)
    return None if listed else args[0]


def _by_optimizer(tensors: Iterable[ShardedGradient]) -> dict[OptimizerGradients, list[ShardedParameter]]:
    """Group the records of gradients by their optimizer; a gradient given twice is in the list twice."""
    found: dict[OptimizerGradients, list[ShardedParameter]] = {}
    for each in tensors:
        record, gradients = each.edited()
        found.setdefault(gradients, []).append(record)
    return found


# ---- norms ----


def _norm(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Return norms of whole gradients from one collective; norms along dimensions gather gradients. Communicates."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    order, dtype = float(given.get("ord", 2)), given.get("dtype")
    listed, targets, sharded = _targets(args)
    current = all(each.live() is not None and each.is_current for each in sharded)
    if given.get("dim") is not None or given.get("keepdim") or not order > 0 or not current:
        return _read(func, args, kwargs)
    norms = {gradients: iter(gradients.norms(some, order)) for gradients, some in _by_optimizer(sharded).items()}
    ours = (next(norms[each.edited()[1]]) for each in sharded)
    ours = ours if dtype is None else (norm.to(dtype) for norm in ours)
    if not listed:
        return next(ours)
    plain = [each for each in targets if not _is_sharded(each)]
    others = iter(func(plain, *args[1:], **kwargs) if plain else ())
    return [next(ours if _is_sharded(each) else others) for each in targets]


# ---- which function performs an operator ----


def _refusing(refusal: refusals.Refusal) -> Performer:
    """Return a performer that raises ``refusal`` for the first gradient among an operator's arguments."""

    def refuse(func: Any, args: Args, kwargs: Keywords) -> Any:
        first = next(each for each in tensors_in((args, kwargs)) if _is_sharded(each))
        raise refusal(first.name_of_parameter, name_of(func))

    return refuse


_aten = torch.ops.aten
_NAMED: dict[Any, Performer] = {
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norm,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _zero,
    _aten.detach.default: lambda func, args, kwargs: args[0].detached(),
    _aten.detach_.default: lambda func, args, kwargs: args[0],
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _refusing(refusals.SCALER),
}
for _in_place in (_aten.mul_, _aten.div_, _aten._foreach_mul_, _aten._foreach_div_):
    _NAMED |= {_in_place.Scalar: _scale, _in_place.Tensor: _scale}
# Operators that write each element by itself, and that not every version of torch tags as pointwise.
_BY_ELEMENTS = {"copy_", "fill_", "masked_fill_", "abs_"}


def perform(func: Any, args: Args, kwargs: Keywords) -> object:
    """Return an operator's result on sharded gradients, by the function of its kind; most of these communicate."""
    return _performer(func)(func, args, kwargs)


@cache
def _performer(func: Any) -> Performer:
    """Return the function that performs an operator, from a table, or else by its tags and schema."""
    if func in _NAMED:
        return _NAMED[func]
    if "c10d" in func.namespace:
        return _refusing(refusals.COLLECTIVE)
    if torch.Tag.inplace_view in func.tags:
        return _refusing(refusals.RESHAPING)
    if func.is_view:
        return _view
    name, written = name_of(func), written_arguments(func)
    if func.namespace == "aten" and (name.endswith("_like") or name.startswith("new_")):
        return _like
    if not written:
        return _read
    elements = torch.Tag.pointwise in func.tags or name in _BY_ELEMENTS or name.startswith("_foreach_")
    return _by_elements if elements and written == ((0, "self"),) else _write


ShardedGradient.perform = staticmethod(perform)
