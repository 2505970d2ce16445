"""ShardedGradient: the type of ``p.grad`` after its reduction, when each rank holds a slice of the gradient.

As FSDP2's is a ``DTensor``. It has the parameter's shape, dtype and device, and no memory. torch's functions work on it
as on the averaged, unscaled gradient, over all ranks (``dispatch.py``):

- Norms of all parameters take one small collective.
- An operation that writes each element by itself (``copy_``, ``add_``, ``clamp_``) writes this rank's slice; of a
  tensor of the parameter's shape each rank takes its slice. It doesn't communicate once all reductions are finished.
- Any other operation that reads it reads the whole gradient, which the ranks gather. Any other that writes to it does
  so to a whole one, of which each rank then takes its slice.
- Views write through. ``detach()`` and ``.data`` do too, and keep the values that they were taken with.

``p32.grad`` of the slices in ``optimizer.param_groups`` is one too, of the slice's shape. Reading it reads this rank's
slice. Norms of it are the whole gradient's, so that clipping over either is that of the run without sharding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ..bookkeeping.gradient_store import GradientStore
from ..bookkeeping.sharded_parameter import Handle, ShardedParameter
from ..bookkeeping.shown_gradients import check_slice, refuse_assigned
from ..bookkeeping.step_state import refuse_compiled
from . import refusals
from .of_optimizer import OptimizerGradients
from .operations import Args, Keywords, name_of, tensors_in

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Self

# Whole gradients that one operation has gathered, by the gradient that isn't a view.
Wholes: TypeAlias = "dict[ShardedGradient, Tensor]"

_ADD_, _ADD = torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor


def _without_memory(method: str) -> Any:
    """Return a method that raises ``RuntimeError``: a sharded gradient has no memory."""

    def refuse(self: ShardedGradient, *_: Any, **__: Any) -> NoReturn:
        raise refusals.MEMORY(self.name_of_parameter, method)

    return refuse


class ShardedGradient(Handle):
    """The averaged gradient of a parameter, of which each rank holds a slice, as FSDP2 has ``DTensor``.

    Args:
        record: the record of the parameter.
        like: ``p`` or ``p32``, to whose ``.grad`` it is assigned.
        gradients: the gradients of the optimizer.
    """

    name_of_parameter: str
    is_of_slice: bool
    _record: ReferenceType[ShardedParameter]
    _gradients: ReferenceType[OptimizerGradients]
    _retired: bool
    _itself: object

    # Performs an operator of torch, given with its arguments; ``dispatch`` has it, which imports this file.
    perform: ClassVar[Callable[[Any, Args, Keywords], Any]]

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, of: ShardedParameter | ShardedGradient, like: Tensor, *_: object) -> Self:
        """Return a tensor of ``like``'s shape and strides without memory, whose data pointer raises."""
        device = like.device if isinstance(of, ShardedParameter) else of.device
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)  # C code would look at address 0
        return made

    def __init__(self, record: ShardedParameter, like: Tensor, gradients: OptimizerGradients) -> None:
        self.name_of_parameter = record.name
        self.is_of_slice = like is record.p32
        self._record = ref(record)
        self._gradients = ref(gradients)
        self._retired = False

    def _follow(self, of: ShardedGradient) -> None:
        self.name_of_parameter, self.is_of_slice = of.name_of_parameter, of.is_of_slice
        self._record, self._gradients, self._retired = of._record, of._gradients, False

    # ---- its values ----

    def full_tensor(self) -> Tensor:
        """Gather and return the whole gradient, averaged and unscaled, in the parameter's dtype. Every rank calls it.

        Of ``p32.grad`` return this rank's slice, in the dtype and on the device of ``p32``.
        """
        record, gradients = self.held()
        if self.is_of_slice:
            return record.shaped(self.to_local().to(record.p32))
        whole = gradients.whole(record)
        self.held()  # finishing reductions may have found that it was cleared
        return torch.zeros_like(record.p, requires_grad=False) if whole is None else whole

    def to_local(self) -> Tensor:
        """Return a copy of this rank's slice, ``[s]``, averaged and unscaled, fp32 at least. Every rank calls it."""
        record, gradients = self.held()
        own = gradients.own(record)
        self.held()
        return own

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Gather the whole gradient, and return it as a read-only array. Every rank calls it."""
        array = self.full_tensor().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> list[object]:
        """Gather the whole gradient, and return its numbers as nested lists. Every rank calls it."""
        return self.full_tensor().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return the parameter's name, the shape and the dtype, not the elements. Doesn't communicate."""
        about = f"{self.name_of_parameter}, {tuple(self.shape)}, {self.dtype}"
        return f"ShardedGradient({about}: full_tensor() has its elements)"

    def __deepcopy__(self, memo: object) -> Tensor | None:
        """Return the gathered gradient as a plain tensor, or None for a slice's gradient. Every rank calls it."""
        return None if self.is_of_slice else self.full_tensor()

    # ---- there is no memory ----

    @property
    def data(self) -> Tensor:
        """Return ``detach()``, a snapshot of this rank's slice; writes to it reach the gradient. Communicates."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Raise ``RuntimeError`` unless ``value`` is this gradient, or its own ``.data`` with the present values."""
        if value is self:  # as ``model.to(device)`` does where nothing changes
            return
        if isinstance(value, DetachedGradient) and value.live() is self and value.is_current:
            return  # as the second half of ``p.grad.data *= 0.5`` does, whose first has written it
        if (value.dtype, value.device, value.stride()) != (self.dtype, self.device, self.stride()):
            raise refusals.CONVERSION(self.name_of_parameter, value.dtype, value.device)
        raise refusals.DATA(self.name_of_parameter)

    data_ptr = _without_memory("data_ptr()")
    storage = _without_memory("storage()")
    __dlpack__ = __dlpack_device__ = _without_memory("dlpack")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise ``RuntimeError``: a sharded gradient can't be pickled."""
        raise refusals.PICKLING(self.name_of_parameter)

    def share_memory_(self) -> ShardedGradient:
        """Return the gradient unchanged: it has no memory to share."""
        return self

    # ---- torch's operations ----

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Perform a torch operation, which may communicate; within a backward, raise for any but adding a gradient."""
        if torch._C._current_graph_task_id() != -1:
            return _perform_within_backward(func, args, kwargs or {})
        return ShardedGradient.perform(func, args, kwargs or {})

    def held(self) -> tuple[ShardedParameter, OptimizerGradients]:
        """Return the record and the optimizer's gradients; raise if either is gone or the gradient was cleared."""
        record, gradients = self._record(), self._gradients()
        if record is None or gradients is None:
            raise refusals.DEAD(self.name_of_parameter)
        if self._retired:
            raise refusals.KEPT(self.name_of_parameter)
        return record, gradients

    def retire(self) -> Handle:
        """Make every further use of this object raise, and return a new one for the next gradient.

        It is where this one is: a slice may be asleep, on the host.
        """
        record, _ = self.held()
        made = ShardedGradient.__new__(ShardedGradient, self, record.p32 if self.is_of_slice else record.p)
        made._follow(self)
        self._retired, self._itself = True, None
        return made

    def note_history(self) -> None:
        """Hold a reference to itself, so that the next step makes a new object: autograd has recorded this one."""
        self._itself = self

    def root(self) -> ShardedGradient:
        """Return this object itself; of a view, the gradient that it is a view of."""
        return self

    def live(self) -> ShardedGradient | None:
        """Return the ``p.grad`` whose slice an elementwise edit of this object writes; None for views."""
        return self

    @property
    def is_current(self) -> bool:
        """Return True: this object has the present values of ``p.grad``, which a detached gradient may not have."""
        return True

    def whole_in(self, wholes: Wholes) -> Tensor:
        """Return the whole gradient from ``wholes``, or gather it and store it there. Communicates."""
        if self not in wholes:
            wholes[self] = self.full_tensor()
        return wholes[self]

    def edited(self) -> tuple[ShardedParameter, OptimizerGradients]:
        """Return as ``held`` does what an edit of this object's own slice writes to; a view is written as a whole."""
        live = self.live()
        assert live is not None, "views are written as a whole"
        return live.held()

    def own_part(self, tensor: Tensor) -> Tensor:
        """Return this rank's elements, ``[n]``, of a tensor of the gradient's shape; a view if possible."""
        record, _ = self.held()
        start, stop = record.split.span(record.rank)
        return record.flat_slice(tensor)[: stop - start] if self.is_of_slice else record.flatten(tensor)[start:stop]

    def write_changes(self, before: Tensor, after: Tensor, what: str) -> None:
        """Finish reductions, and write the changes from ``before`` to ``after`` to this rank's slice. Communicates."""
        record, gradients = self.edited()
        if after.shape != before.shape:
            raise refusals.SHAPE(self.name_of_parameter, tuple(before.shape), tuple(after.shape))
        old, new = self.own_part(before), self.own_part(after)

        def edit(own: Tensor) -> None:
            own.copy_(torch.where((new == old).to(own.device), own, new.to(own)))

        gradients.change([record], what, partial(GradientStore.edit, edits={record: [edit]}))
        self.keep_current()

    def keep_current(self) -> None:
        """Do nothing: only a detached gradient keeps values, and replaces them here."""

    def detached(self) -> ShardedGradient:
        """Return a new detached gradient, which keeps a copy of this rank's slice as it is now. Communicates."""
        return DetachedGradient(self, self)


