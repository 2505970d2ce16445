"""The runtime provides threads, time, processes, pipes and shared memory to this package.

``runtime()`` is this process's. A simulation that runs many ranks in one process installs another runtime for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, RLock, Thread, current_thread
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch

from .memory_file import OwnMemory, map_of
from .pipes import OthersPipe, OwnPipe
from .processes import own_process

T = TypeVar("T")

_Tasks: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class Threads:
    """The threads of one owner, such as a process group's context, which joins them all.

    A thread that returned from a wait after the interpreter has ended would abort the process. One that was the last to
    hold a process group would end that too late.

    Attributes:
        broken_off: a thread that waits for a peer is to raise.
    """

    def __init__(self) -> None:
        self.broken_off = False
        self._tasks: WeakKeyDictionary[Thread, SimpleQueue[Any]] = WeakKeyDictionary()

    def start(self, thread: Thread, tasks: SimpleQueue[Any]) -> None:
        """Start a thread, which must end when it finds None in ``tasks``.

        Raises:
            RuntimeError: the system has no more threads.
        """
        thread.start()
        self._tasks[thread] = tasks

    def end(self, seconds: float) -> bool:
        """Tell all threads to end after their tasks, and join them; return whether they ended in time."""
        deadline = runtime().now() + seconds
        threads = [thread for thread in list(self._tasks) if thread is not current_thread()]
        for thread in threads:
            self._tasks[thread].put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - runtime().now()))
        return not any(thread.is_alive() for thread in threads)


class Worker:
    """One thread that carries out tasks in the order of their submission.

    The thread, one of ``threads``, starts with the first task, and ends when this object is gone and all are done.
    """

    def __init__(self, name: str, threads: Threads) -> None:
        self._name = name
        self._threads = threads
        self._tasks: _Tasks = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task for the thread, and return a future of its result; run it now if no thread can be started.

        The first task starts the thread. A task isn't left out where there is none: other ranks wait for it.
        """
        done: Future[T] = Future()
        if self._thread is None:
            thread = Thread(target=_run, args=(self._tasks,), name=self._name, daemon=True)
            try:
                self._threads.start(thread, self._tasks)
            except RuntimeError:
                with torch.no_grad():
                    carry_out(task, done)
                return done
            self._thread = thread
            finalize(self, self._tasks.put, None).atexit = False
        self._tasks.put(partial(carry_out, task, done))
        return done


class Runtime:
    """Threads, time, processes, pipes and shared memory of the operating system; a simulated rank has others.

    A nested lock's holder may take it again, as where the garbage collector calls a finaliser. Time is in seconds.
    """

    worker, lock, nested_lock = Worker, staticmethod(Lock), staticmethod(RLock)
    now, sleep = staticmethod(time.monotonic), staticmethod(time.sleep)
    own_process, own_memory, others_memory = staticmethod(own_process), OwnMemory, staticmethod(map_of)
    own_pipe, others_pipe = OwnPipe, OthersPipe

    def watch(self, thread: Thread, over: SimpleQueue[Any], threads: Threads) -> None:
        """Start a thread that must end when ``over`` gets an item; it belongs to ``threads``."""
        threads.start(thread, over)

    def backend(self, name: str) -> str:
        """Return torch's name for the backend ``name``: the same, unless simulated."""
        return name


_runtime = Runtime()


def runtime() -> Runtime:
    """Return the runtime of this process."""
    return _runtime


def install(other: Runtime) -> None:
    """Replace the runtime of this process."""
    global _runtime
    _runtime = other


def carry_out(task: Callable[[], T], done: Future[T]) -> None:
    """Run ``task``, and store its result or exception in ``done``."""
    try:
        done.set_result(task())
    except BaseException as error:  # whatever it is, who waits for the result raises it
        done.set_exception(error)


@torch.no_grad()
def _run(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it may hold the last reference to the object whose end ends this thread
