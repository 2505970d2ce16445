"""The runtime of a simulated rank: workers are actors, time is the scheduler's, processes are ranks."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import finalize

import torch

from lowlevel_zero.communication.memory_file import MemoryAddress, OwnMemory
from lowlevel_zero.communication.pipes import OthersPipe, OwnPipe
from lowlevel_zero.communication.processes import Process
from lowlevel_zero.communication.runtime import Runtime, Threads, Worker, carry_out

from .groups import BACKENDS, PREFIX
from .network import Network
from .scheduler import Actor, Rank, Scheduler
from .shared import SimulatedMemory, SimulatedOthersPipe, SimulatedPipe

T = TypeVar("T")


class SimulatedProcess(Process):
    """A rank, seen as a process."""

    def has_ended(self) -> bool:
        """Whether the simulation has killed it."""
        return int(self.began) in _networks[-1].dead


# Of the simulation that runs; a process is sent as plain values, and can't hold it.
_networks: list[Network] = []


class SimulatedFuture(Future[T]):
    """A task's result, whose wait is the scheduler's."""

    network: Network

    def result(self, timeout: float | None = None) -> T:
        """What the task has returned, or raises what it has raised."""
        if not self.done():
            self.network.scheduler.wait(self.done, timeout)
        return super().result(None if self.done() else 0)


class Tasks(deque["Callable[[], None] | None"]):
    """Tasks of an actor; None ends it."""

    def put(self, task: Callable[[], None] | None) -> None:
        """Add a task."""
        self.append(task)


class SimulatedThread(Thread):
    """An actor, for the owner of a rank's threads, which joins them.

    Args:
        name: the actor's name.
        network: of all ranks.
        rank: the actor's rank.
        todo: the actor's tasks.
    """

    def __init__(self, name: str, network: Network, rank: Rank, todo: Tasks) -> None:
        super().__init__(name=name)
        self._network, self._of_rank, self._todo = network, rank, todo
        self._actor: Actor | None = None

    def start(self) -> None:
        """Start the actor, which keeps this object alive."""
        scheduler = self._network.scheduler
        self._actor = scheduler.start(self._of_rank, self.name, partial(_work, self._network, self._todo, self))

    def is_alive(self) -> bool:
        """Return whether the actor runs."""
        return self._actor in self._network.scheduler.actors()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the actor's end, but not for that of the actor that calls this, or when the simulation is over."""
        scheduler = self._network.scheduler
        if scheduler.running is not self._actor and not scheduler.ending:
            scheduler.wait(lambda: not self.is_alive(), timeout)


class SimulatedWorker(Worker):
    """An actor that carries out tasks."""

    def __init__(self, name: str, network: Network, rank: Rank, threads: Threads) -> None:
        self._name, self._network, self._rank, self._threads = name, network, rank, threads
        self._todo = Tasks()
        self._started = False

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """As the real one, on the scheduler."""
        done: SimulatedFuture[T] = SimulatedFuture()
        done.network = self._network
        self._todo.append(partial(carry_out, task, done))
        if not self._started:
            self._started = True
            self._threads.start(SimulatedThread(self._name, self._network, self._rank, self._todo), self._todo)
            finalize(self, self._todo.append, None).atexit = False
        return done


@torch.no_grad()
def _work(network: Network, todo: Tasks, thread: SimulatedThread) -> None:
    scheduler, actor = network.scheduler, network.scheduler.running
    assert actor is not None
    with actor.rank.counted():
        _carry_out_all(scheduler, actor, todo)


def _carry_out_all(scheduler: Scheduler, actor: Actor, todo: Tasks) -> None:
    while True:
        if not todo:
            scheduler.wait(lambda: bool(todo))
        task = todo.popleft()
        if task is None:
            return
        actor.busy = True
        task()
        actor.busy = False
        del task  # which may hold the object that this actor ends with


class SimulatedLock:
    """A lock among the actors of a rank, which take it in the order in which they come."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False
        self._queue: deque[object] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        """Take it, when nobody else has it; whether it has been taken."""
        if self._is_held or self._queue:
            if not blocking:
                return False
            turn = object()
            self._queue.append(turn)
            try:
                self._scheduler.wait(lambda: not self._is_held and self._queue[0] is turn)
            finally:  # of a rank that dies meanwhile, too
                self._queue.remove(turn)
        self._is_held = True
        return True

    def release(self) -> None:
        """Let another one take it."""
        self._is_held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedNestedLock(SimulatedLock):
    """A lock that its actor may take again."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._owner: object = None
        self._times = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Take it, or take it once more."""
        is_own = self._times > 0 and self._owner is self._scheduler.running
        if not is_own and not super().acquire(blocking):
            return False
        self._owner = self._scheduler.running
        self._times += 1
        return True

    def release(self) -> None:
        """Let another one take it when it was released as often as taken."""
        self._times -= 1
        if not self._times:
            super().release()


class IdleRuntime(Runtime):
    """When a simulation has ended: workers of what is collected then do nothing, and no thread starts."""

    def worker(self, name: str, threads: Threads) -> Worker:
        """One that drops its tasks."""
        return _IdleWorker(name, threads)


class _IdleWorker(Worker):
    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Return a future that never has a result."""
        return Future()


class SimulatedRuntime(Runtime):
    """What one simulated rank asks of its system."""

    def __init__(self, network: Network, rank: Rank, shares_memory: bool) -> None:
        self._network, self._rank, self._shares = network, rank, shares_memory

    def worker(self, name: str, threads: Threads) -> Worker:
        """An actor."""
        return SimulatedWorker(name, self._network, self._rank, threads)

    def watch(self, thread: Thread, over: SimpleQueue[Any], threads: Threads) -> None:
        """Nobody needs to look: a deadlock is told at once."""

    def lock(self) -> SimulatedLock:
        """A lock that waits by the scheduler."""
        return SimulatedLock(self._network.scheduler)

    def nested_lock(self) -> SimulatedNestedLock:
        """A lock that waits by the scheduler, and that its actor may take again."""
        return SimulatedNestedLock(self._network.scheduler)

    def now(self) -> float:
        """The simulated clock."""
        return self._network.scheduler.clock

    def sleep(self, seconds: float) -> None:
        """Until the clock has moved."""
        self._network.scheduler.sleep(seconds)

    def own_process(self) -> Process:
        """The rank."""
        return SimulatedProcess("simulated", 0, str(self._rank.number))

    def own_memory(self) -> OwnMemory:
        """Memory that all ranks see, where the carrier is memory."""
        if not self._shares:
            raise OSError("these ranks share no memory")
        return SimulatedMemory(self._network, self.own_process())

    def others_memory(self, address: MemoryAddress) -> mmap.mmap:
        """The memory of another rank."""
        memory: SimulatedMemory = self._network.memories[address.descriptor]
        return memory.map

    def own_pipe(self) -> OwnPipe:
        """A pipe whose records come when the seed says so."""
        return SimulatedPipe(self._network)

    def others_pipe(self, process: Process, descriptor: int) -> OthersPipe:
        """The pipe of another rank."""
        return SimulatedOthersPipe(self._network, descriptor, self._rank.number)

    def backend(self, name: str) -> str:
        """The name under which torch makes simulated groups."""
        for each in BACKENDS:
            name = name.replace(each, PREFIX + each)
        return name