class DetachedGradient(ShardedGradient):
    """The result of ``p.grad.detach()``: it keeps its values, and writes go through to ``p.grad``."""

    def __init__(self, of: ShardedGradient, like: Tensor) -> None:
        self._follow(of)
        self._of = of
        self.keep_current()

    def full_tensor(self) -> Tensor:
        """Gather and return the whole gradient as it was detached, or last written. Every rank calls it."""
        record, gradients = self.held()
        if self.is_of_slice:
            return super().full_tensor()
        return gradients.gathered(record, self._kept)

    def to_local(self) -> Tensor:
        """Return a copy of this rank's slice as it was detached, or last written. Doesn't communicate."""
        return self._kept.clone()

    def live(self) -> ShardedGradient | None:
        """Return the ``p.grad`` from which this one was detached."""
        return self._of

    @property
    def is_current(self) -> bool:
        """Return whether no gradient of the optimizer has come or changed since ``p.grad`` was detached."""
        record, gradients = self.held()
        return not self._of._retired and gradients.is_unchanged(record, self._at)

    def keep_current(self) -> None:
        """Replace the kept slice by a copy of the present one of ``p.grad``, finishing reductions. Communicates."""
        self._kept = self._of.to_local()
        self._at = self.held()[1].versions

    def detached(self) -> ShardedGradient:
        """Return the object itself."""
        return self


