"""simulate: a job on some ranks in one process, under a seed.

    outcome = simulate(job, ranks=3, seed=7, carrier="memory", fault=Fault(rank=1, at=12))

``outcome.py`` tells what goes in and what comes out.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import traceback
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar, get_args
from weakref import WeakSet, WeakValueDictionary

import torch
import torch._dynamo  # imported later, in a simulated rank, these would keep its default group
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed import distributed_c10d as c10d

from lowlevel_zero import lives, streams
from lowlevel_zero.bookkeeping import awaited
from lowlevel_zero.bookkeeping.step_state import StepState
from lowlevel_zero.communication import runtime as seam
from lowlevel_zero.communication.runtime import Runtime
from lowlevel_zero.streams import Streams

from . import remains
from .device import SimulatedStreams
from .groups import PREFIX, Store, World, register
from .network import Network
from .operations import Operations, without_modes_of_others
from .outcome import CARRIERS, Carrier, Fault, FaultKind, InjectedFault, Left, Outcome, SimulationEnded
from .runtime import IdleRuntime, SimulatedRuntime, _networks
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
_NO_MODES = "_disable_current_modes"
_TIMEOUT = timedelta(minutes=30)

# What a process has once: each rank has its own while it runs.
_PROCESS_WIDE: tuple[tuple[Any, str, Callable[[], Any]], ...] = (
    (c10d, "_world", World),
    (StepState, "in_backward", list),
    (StepState, "alive", WeakSet),
    (lives, "_alive", WeakValueDictionary),
)


class SimulatedRank:
    """One rank: its process-wide state, and how far it has come."""

    def __init__(
        self, number: int, network: Network, dies_at: int, carrier: Carrier, operations: Operations | None
    ) -> None:
        self.number = number
        self.hand_overs = 0
        self.dies_at = dies_at
        self.dead = False
        self.operations = operations
        self._network = network
        self.own: list[tuple[Any, str, Any]] = [(*place, make()) for *place, make in _PROCESS_WIDE]
        self.own.append((streams, "of_host", partial(SimulatedStreams, network) if carrier == "nccl" else Streams))
        self.runtime: Runtime = SimulatedRuntime(network, self, carrier == "memory")

    def enter(self) -> None:
        for owner, name, value in self.own:
            setattr(owner, name, value)
        seam.install(self.runtime)

    def counted(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.operations is None else self.operations.counted()

    def die(self) -> None:
        self._network.bury(self.number)


class Simulation(Generic[T]):
    """One run of a job.

    Args: see ``simulate``.
    """

    def __init__(
        self, job: Callable[[int], T], ranks: int, seed: int, carrier: Carrier, fault: Fault | None, count: bool
    ) -> None:
        self.scheduler = Scheduler(seed, self._relieve)
        self.network = Network(self.scheduler)
        self._job, self._carrier = job, carrier
        self._store = Store(self.network)  # torch's prefixes of it don't keep what is Python's of it
        at: dict[str, dict[int, int]] = {kind: {} for kind in get_args(FaultKind)}
        if fault is not None:
            at[fault.kind][fault.rank] = fault.at
        self.network.messages.hold = next(iter(at["wait"].items()), None)
        self.ranks = [
            SimulatedRank(
                each,
                self.network,
                at["die"].get(each, _NEVER),
                carrier,
                Operations(at["raise"].get(each, _NEVER)) if count or each in at["raise"] else None,
            )
            for each in range(ranks)
        ]
        self.left = Left()
        self._descriptors = remains.descriptors()
        self._steps_of: dict[int, int] = {}
        self.results: dict[int, T] = {}
        self.errors: dict[int, BaseException] = {}
        self.tracebacks: dict[int, str] = {}

    def _relieve(self) -> bool:
        """Nobody can go on: let a message come that waits, or a rank leave whose job has ended; whether one does."""
        if self.network.messages.relieve():
            return True
        gone = next((rank for rank in self._steps_of if rank not in self.network.dead), None)
        if gone is not None:
            self.network.bury(gone)
        return gone is not None

    def run(self) -> Outcome[T]:
        """Run the jobs to their end, and look what is left."""
        with _current(self.network):
            for rank in self.ranks:
                self.scheduler.start(rank, "job", partial(self._run_job, rank), is_job=True)
            self.scheduler.run()
            if not (self.scheduler.ending or self.network.dead):
                self._look_around()
            self.scheduler.end()
        return self._outcome()

    def _run_job(self, rank: SimulatedRank) -> None:
        self._init_group(rank)
        try:
            with rank.counted():
                result = self._job(rank.number)
            if rank.dead:  # and nothing but a finalizer has noticed
                raise SimulationEnded
            self.results[rank.number] = result
        except BaseException as error:
            self.tracebacks[rank.number] = "".join(traceback.format_exception(error))
            _let_go_of_frames(error)
            self.errors[rank.number] = error
        self._steps_of[rank.number] = rank.hand_overs
        self.scheduler.park()
        dist.destroy_process_group()

    def _init_group(self, rank: SimulatedRank) -> None:
        """What ``init_process_group`` does."""
        backend = PREFIX + ("nccl" if self._carrier == "nccl" else "gloo")
        everybody = list(range(len(self.ranks)))
        group, _ = c10d._new_process_group_helper(
            len(everybody), rank.number, [], dist.Backend(backend), self._store, "default", timeout=_TIMEOUT
        )
        c10d._world.pg_group_ranks[group] = {each: each for each in everybody}
        c10d._update_default_pg(group)

    def _look_around(self) -> None:
        """See what is left when all jobs have ended; then have groups destroyed, and see what is left of these."""
        gc.collect()
        self.scheduler.run()  # what the collected have told their workers
        while self.network.messages.relieve():  # workers may wait for them
            self.scheduler.run()
        tensors = remains.tensors([*self.results.values(), *self.errors.values()])
        messages, blocks = self.network.messages.unmatched(), remains.blocks(self.network)
        self.scheduler.unpark()
        self.scheduler.run()
        gc.collect()
        groups = tuple(sorted(f"{each.group_name} of rank {each.rank()}" for each in self.network.groups))
        threads = tuple(f"rank {each.rank.number}: {each.name}" for each in self.scheduler.actors())
        self.left = Left(tensors, tuple(messages), blocks, groups, threads, remains.descriptors() - self._descriptors)

    def _outcome(self) -> Outcome[T]:
        deadlock = None
        if self.scheduler.deadlock is not None:
            deadlock = {each.rank.number: stack for each, stack in self.scheduler.deadlock.items() if each.is_job}
        counted = {each.number: each.operations for each in self.ranks if each.operations is not None}
        digest = hashlib.sha256(array("i", self.scheduler.trace).tobytes())
        digest.update(repr(self.network.log).encode())
        return Outcome(
            self.results,
            self.errors,
            deadlock,
            self.network.mismatch,
            digest.hexdigest()[:16],
            len(self.scheduler.trace),
            {rank: each.count for rank, each in counted.items()},
            {rank: each.places for rank, each in counted.items()},
            "".join(each.failed for each in counted.values()),
            dict(self.network.messages.sent),
            self._steps_of,
            self.tracebacks,
            self.left,
        )


@contextmanager
def _current(network: Network) -> Iterator[None]:
    _networks.append(network)
    try:
        yield
    finally:
        _networks.pop()


@contextmanager
def _one_process_for_all(seed: int) -> Iterator[None]:
    """Keep what the caller's process has once, and garbage from being collected at chance moments."""
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in _PROCESS_WIDE]
    kept += [(owner, name, getattr(owner, name)) for owner, name in ((streams, "of_host"), (awaited, _NO_MODES))]
    setattr(awaited, _NO_MODES, without_modes_of_others)
    before, generator, collects = seam.runtime(), torch.get_rng_state(), gc.isenabled()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty makes, with NaN or the largest
    torch.default_generator.manual_seed(seed)
    register(lambda: _networks[-1])
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    gc.disable()
    gc.collect()
    gc.freeze()  # what was there before is no garbage of this run, and isn't looked through, then or ever
    hook = sys.unraisablehook
    sys.unraisablehook = lambda told: None if isinstance(told.exc_value, SimulationEnded) else hook(told)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        for owner, name, value in kept:
            setattr(owner, name, value)
        seam.install(IdleRuntime())
        torch.set_rng_state(generator)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        gc.collect()  # of ranks that have died, too
        seam.install(before)
        sys.unraisablehook = hook
        if collects:
            gc.enable()


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
    with _one_process_for_all(seed):
        return Simulation(job, ranks, seed, carrier, fault, count).run()
