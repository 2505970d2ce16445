"""Dispatch of torch's operations on sharded gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from ..bookkeeping.checks import refuse_compiled
from ..bookkeeping.sharded_parameter import Handle
from . import refusals
from .operations import Kind, kind_of, mapped, name_of, tensors_in, written_arguments

if TYPE_CHECKING:
    from ..bookkeeping.gradient_store import Edit
    from ..bookkeeping.sharded_parameter import ShardedParameter
    from .of_optimizer import OptimizerGradients
    from .sharded_gradient import ShardedGradient

    Edits = dict[OptimizerGradients, dict[ShardedParameter, list[Edit]]]

Args = tuple[Any, ...]
Keywords = dict[str, Any]
_ADD_, _ADD = torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor


class Wholes:
    """Whole gradients that one operation reads.

    Attributes:
        found: those that have been gathered, by the gradient that isn't a view.
    """

    def __init__(self) -> None:
        self.found: dict[ShardedGradient, Tensor] = {}
        self._standing_for: dict[int, Tensor] = {}

    def given(self, value: Any) -> Any:
        """Return arguments with whole tensors in the place of sharded gradients."""

        def whole(tensor: Tensor) -> Tensor:
            if not is_sharded(tensor):
                return tensor
            found = tensor.whole_in(self)
            self._standing_for[id(found)] = tensor
            return found

        return mapped(whole, value)

    def taken(self, value: Any) -> Any:
        """Return results with sharded gradients in the place of whole tensors that stood for them."""
        return mapped(lambda tensor: self._standing_for.get(id(tensor), tensor), value)


def is_sharded(value: object) -> TypeGuard[ShardedGradient]:
    """Return whether a value is a sharded gradient."""
    return isinstance(value, Handle)


def own_part(record: ShardedParameter, tensor: Tensor, of_slice: bool) -> Tensor:
    """Return this rank's elements of a tensor of ``p``'s shape, or ``of_slice`` of ``p32``'s: ``[n]``, unpadded."""
    start, stop = record.split.span(record.rank)
    return record.flat_slice(tensor)[: stop - start] if of_slice else record.flatten(tensor)[start:stop]


