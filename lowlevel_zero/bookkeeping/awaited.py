"""Parameters whose new values are being gathered: every read of such a parameter waits for its values first.

A forward hook knows which parameters its module owns, not which ones it uses: a weight may be tied, used by another
module's forward, or held in somebody's list. So the parameter itself waits: until its values are there its class is
``AwaitedParameter``, whose every use in an operation comes through ``__torch_function__`` (torch's own way for tensors
that behave differently; ``UninitializedParameter`` changes its class likewise).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

_GRAD: Any = Tensor.grad
_REQUIRES_GRAD: Any = Tensor.requires_grad

# What may be asked of a parameter without reading its elements.
_HARMLESS = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("grad", "requires_grad", "is_leaf", "grad_fn", "output_nr", "_version"),
                *("shape", "ndim", "dtype", "device", "layout"),
                *("is_cuda", "is_cpu", "is_sparse", "is_nested", "is_meta", "is_quantized"),
            )
        ),
        *(_GRAD.__set__, _GRAD.__delete__, _REQUIRES_GRAD.__set__, Tensor.requires_grad_),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size),
        *(Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    ]
)

# Waits for a parameter's values; given True, on the host too, where else a device's stream may wait for them alone.
_Wait: TypeAlias = Callable[[bool], None]

_waits: dict[Tensor, _Wait] = {}


def _once_arrived(method: str) -> Any:
    """Return a method that waits on the host for the new values, and calls the ``method`` of an ordinary parameter."""

    def act(self: AwaitedParameter, *given: Any) -> Any:
        wait_for(self, on_host=True)
        return getattr(self, method)(*given)

    return act


class AwaitedParameter(nn.Parameter):
    """The class of a parameter while its new values are gathered; afterwards it is an ``nn.Parameter`` again."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the awaited parameters in the arguments, unless ``func`` reads no elements; then call ``func``."""
        kwargs = kwargs or {}
        awaited = [] if func in _HARMLESS else list(_awaited_in([args, kwargs]))
        for p in awaited:
            wait_for(p)
        if func is Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            wait_for(args[0], on_host=True)
            return nn.Parameter(args[0])  # for a class of tensors it wants detach to return that class
        if awaited and next(_awaited_in([args, kwargs]), None) is None:  # others may be of a class of their own
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    as_subclass = _once_arrived("as_subclass")
    __deepcopy__ = _once_arrived("__deepcopy__")
    __reduce_ex__ = _once_arrived("__reduce_ex__")


def can_be_awaited(parameters: Iterable[Tensor]) -> bool:
    """Return whether every read of ``parameters`` can be noticed, so that their gather may overlap the forward.

    Subclasses, compiled code, TorchScript and CUDA graphs have ways of their own to read a parameter.
    """
    unnoticed = _compiler_at_work() or _torchscript_at_work() or torch.cuda.graph.default_capture_stream is not None
    return not unnoticed and all(type(p) is nn.Parameter for p in parameters)


def defer_until_read(parameters: Iterable[Tensor], wait: _Wait) -> None:
    """Make ``parameters`` call ``wait`` before they are read; it has to call ``arrived``, at once if given True."""
    _let_compiler_wait()
    for p in parameters:
        _waits[p] = wait
        p.__class__ = AwaitedParameter


def arrived(parameters: Iterable[Tensor]) -> None:
    """Make awaited parameters ordinary ones again: their values are there, or about to be written."""
    for p in parameters:
        if _waits.pop(p, None) is not None:
            p.__class__ = nn.Parameter


def wait_for(p: Tensor, on_host: bool = False) -> None:
    """Wait until ``p`` may be read; returns at once if it isn't awaited.

    ``on_host``: until it is an ordinary parameter. Else the current stream waits, and others have yet to.
    """
    wait = _waits.get(p)
    if wait is not None:
        # A mode of the reader's (FakeTensorMode, a default device) isn't meant for what we do.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            wait(on_host)


def _awaited_in(values: Any) -> Iterator[AwaitedParameter]:
    """Yield the awaited parameters in ``values`` and in the dicts, lists and tuples nested in it."""
    if isinstance(values, AwaitedParameter):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _awaited_in(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _awaited_in(value)


def _compiler_at_work() -> bool:
    """Return whether ``torch.compile`` has compiled something in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return _compiling.seen or (dynamo is not None and any(dynamo.counters.get(kind) for kind in ("frames", "stats")))


# torch scripts its functional optimizers when they are imported, and ColossalAI a function of sequences' lengths.
_SCRIPTED_BY_LIBRARIES = ("__torch__.torch.", "__torch__.colossalai.shardformer.layer.utils.")
_MODULES = "__torch__.torch.nn."


def _torchscript_at_work() -> bool:
    """Return whether this process has scripted or traced something besides known libraries' functions."""
    compiled: Any = torch.jit._state._python_cu
    names = (function.qualified_name for function in compiled.get_functions())
    return any(_MODULES in name or not name.startswith(_SCRIPTED_BY_LIBRARIES) for name in names)


class _Compiling:
    """A callback that makes all parameters ordinary before ``torch.compile`` starts, and remembers that it has.

    The host waits: parameters whose rows a device has yet to write would be compiled as those of another class.
    """

    seen = False

    def __call__(self, *_: Any) -> None:
        self.seen = True
        for p in list(_waits):
            wait_for(p, on_host=True)


_compiling = _Compiling()


def _let_compiler_wait() -> None:
    """Register the callback with ``torch.compile``, if that has been imported."""
    dynamo = sys.modules.get("torch._dynamo.callback")
    if dynamo is not None and _compiling not in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.register_start_callback(_compiling)
