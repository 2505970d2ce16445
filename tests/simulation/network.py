"""The network: what all simulated ranks share below their process groups."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from .collectives import Collectives
from .messages import Messages
from .outcome import SimulationEnded
from .scheduler import Scheduler


class Network:
    """Messages, collectives and memory of a simulation.

    Args:
        scheduler: hands the baton over.

    Attributes:
        scheduler: as given.
        dead: global ranks whose process has ended.
        log: all that was sent, for the trace.
        messages, collectives: what is under way.
        mismatch: how two ranks' collectives or messages differ; None: they don't.
        groups: all process groups of all ranks that live.
        memories, pipes: of all ranks, where they share memory; places in them stand for descriptors.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.dead: set[int] = set()
        self.log: list[object] = []
        self.messages = Messages(scheduler, self.dead, self.log, self.fail)
        self.collectives = Collectives(scheduler, self.dead, self.log, self.fail)
        self.mismatch: str | None = None
        self.groups: WeakSet[Any] = WeakSet()
        self.memories: list[Any] = []
        self.pipes: list[Any] = []

    def bury(self, rank: int) -> None:
        """The process of a global ``rank`` has ended."""
        self.dead.add(rank)
        self.messages.bury(rank)

    def fail(self, why: str) -> None:
        """End the simulation: ranks have given each other what doesn't belong together."""
        if not self.dead:  # else they have lost a rank, or will hear of it
            self.mismatch = self.mismatch or why
        self.scheduler.ending = True
        raise SimulationEnded
