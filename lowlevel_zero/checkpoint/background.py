"""Writes in the background: a failure that nobody has waited for fails the process at its end."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger("lowlevel_zero")


class Background(Future[T]):
    """A future of what a thread does, for which the interpreter's end waits.

    A failure is logged when it happens. If neither ``result`` nor ``exception`` has told anybody by then, the process
    ends with exit code 120, which is Python's own for what fails at the end.

    Attributes:
        told: somebody knows how it ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told = False
        self.set_running_or_notify_cancel()  # nobody can cancel it: other ranks write, too

    def run(self, work: Callable[[], T]) -> None:
        """Do the work in this thread, and keep what it returns or raises."""
        try:
            value = work()
        except BaseException as error:  # raised where it is waited for
            self.set_exception(error)
        else:
            self.set_result(value)

    def start(self, work: Callable[[], T], executor: Executor | None = None) -> None:
        """Have a thread do the work: the ``executor``'s, or one of its own."""
        atexit.register(self._fail_at_exit)
        if executor is not None:
            executor.submit(self._run_logged, work)
        else:
            threading.Thread(target=self._run_logged, args=(work,), name="lowlevel_zero checkpoint").start()

    def result(self, timeout: float | None = None) -> T:
        """Return what the work has returned, when it is over, or raise what it has raised."""
        try:
            return super().result(timeout)
        finally:
            self._note_told()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the work has raised, when it is over."""
        error = super().exception(timeout)
        self._note_told()
        return error

    def _note_told(self) -> None:
        self.told = self.done()
        if self.told:
            atexit.unregister(self._fail_at_exit)

    def _run_logged(self, work: Callable[[], T]) -> None:
        self.run(work)
        error = super().exception()
        if error is None:
            self._note_told()
        else:
            _log.error("%s", error)

    def _fail_at_exit(self) -> None:
        error = super().exception()
        if error is not None:
            sys.stdout = _Failing(sys.stdout, error)


class _Failing:
    """Stands for ``sys.stdout`` at the interpreter's end, whose flush raises: that sets the exit code."""

    closed = False

    def __init__(self, stdout: Any, error: BaseException) -> None:
        self._stdout, self._error = stdout, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)

    def flush(self) -> None:
        """Flush the stream, and raise once."""
        sys.stdout = self._stdout
        self._stdout.flush()
        raise RuntimeError(f"an asynchronous save failed, and nobody has waited for it: {self._error}")
