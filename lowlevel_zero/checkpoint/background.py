"""Background work: a thread's result is kept, and a failure that nobody collects fails the process at its end."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing.util import Finalize
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger("lowlevel_zero")


class Background(Future[T]):
    """A future of a thread's work. The interpreter waits for the thread before it ends.

    A failure is logged when it happens. If neither ``result`` nor ``exception`` has been called, the process ends with
    exit code 120, which is Python's own for what fails at the end; with 1 if ``multiprocessing`` has started it.

    Attributes:
        told: a caller has learnt the result or the exception.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told = False
        self._end: Finalize | None = None  # called at the process's end, also by processes that run no atexit functions
        self.set_running_or_notify_cancel()  # nobody can cancel it: other ranks write, too

    def start(self, work: Callable[[], T], executor: Executor | None = None) -> None:
        """Start ``work`` in a new thread, or on ``executor``; an uncollected error fails the process at its end."""
        self._end = Finalize(None, self._fail_at_exit, exitpriority=0)
        if executor is not None:
            executor.submit(self._run, work)
        else:
            threading.Thread(target=self._run, args=(work,), name="lowlevel_zero checkpoint").start()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the work, and return its result, or raise its exception, which counts as told then."""
        try:
            return super().result(timeout)
        finally:
            self._note_told()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the work, and return its exception, which counts as told then, or None if it succeeded."""
        error = super().exception(timeout)
        self._note_told()
        return error

    def _note_told(self) -> None:
        self.told = self.done()
        if self.told and self._end is not None:
            self._end.cancel()

    def _run(self, work: Callable[[], T]) -> None:
        """Call ``work``, and keep its result, which counts as told, or its exception, which is logged."""
        try:
            value = work()
        except BaseException as error:  # raised where it is waited for
            self.set_exception(error)
            _log.error("%s", error)
        else:
            self.set_result(value)
            self._note_told()

    def _fail_at_exit(self) -> None:
        error = super().exception()
        if error is not None:
            sys.stdout = _Failing(sys.stdout, error)


class _Failing:
    """A stand-in for ``sys.stdout`` at the interpreter's end. Its flush raises once, which sets the exit code."""

    closed = False

    def __init__(self, stdout: Any, error: BaseException) -> None:
        self._stdout, self._error = stdout, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)

    def flush(self) -> None:
        """Restore ``sys.stdout``, flush it, and raise ``RuntimeError``."""
        sys.stdout = self._stdout
        self._stdout.flush()
        raise RuntimeError(
            f"an asynchronous save failed, and its wait() wasn't called: {self._error}. Call wait() of each save"
        )