def perform(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Return what an operation outside of a backward gives."""
    return _PERFORM[kind_of(func)](func, args, kwargs)


def perform_within_backward(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Let a backward add a gradient to ``p.grad``, where it waits to be reduced; raise for anything else."""
    first = _first_of(args, kwargs)
    refuse_compiled(first.name_of_parameter)
    if not _is_engine(sys._getframe(1).f_back):
        raise refusals.of_hook(first.name_of_parameter, name_of(func))
    if func not in (_ADD_, _ADD) or args[0] is not first:
        raise refusals.of_ddp(first.name_of_parameter)
    record, _ = first.held()
    if first.live() is not first:
        record.refuse_assigned()
    gradient: Tensor = args[1]
    if func is _ADD_:
        record.pending = gradient if record.pending is None else record.pending + gradient
        return first
    passed = gradient.clone() if record.pending is None else record.pending + gradient  # with a graph
    record.shown = record.pending = None
    return passed


def _is_engine(caller: FrameType | None) -> bool:
    """Return whether autograd's engine called, and not a hook; None: it did, on another thread."""
    while caller is not None and caller.f_code.co_name != "_engine_run_backward":
        if not (caller.f_code.co_name == "__torch_dispatch__" or caller.f_globals["__name__"].startswith("torch.")):
            return False
        caller = caller.f_back
    return True


def _first_of(*given: Any) -> ShardedGradient:
    return next(each for each in tensors_in(given) if is_sharded(each))


# ---- whole gradients ----


def _read(func: Any, args: Args, kwargs: Keywords) -> Any:
    wholes = Wholes()
    return func(*wholes.given(args), **wholes.given(kwargs))


def _write(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Write to whole gradients; each rank then takes its slices of those that changed."""
    written = [each.root() for each in _written(func, args, kwargs) if is_sharded(each)]
    wholes = Wholes()
    given, keywords = wholes.given(args), wholes.given(kwargs)
    before = {root: wholes.found[root].clone() for root in written}
    results = func(*given, **keywords)
    for root, earlier in before.items():
        root.write_changes(earlier, wholes.found[root], name_of(func))
    _note_history(written, args, kwargs)
    return wholes.taken(results)


def _written(func: Any, args: Args, kwargs: Keywords) -> Iterator[Tensor]:
    for at, name in written_arguments(func):
        yield from tensors_in(args[at] if at < len(args) else kwargs.get(name))


def _note_history(written: Iterable[ShardedGradient], args: Args, kwargs: Keywords) -> None:
    """Note which gradients autograd will take for results of a computation."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in((args, kwargs))):
        for each in written:
            each.note_history()


def _like(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Make a new tensor: no element is read."""

    def stand_in(tensor: Tensor) -> Tensor:
        shape, strides = tensor.shape, tensor.stride()
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)

    return func(*mapped(lambda each: stand_in(each) if is_sharded(each) else each, args), **kwargs)


# ---- views ----


def _view(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Make views that read and write through."""
    of = args[0]
    if not is_sharded(of):
        return _read(func, args, kwargs)
    meta = torch.empty_strided(of.shape, of.stride(), dtype=of.dtype, device="meta")
    likes = func(meta, *args[1:], **kwargs)
    if isinstance(likes, Tensor):
        return of.viewed(likes, lambda whole: func(whole, *args[1:], **kwargs))

    def one(at: int, whole: Tensor) -> Any:
        return func(whole, *args[1:], **kwargs)[at]

    return [of.viewed(like, partial(one, at)) for at, like in enumerate(likes)]


# ---- this rank's slices ----


def _by_elements(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Write each element by itself: this rank's slices, by slices of what stands beside them."""
    listed = isinstance(args[0], (list, tuple))
    targets: Sequence[Tensor] = args[0] if listed else args[:1]
    sharded = [each for each in targets if is_sharded(each)]
    beside = [*args[1:], *kwargs.values()]
    if not sharded:
        return _read(func, args, kwargs)
    if any(each.live() is None for each in sharded) or (
        listed and any(isinstance(each, Tensor) and each.dim() for each in beside)
    ):
        return _write(func, args, kwargs)
    edits: Edits = {}
    plain = []
    for at, target in enumerate(targets):
        mine = [_at(at, each, len(targets)) for each in args[1:]] if listed else args[1:]
        if is_sharded(target):
            record, gradients = _edited(target)
            parts, keywords = (mapped(partial(_part, target, record), each) for each in (mine, kwargs))
            edit = partial(_edit, func, listed, parts, keywords)
            edits.setdefault(gradients, {}).setdefault(record, []).append(edit)
        else:
            plain.append(partial(func, [target], *mine, **kwargs))
    for each in plain:
        each()
    for gradients, of_records in edits.items():
        gradients.edit(of_records, name_of(func))
    return _finish_edit(args, kwargs, sharded)


def _at(at: int, value: Any, count: int) -> Any:
    """Return the other arguments for one tensor of a list."""
    return [value[at]] if isinstance(value, (list, tuple)) and len(value) == count else value


def _edited(target: ShardedGradient) -> tuple[ShardedParameter, OptimizerGradients]:
    live = target.live()
    assert live is not None, "views are written as a whole"
    return live.held()


def _part(target: ShardedGradient, record: ShardedParameter, value: Tensor) -> Tensor:
    """The elements of an argument that stand beside this rank's."""
    start, stop = record.split.span(record.rank)
    if is_sharded(value):
        if value.is_of_slice == target.is_of_slice and _is_split_alike(record, value):
            return value.to_local()[: stop - start]
        value = value.whole_in(Wholes())
    if value.dim() == 0:
        return value
    return own_part(record, _expanded(target, value), target.is_of_slice)


def _is_split_alike(record: ShardedParameter, value: ShardedGradient) -> bool:
    other, _ = value.root().held()
    if value.live() is None or (other.split, other.rank) != (record.split, record.rank):
        return False
    return (other.p.shape, other.p.stride()) == (record.p.shape, record.p.stride())


def _expanded(target: ShardedGradient, value: Tensor) -> Tensor:
    try:
        return value.expand(target.shape)
    except RuntimeError as error:
        raise refusals.of_shape(target.name_of_parameter, target.shape, value.shape) from error


def _edit(func: Any, listed: bool, parts: Sequence[Any], keywords: Keywords, own: Tensor) -> None:
    """Write to this rank's slice, where that is and in its dtype."""

    def beside(part: Tensor) -> Tensor:
        return part.to(own) if part.is_floating_point() and part.dim() else part.to(own.device)

    func([own] if listed else own, *mapped(beside, parts), **mapped(beside, keywords))


def _finish_edit(args: Args, kwargs: Keywords, sharded: Sequence[ShardedGradient]) -> Any:
    for each in sharded:
        _edited(each)  # finishing reductions may have found that it was cleared
        each.keep_current()
    _note_history(sharded, args, kwargs)
    return None if isinstance(args[0], (list, tuple)) else args[0]


def _scale(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Multiply gradients by one number, which where they are all of a bucket's takes no kernel."""
    targets = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    sharded = [each for each in targets if is_sharded(each)]
    factor = args[1]
    one = factor.numel() == 1 and not is_sharded(factor) if isinstance(factor, Tensor) else factor != 0
    if kwargs or not one or not sharded or any(each.live() is None for each in sharded):
        return _by_elements(func, args, kwargs)
    if len(sharded) < len(targets):
        func([each for each in targets if not is_sharded(each)], factor)
    factor = factor.detach().reshape(()) if isinstance(factor, Tensor) else factor
    factor = 1.0 / factor if name_of(func).endswith("div_") else factor
    for gradients, records in _by_optimizer(sharded):
        gradients.multiply(records, factor, name_of(func))
    return _finish_edit(args, kwargs, sharded)


def _zero(func: Any, args: Args, kwargs: Keywords) -> Any:
    targets = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    sharded = [each for each in targets if is_sharded(each)]
    if any(each.live() is None for each in sharded):
        return _write(func, args, kwargs)
    if len(sharded) < len(targets):
        func([each for each in targets if not is_sharded(each)])
    for gradients, records in _by_optimizer(sharded):
        gradients.zero(records, name_of(func))
    return _finish_edit(args, kwargs, sharded)


def _by_optimizer(
    tensors: Iterable[ShardedGradient],
) -> Iterator[tuple[OptimizerGradients, list[ShardedParameter]]]:
    """Records by their optimizer; one that is there twice comes twice, in lists without repetitions."""
    rounds: list[dict[OptimizerGradients, dict[ShardedParameter, None]]] = []
    for each in tensors:
        record, gradients = _edited(each)
        free = next((one for one in rounds if record not in one.get(gradients, ())), None)
        if free is None:
            rounds.append(free := {})
        free.setdefault(gradients, {})[record] = None
    for one in rounds:
        for gradients, records in one.items():
            yield gradients, list(records)


# ---- norms ----


def _norm(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Take norms of whole gradients, of which all come in one collective."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    order, dtype = float(given.get("ord", 2)), given.get("dtype")
    targets = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    sharded = [each for each in targets if is_sharded(each)]
    if given.get("dim") is not None or given.get("keepdim") or not order > 0 or not all(map(_is_current, sharded)):
        return _read(func, args, kwargs)
    norms: dict[ShardedParameter, Tensor] = {}
    for gradients, records in _by_optimizer(sharded):
        norms |= zip(records, gradients.norms(records, order), strict=True)
    ours = (norms[_edited(each)[0]] for each in sharded)
    ours = ours if dtype is None else (norm.to(dtype) for norm in ours)
    if not isinstance(args[0], (list, tuple)):
        return next(ours)
    plain = [each for each in targets if not is_sharded(each)]
    others = iter(func(plain, *args[1:], **kwargs) if plain else ())
    return [next(ours if is_sharded(each) else others) for each in targets]


def _is_current(tensor: ShardedGradient) -> bool:
    return tensor.live() is not None and tensor.is_current


# ---- the rest ----


def _detach(func: Any, args: Args, kwargs: Keywords) -> Any:
    return args[0].detached()


def _detach_in_place(func: Any, args: Args, kwargs: Keywords) -> Any:
    return args[0]


def _refused(error: Callable[[str, str], RuntimeError]) -> Callable[..., Any]:
    def refuse(func: Any, args: Args, kwargs: Keywords) -> Any:
        raise error(_first_of(args, kwargs).name_of_parameter, name_of(func))

    return refuse


_PERFORM: dict[Kind, Callable[[Any, Args, Keywords], Any]] = {
    Kind.NORM: _norm,
    Kind.SCALE: _scale,
    Kind.ZERO: _zero,
    Kind.DETACH: _detach,
    Kind.DETACH_IN_PLACE: _detach_in_place,
    Kind.VIEW: _view,
    Kind.LIKE: _like,
    Kind.ELEMENTS: _by_elements,
    Kind.WRITE: _write,
    Kind.READ: _read,
    Kind.MEMORY: _refused(refusals.of_reshaping),
    Kind.COLLECTIVE: _refused(refusals.of_collective),
    Kind.SCALER: _refused(refusals.of_scaler),
}
