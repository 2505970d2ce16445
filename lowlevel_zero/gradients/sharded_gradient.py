"""ShardedGradient: what ``p.grad`` is once a gradient has been reduced, and each rank holds a slice of it.

As FSDP2's is a ``DTensor``. It has the parameter's shape, dtype and device, and no memory: torch's functions that clip
or clear gradients, and trainers that call them, work on it as on any gradient, over all ranks. ``p32.grad`` of the
slices in ``optimizer.param_groups`` is one too, of the slice's shape, from the backward to the step; it stands for the
whole gradient all the same, so that a norm over either is that of the run without sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ..bookkeeping.gradient_store import GradientStore

if TYPE_CHECKING:
    from ..bookkeeping.sharded_parameter import ShardedParameter
    from .of_optimizer import OptimizerGradients

_aten = torch.ops.aten

GRAD_SCALER = (
    "expected no enabled torch.amp.GradScaler around this optimizer: it scales losses and steps by what one rank "
    "finds. Convert the model to fp16 and call optimizer.backward(loss), which scales the loss by itself; or use bf16 "
    "(model or autocast), which needs no scaling; or GradScaler(enabled=False)"
)


class ShardedGradient(torch.Tensor):
    """A gradient that is averaged over the ranks, and of which each holds a slice.

    Norms of it, and ``mul_``, ``div_``, ``clamp_`` and ``zero_``, alone or in a list, are those of the whole gradient;
    every rank calls them, as torch's and trainers' functions do, in the same order. It holds nothing but weak
    references.

    Args:
        record: whose gradient it is.
        like: ``p`` or ``p32``, to whose ``.grad`` it is assigned.
        gradients: the optimizer's.
    """

    _name: str
    _record: ReferenceType[ShardedParameter]
    _gradients: ReferenceType[OptimizerGradients]

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, record: ShardedParameter, like: Tensor, gradients: OptimizerGradients) -> ShardedGradient:
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        return made

    def __init__(self, record: ShardedParameter, like: Tensor, gradients: OptimizerGradients) -> None:
        self._name = record.name
        self._record = ref(record)
        self._gradients = ref(gradients)

    def full_tensor(self) -> Tensor:
        """All of the gradient, averaged and unscaled, of the parameter's shape and dtype. Every rank calls it."""
        record, gradients = self._held()
        whole = gradients.whole(record)
        return torch.zeros_like(record.p, requires_grad=False) if whole is None else whole

    def to_local(self) -> Tensor:
        """This rank's slice, ``[s]`` with padding, fp32 at least, averaged and unscaled. Every rank calls it."""
        record, gradients = self._held()
        for store, _ in gradients.complete([record]):
            own = store.averaged(record)
            if own is not None:
                return own
        return torch.zeros(record.split.slice_size, device=self.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Without its elements, of which this rank has a part."""
        return f"ShardedGradient({self._name}, {tuple(self.shape)}, {self.dtype}: full_tensor() has its elements)"

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a parameter isn't sharded, and has no gradient."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """It isn't to be pickled."""
        self._refuse("pickle")

    def share_memory_(self) -> ShardedGradient:
        """It has no memory."""
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operation of torch's."""
        if (func is _ADD_ or func is _ADD) and type(args[0]) is cls and torch._C._current_graph_task_id() != -1:
            return args[0]._accumulate(args[1]) if func is _ADD_ else args[0]._pass(args[1])
        perform = _OPERATIONS.get(func)
        if perform is None:
            _first_of(args)._refuse(str(func).removeprefix("aten.").split(".")[0])
        if not isinstance(args[0], (list, tuple)):
            return perform(list(args[:1]), *args[1:], **(kwargs or {}))[0]
        return _by_kind(func, perform, args[0], args[1:], kwargs or {})

    def _accumulate(self, gradient: Tensor) -> ShardedGradient:
        """A backward adds to ``p.grad``."""
        record, _ = self._held()
        record.pending = gradient if record.pending is None else record.pending + gradient
        return self

    def _pass(self, gradient: Tensor) -> Tensor:
        """A backward adds to ``p.grad``, with a graph, and puts the sum in its place."""
        record, _ = self._held()
        passed = gradient.clone() if record.pending is None else record.pending + gradient
        record.shown = record.pending = None
        return passed

    def _held(self) -> tuple[ShardedParameter, OptimizerGradients]:
        record, gradients = self._record(), self._gradients()
        if record is None or gradients is None:
            raise RuntimeError(
                f"{self._name}: expected the optimizer that reduced this gradient, which is gone: keep it, or set "
                "p.grad to None"
            )
        return record, gradients

    def _refuse(self, what: str) -> NoReturn:
        if what == "_amp_foreach_non_finite_check_and_unscale_":
            raise RuntimeError(GRAD_SCALER)
        raise RuntimeError(
            f"{self._name}: expected norms, mul_, div_, clamp_ or zero_ of p.grad, of which each rank holds a slice "
            f"after backward, got {what}: take all of it by p.grad.full_tensor() on every rank; edit slices between "
            "optimizer.synchronize() and step, or by lowlevel_zero.accessors; call optimizer.zero_grad() before the "
            "model is converted; and if it is wrapped in DistributedDataParallel, hand over the plain model"
        )


def _first_of(args: Any) -> ShardedGradient:
    found = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return next(each for each in found if isinstance(each, ShardedGradient))


def _by_kind(
    func: Any, perform: Callable[..., Any], tensors: Sequence[Tensor], rest: Sequence[Any], keywords: dict[str, Any]
) -> Any:
    """An operation on a list, which may hold plain tensors too."""
    sharded = [each for each in tensors if isinstance(each, ShardedGradient)]
    plain = [each for each in tensors if not isinstance(each, ShardedGradient)]
    ours = iter(perform(sharded, *rest, **keywords))
    others = iter((func(plain, *rest, **keywords) or plain) if plain else ())
    results = [next(ours if isinstance(each, ShardedGradient) else others) for each in tensors]
    return results if func is _aten._foreach_norm.Scalar else None


def _by_optimizer(tensors: Iterable[ShardedGradient]) -> dict[OptimizerGradients, list[ShardedParameter]]:
    found: dict[OptimizerGradients, list[ShardedParameter]] = {}
    for record, gradients in map(ShardedGradient._held, tensors):
        found.setdefault(gradients, []).append(record)
    return found


def _norm(
    tensors: list[ShardedGradient],
    norm_type: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    if dim is not None or keepdim:
        tensors[0]._refuse("a norm over some dimensions")
    of: dict[ShardedParameter, Tensor] = {}
    for gradients, records in _by_optimizer(tensors).items():
        of.update(zip(records, gradients.norms(records, float(norm_type)), strict=True))
    norms = [of[each._held()[0]] for each in tensors]
    return norms if dtype is None else [norm.to(dtype) for norm in norms]


def _edit(tensors: list[ShardedGradient], edit: Callable[..., None], *values: Any) -> list[ShardedGradient]:
    """Have each shard group's store ``edit`` the gradients that stand there. fp16: what overflowed stays so."""
    for gradients, records in _by_optimizer(tensors).items():
        for store, some in gradients.complete(records):
            edit(store, some, *values)
    return tensors


def _multiply(tensors: list[ShardedGradient], factor: float | Tensor) -> list[ShardedGradient]:
    if isinstance(factor, Tensor) and factor.numel() != 1:
        tensors[0]._refuse("a product with a tensor")
    return _edit(tensors, GradientStore.multiply, factor)


def _divide(tensors: list[ShardedGradient], divisor: float | Tensor) -> list[ShardedGradient]:
    return _multiply(tensors, 1.0 / divisor)


def _clamp(
    tensors: list[ShardedGradient], least: float | None = None, most: float | None = None
) -> list[ShardedGradient]:
    return _edit(tensors, GradientStore.clamp, least, most)


def _zero(tensors: list[ShardedGradient]) -> list[ShardedGradient]:
    return _edit(tensors, GradientStore.zero)


_ADD_, _ADD = _aten.add_.Tensor, _aten.add.Tensor
_OPERATIONS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: lambda tensors: tensors,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: lambda tensors, norm_type=2, dtype=None: _norm(tensors, norm_type, dtype=dtype),
    _aten.mul_.Tensor: _multiply,
    _aten.mul_.Scalar: _multiply,
    _aten._foreach_mul_.Scalar: _multiply,
    _aten._foreach_mul_.Tensor: _multiply,
    _aten.div_.Tensor: _divide,
    _aten.div_.Scalar: _divide,
    _aten._foreach_div_.Scalar: _divide,
    _aten._foreach_div_.Tensor: _divide,
    _aten.clamp_.default: _clamp,
    _aten.clamp_min_.default: _clamp,
    _aten.clamp_max_.default: lambda tensors, most: _clamp(tensors, None, most),
    _aten._foreach_clamp_min_.Scalar: _clamp,
    _aten._foreach_clamp_max_.Scalar: lambda tensors, most: _clamp(tensors, None, most),
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _zero,
}