class ViewOfGradient(ShardedGradient):
    """A view of a gradient: reading it reads the whole gradient, and writing to it writes to that.

    Args:
        of: the gradient.
        like: a tensor with the view's shape and strides.
        look: gives the view of a whole gradient.
    """

    def __init__(self, of: ShardedGradient, like: Tensor, look: Callable[[Tensor], Tensor]) -> None:
        self._follow(of)
        self._of, self._look = of, look

    def full_tensor(self) -> Tensor:
        """Gather the whole gradient, and return a copy of its view. Every rank calls it."""
        return self.whole_in({}).clone()

    def to_local(self) -> Tensor:
        """Raise ``RuntimeError``: the view's elements may be other ranks'."""
        raise refusals.MEMORY(self.name_of_parameter, "to_local() of a view")

    def root(self) -> ShardedGradient:
        """Return the gradient that this is a view of."""
        return self._of.root()

    def live(self) -> ShardedGradient | None:
        """Return None: an edit of a view needs the whole gradient, not this rank's slice alone."""
        return None

    def whole_in(self, wholes: Wholes) -> Tensor:
        """Return the view of the whole gradient, which is taken from ``wholes`` or gathered. Communicates."""
        return self._look(self._of.whole_in(wholes))

    def detached(self) -> ShardedGradient:
        """Return the same view of a detached gradient, which keeps a copy of this rank's slice. Communicates."""
        return ViewOfGradient(self._of.detached(), self, self._look)


def _perform_within_backward(func: Any, args: Args, kwargs: Keywords) -> Any:
    """Add autograd's gradient to ``record.pending``, or return the sum if it has a graph; raise for all else."""
    first = next(each for each in tensors_in((args, kwargs)) if isinstance(each, ShardedGradient))
    refuse_compiled(first.name_of_parameter)
    if not _is_engine(sys._getframe(1).f_back):
        raise refusals.HOOK(first.name_of_parameter, name_of(func))
    if func not in (_ADD_, _ADD) or args[0] is not first:
        raise refusals.DDP(first.name_of_parameter)
    record, _ = first.held()
    if first.live() is not first:
        refuse_assigned(record)
    check_slice(record)
    gradient: Tensor = args[1]
    if func is _ADD_:
        record.pending = gradient if record.pending is None else record.pending + gradient
        return first
    passed = gradient.clone() if record.pending is None else record.pending + gradient  # with a graph
    record.shown = record.pending = None
    return passed


def _is_engine(caller: FrameType | None) -> bool:
    """Return whether autograd's engine made this call, and not a hook of the caller's."""
    while caller is not None and caller.f_code.co_name != "_engine_run_backward":
        if not (caller.f_code.co_name == "__torch_dispatch__" or caller.f_globals["__name__"].startswith("torch.")):
            return False
        caller = caller.f_back
    return True
