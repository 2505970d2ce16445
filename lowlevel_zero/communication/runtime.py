"""Runtime: all that this package asks of the system under it: threads, time, processes, pipes, backends of groups.

One object answers for this process, ``runtime()``. A simulation that runs many ranks in one process installs another
for each of them, so that nothing above this file knows the difference.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
from torch.distributed import ProcessGroup

from .memory_file import MemoryAddress, OwnMemory, map_of
from .pipes import OthersPipe, OwnPipe
from .processes import Process, own_process

T = TypeVar("T")

_Tasks: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class Threads:
    """The threads that work for one process group, or for another owner that ends them all.

    A thread that came back from a wait, or out of a store, after the interpreter has gone would abort the process. One
    that was the last to hold a process group would end that, too late. So their owner joins them.

    Attributes:
        broken_off: whoever waits for a peer is to raise.
    """

    def __init__(self) -> None:
        self.broken_off = False
        self._tasks: WeakKeyDictionary[Thread, SimpleQueue[Any]] = WeakKeyDictionary()

    def start(self, thread: Thread, tasks: SimpleQueue[Any]) -> None:
        """Start a thread that ends when it finds None in ``tasks``."""
        self._tasks[thread] = tasks
        thread.start()

    def end(self, seconds: float) -> bool:
        """Tell all threads to end after the tasks that they have; returns whether they have done so in time."""
        deadline = time.monotonic() + seconds
        threads = [thread for thread in list(self._tasks) if thread is not current_thread()]
        for thread in threads:
            self._tasks[thread].put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class Worker:
    """Carries out tasks in one thread, in the order in which they were submitted.

    The thread starts with the first task, and ends when this object is gone and all tasks are done.

    Args:
        name: of the thread.
        threads: those of which it is one.
    """

    def __init__(self, name: str, threads: Threads) -> None:
        self._name = name
        self._threads = threads
        self._tasks: _Tasks = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Add a task; the future has what it returns or raises."""
        if self._thread is None:
            self._thread = Thread(target=_run, args=(self._tasks,), name=self._name, daemon=True)
            self._threads.start(self._thread, self._tasks)
            finalize(self, self._tasks.put, None).atexit = False
        done: Future[T] = Future()
        self._tasks.put(partial(carry_out, task, done))
        return done


class Runtime:
    """The real system."""

    def worker(self, name: str, threads: Threads) -> Worker:
        """A thread that carries out tasks, one of ``threads``."""
        return Worker(name, threads)

    def watch(self, thread: Thread, over: SimpleQueue[Any], threads: Threads) -> None:
        """Start a thread that only looks, and ends when there is something in ``over``; one of ``threads``."""
        threads.start(thread, over)

    def lock(self) -> Lock:
        """A lock among this process's threads, under which one may wait for other ranks."""
        return Lock()

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        time.sleep(seconds)

    def own_process(self) -> Process:
        """This process, for other ranks to know."""
        return own_process()

    def when_left(self, group: ProcessGroup, tell: Callable[[], object]) -> None:
        """Call ``tell`` when this process leaves ``group`` without an error: it destroys the group, or ends."""
        Finalize(group, _unless_failing, (tell,), exitpriority=0)  # atexit leaves multiprocessing's children out

    def own_memory(self, ranks: int) -> OwnMemory:
        """Memory of this process that so many ranks map, itself included."""
        return OwnMemory(ranks)

    def others_memory(self, address: MemoryAddress) -> mmap.mmap:
        """The memory of another process."""
        return map_of(address)

    def own_pipe(self) -> OwnPipe:
        """A pipe that this process reads."""
        return OwnPipe()

    def others_pipe(self, process: Process, descriptor: int) -> OthersPipe:
        """The pipe that another process reads, and has under ``descriptor``."""
        return OthersPipe(process, descriptor)

    def backend(self, name: str) -> str:
        """The name under which torch makes process groups of the backend ``name``."""
        return name


def _unless_failing(tell: Callable[[], object]) -> None:
    """Call ``tell`` unless an exception ends this process, or is on its way through who destroys the group."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None or (isinstance(error, SystemExit) and not error.code):
        with suppress(RuntimeError):  # the store has gone
            tell()


_runtime = Runtime()


def runtime() -> Runtime:
    """The runtime of this process."""
    return _runtime


def install(other: Runtime) -> None:
    """Have ``other`` answer from now on."""
    global _runtime
    _runtime = other


def carry_out(task: Callable[[], T], done: Future[T]) -> None:
    """Fill ``done`` with what ``task`` returns or raises."""
    try:
        done.set_result(task())
    except BaseException as error:  # whatever it is, who waits for the result raises it
        done.set_exception(error)


@torch.no_grad()
def _run(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # which may hold the object that this thread ends with
