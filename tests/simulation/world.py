"""simulate: a job on some ranks in one process, under a seed.

    outcome = simulate(job, ranks=3, seed=7, carrier="memory", fault=Fault(rank=1, at=12))

``outcome.py`` tells what goes in and what comes out.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import sys
import traceback
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lowlevel_zero import lives
from lowlevel_zero.bookkeeping.step_state import StepState
from lowlevel_zero.communication import grid
from lowlevel_zero.communication import runtime as seam
from lowlevel_zero.communication.runtime import Runtime

from .groups import PREFIX, Store, World, register
from .network import Network
from .outcome import CARRIERS, Carrier, Fault, FaultKind, InjectedFault, Left, Outcome, SimulationEnded
from .runtime import SimulatedRuntime, _networks
from .scheduler import Scheduler

__all__ = [
    "CARRIERS",
    "Carrier",
    "Fault",
    "FaultKind",
    "InjectedFault",
    "Left",
    "Outcome",
    "SimulationEnded",
    "simulate",
]

T = TypeVar("T")

_NEVER = -1
_TIMEOUT = timedelta(minutes=30)

# What a process has once: each rank has its own while it runs.
_PROCESS_WIDE: tuple[tuple[Any, str, Callable[[], Any]], ...] = (
    (c10d, "_world", World),
    (StepState, "in_backward", list),
    (lives, "_alive", WeakValueDictionary),
    (grid, "_tries", itertools.count),
)


class SimulatedRank:
    """One rank: its process-wide state, and how far it has come."""

    def __init__(self, number: int, network: Network, seed: int, dies_at: int, shares_memory: bool) -> None:
        self.number = number
        self.hand_overs = 0
        self.dies_at = dies_at
        self.dead = False
        self.operations = 0
        self._network = network
        self.own: list[tuple[Any, str, Any]] = [(*place, make()) for *place, make in _PROCESS_WIDE]
        self.runtime: Runtime = SimulatedRuntime(network, self, shares_memory)
        self._random = torch.Generator().manual_seed(seed).get_state()

    def enter(self) -> None:
        for owner, name, value in self.own:
            setattr(owner, name, value)
        seam.install(self.runtime)
        torch.set_rng_state(self._random)

    def leave(self) -> None:
        self._random = torch.get_rng_state()

    def die(self) -> None:
        self._network.bury(self.number)


class Simulation(Generic[T]):
    """One run of a job.

    Args: see ``simulate``.
    """

    def __init__(self, job: Callable[[int], T], ranks: int, seed: int, carrier: Carrier, fault: Fault | None) -> None:
        self.scheduler = Scheduler(seed, self._relieve)
        self.network = Network(self.scheduler)
        self._job, self._carrier = job, carrier
        self._values: dict[str, bytes] = {}
        dies = {fault.rank: fault.at} if fault is not None and fault.kind == "die" else {}
        if fault is not None and fault.kind == "wait":
            self.network.hold = (fault.rank, fault.at)
        self.ranks = [
            SimulatedRank(each, self.network, seed * ranks + each, dies.get(each, _NEVER), carrier == "memory")
            for each in range(ranks)
        ]
        self.results: dict[int, T] = {}
        self.errors: dict[int, BaseException] = {}
        self.tracebacks: dict[int, str] = {}

    def _relieve(self) -> bool:
        return self.network.relieve()

    def run(self) -> Outcome[T]:
        """Run the jobs to their end, and look what is left."""
        with _one_process_for_all(self.network):
            for rank in self.ranks:
                self.scheduler.start(rank, "job", partial(self._run_job, rank), is_job=True)
            self.scheduler.run()
            self.scheduler.unpark()
            self.scheduler.run()
            self.scheduler.end()
        return self._outcome()

    def _run_job(self, rank: SimulatedRank) -> None:
        self._init_group(rank)
        try:
            self.results[rank.number] = self._job(rank.number)
        except BaseException as error:
            self.tracebacks[rank.number] = "".join(traceback.format_exception(error))
            _let_go_of_frames(error)
            self.errors[rank.number] = error
        self.scheduler.park()
        dist.destroy_process_group()

    def _init_group(self, rank: SimulatedRank) -> None:
        """What ``init_process_group`` does."""
        backend = PREFIX + ("nccl" if self._carrier == "nccl" else "gloo")
        store = Store(self.network, self._values)
        everybody = list(range(len(self.ranks)))
        group, _ = c10d._new_process_group_helper(
            len(everybody), rank.number, [], dist.Backend(backend), store, "default", timeout=_TIMEOUT
        )
        c10d._world.pg_group_ranks[group] = {each: each for each in everybody}
        c10d._update_default_pg(group)

    def _outcome(self) -> Outcome[T]:
        deadlock = None
        if self.scheduler.deadlock is not None:
            deadlock = {each.rank.number: stack for each, stack in self.scheduler.deadlock.items() if each.is_job}
        digest = hashlib.sha256(array("i", self.scheduler.trace).tobytes())
        digest.update(repr(self.network.log).encode())
        return Outcome(
            self.results,
            self.errors,
            deadlock,
            self.network.mismatch,
            digest.hexdigest()[:16],
            len(self.scheduler.trace),
            {each.number: each.operations for each in self.ranks},
            dict(self.network.sent),
            {each.number: each.hand_overs for each in self.ranks},
            self.tracebacks,
        )


@contextmanager
def _one_process_for_all(network: Network) -> Iterator[None]:
    """Keep what the caller's process has once, and garbage from being collected at chance moments."""
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in _PROCESS_WIDE]
    before, state, collects = seam.runtime(), torch.get_rng_state(), gc.isenabled()
    register(lambda: _networks[-1])
    _networks.append(network)
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    gc.disable()
    hook = sys.unraisablehook
    sys.unraisablehook = lambda told: None if isinstance(told.exc_value, SimulationEnded) else hook(told)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if collects:
            gc.enable()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _networks.pop()
        for owner, name, value in kept:
            setattr(owner, name, value)
        seam.install(before)
        torch.set_rng_state(state)


def _let_go_of_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of its causes, whose frames would keep alive what they hold."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        each = chain.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            chain += [each.__cause__, each.__context__]
            traceback.clear_frames(each.__traceback__)
            each.with_traceback(None)


def simulate(
    job: Callable[[int], T],
    ranks: int,
    seed: int,
    carrier: Carrier = "messages",
    fault: Fault | None = None,
    *,
    count: bool = False,
) -> Outcome[T]:
    """Run ``job(rank)`` on some ranks, in one process, one at a time, as ``seed`` draws it.

    Args:
        job: what each rank does; it finds an initialised default process group.
        ranks: how many there are.
        seed: of all that is drawn.
        carrier: what carries buffers.
        fault: what goes wrong; None: nothing.
        count: count the package's operations, too.
    """
    return Simulation(job, ranks, seed, carrier, fault).run()
