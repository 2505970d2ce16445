"""Work: a collective that is under way, as every backend returns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

S = TypeVar("S")
T = TypeVar("T")


def _already() -> bool:
    return True


class Work(Generic[T]):
    """A collective that is under way.

    Args:
        finish: waits for it, and makes its result.
        done: whether ``finish`` would return at once, as far as can be told.
        tensors: what it reads and writes.

    Attributes:
        done: as given.
        tensors: as given; kept alive here until the result is taken.
        waiter: does the waiting: it is called with ``finish``; None: nobody looks on.
    """

    __slots__ = ("_finish", "done", "tensors", "waiter")

    def __init__(
        self, finish: Callable[[], T], done: Callable[[], bool] = _already, tensors: tuple[Tensor, ...] = ()
    ) -> None:
        self._finish = finish
        self.done = done
        self.tensors = tensors
        self.waiter: Callable[[Callable[[], T]], T] | None = None

    def wait(self) -> T:
        """The result, once. On CUDA the current stream waits, not the host."""
        return self._finish() if self.waiter is None else self.waiter(self._finish)

    def then(self, act: Callable[[T], S]) -> Work[S]:
        """What ``act`` makes of the result, when it is waited for."""
        return Work(lambda: act(self.wait()), self.done, self.tensors)

    def detached(self) -> Work[None]:
        """What keeps the collective going, and no more, when nobody will take its result."""
        return Work(lambda: None, self.done, self.tensors)
