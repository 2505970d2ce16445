"""Operations of the package on one rank: counted, and made to fail at the one that a fault asks for.

An operation is a call of an operator of torch from a function of the package, or of torch where the package has called
it (the wrapped optimizer's step, a backward). Views are none: they can't fail. Nor are the few bytes that hosts tell
each other, be it by torch: no memory is too full for these, and a rank that can't agree can't tell the others so. Nor
is the packing within torch's own broadcast, in whose place nothing else can be sent. The operation that fails doesn't
run. Where a finalizer called it, Python swallows the error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from lowlevel_zero.communication.progress import AGREEMENT, MESSAGE, Progress

from .outcome import InjectedFault

_PACKAGE, _BENEATH = "lowlevel_zero.", ("torch.", "contextlib")
_TORCHS_OBJECTS = "torch.distributed.distributed_c10d"  # gathered and scattered, as a checkpoint's plans are
_PACKS_BROADCAST = "_spread", torch.ops.aten.cat.default
# Functions that make messages of a few bytes, by module, and kinds of collectives that carry them.
_FEW = {
    "lowlevel_zero.checkpoint.storage": {"_gather", "_outcome"},
    "lowlevel_zero.bookkeeping.unused_parameters": {"exchange"},
    "lowlevel_zero.communication.shard_group": {"all_gather_object", "all_reduce_max"},
    "lowlevel_zero.communication.backends.backend": {"all_gather_object", "_combined", "maximum", "read"},
    "lowlevel_zero.communication.backends.pairwise": {"maximum", "run_rounds"},
}
_KINDS = {AGREEMENT, MESSAGE}
_PROGRESS = {Progress.start.__code__, Progress.wait.__code__}


class Operations:
    """Those of one rank.

    Args:
        fails_at: the one that raises, from 0; -1: none.

    Attributes:
        count: how many there have been.
        places: the functions of the package that have called them, in order.
        failed: where the one that was to fail was called, as ``file:line function``; empty: it hasn't been.
    """

    def __init__(self, fails_at: int) -> None:
        self.count = 0
        self.places: list[str] = []
        self.failed = ""
        self._fails_at = fails_at

    def counted(self) -> TorchDispatchMode:
        """Counts what the current thread does, within a ``with``."""
        return _Counted(self)

    def operate(self, name: str, frame: FrameType) -> None:
        """Count one operation, or raise in its place."""
        number = self.count
        self.count += 1
        self.places.append(frame.f_code.co_name)
        if number == self._fails_at:
            file = frame.f_globals["__name__"].replace(".", "/")  # the same wherever the package lies, as messages are
            self.failed = f"{file}.py:{frame.f_lineno} {frame.f_code.co_name}"
            raise InjectedFault(f"injected fault in operation {number}, {name}, of {self.failed}")


@contextmanager
def without_modes_of_others() -> Iterator[None]:
    """Disable torch's modes but that which counts: the package does so where it finishes a gather within a read."""
    counting = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Counted)]
    with _disable_current_modes(), counting[0] if counting else nullcontext():
        yield


class _Counted(TorchDispatchMode):
    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count ``func`` if it is an operation of the package, and call it."""
        if not func.is_view:
            frame = _of_package(sys._getframe(1))
            if frame is not None and not _is_for_few(frame) and not _packs_broadcast(func, frame):
                self._operations.operate(str(func), frame)
        return func(*args, **(kwargs or {}))


def _of_package(frame: FrameType | None) -> FrameType | None:
    """The package's frame that has called this one, through torch's at most; None: somebody else has."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_PACKAGE):
            return frame
        if name == _TORCHS_OBJECTS or not name.startswith(_BENEATH):
            return None
        frame = frame.f_back
    return None


def _packs_broadcast(func: Any, frame: FrameType) -> bool:
    """Whether torch's own broadcast packs what it sends."""
    return (frame.f_code.co_name, func) == _PACKS_BROADCAST


def _is_for_few(frame: FrameType | None) -> bool:
    """Whether it is in the midst of what hosts tell each other, or about to be."""
    if frame is not None and frame.f_code.co_name in _FEW.get(frame.f_globals["__name__"], ()):
        return True
    while frame is not None:
        if frame.f_code in _PROGRESS:
            return getattr(frame.f_locals.get("collective"), "kind", frame.f_locals.get("kind")) in _KINDS
        frame = frame.f_back
    return False
