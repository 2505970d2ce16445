"""Operations of the package on one rank: counted, and made to fail at the one that a fault asks for.

An operation is a call of an operator of torch from a function of the package, or of torch where the package has called
it (the wrapped optimizer's step, a backward). Views are none: they can't fail. The one that fails doesn't run.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .outcome import InjectedFault

_PACKAGE, _BENEATH = "lowlevel_zero.", ("torch.", "contextlib")


class Operations:
    """Those of one rank.

    Args:
        fails_at: the one that raises, from 0; -1: none.

    Attributes:
        count: how many there have been.
        failed: where the one that was to fail was called, as ``file:line function``; empty: it hasn't been.
    """

    def __init__(self, fails_at: int) -> None:
        self.count = 0
        self.failed = ""
        self._fails_at = fails_at

    def counted(self) -> TorchDispatchMode:
        """Counts what the current thread does, within a ``with``."""
        return _Counted(self)

    def operate(self, name: str, frame: FrameType) -> None:
        """Count one operation, or raise in its place."""
        number = self.count
        self.count += 1
        if number == self._fails_at:
            self.failed = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            raise InjectedFault(f"injected fault in operation {number}, {name}, of {self.failed}")


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
            if frame is not None:
                self._operations.operate(str(func), frame)
        return func(*args, **(kwargs or {}))


def _of_package(frame: FrameType | None) -> FrameType | None:
    """The package's frame that has called this one, through torch's at most; None: somebody else has."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_PACKAGE):
            return frame
        if not name.startswith(_BENEATH):
            return None
        frame = frame.f_back
    return None
