"""The scheduler: actors, of which one runs at a time; the seed draws which one goes on.

An actor is a thread of a simulated rank: the rank's job, or a worker that the package has started. It runs until it
comes to a place where ranks meet (a message, a collective, a look at one, a store, a pipe, the clock) and hands the
baton over there. Nothing else runs meanwhile, so a seed replays exactly. When no actor can go on there is a deadlock,
told at once with every actor's stack.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from threading import Lock, Thread
from types import FrameType
from typing import Any, Protocol

from .outcome import SimulationEnded

_HAND_OVER_SECONDS = 1e-4  # on the simulated clock
_LINGER = 0.25  # how likely others may run where nobody needs them to


class Rank(Protocol):
    """What the scheduler asks of a rank."""

    number: int
    hand_overs: int
    dies_at: int
    dead: bool

    def enter(self) -> None:
        """What is process-wide becomes this rank's own."""

    def counted(self) -> AbstractContextManager[Any]:
        """Count the operations of the current thread, if they are to be counted."""

    def die(self) -> None:
        """Its peers' messages don't come through any more."""


@dataclass(eq=False)
class Actor:
    """A thread of a rank.

    Attributes:
        number: in the order of starting; the trace is made of them.
        until: what must hold before it goes on; None: nothing.
        is_job: it runs the rank's job, which is what a simulation waits for.
        parked: its job has ended, and it waits for the others'.
        busy: what a worker carries out hasn't ended.
        unwinding: it has been told to end.
        stream: of a simulated device, which does later what it calls; None: what it calls is done at once.
    """

    number: int
    rank: Rank
    name: str
    is_job: bool
    until: Callable[[], bool] | None = None
    parked: bool = False
    busy: bool = False
    unwinding: bool = False
    stream: Any = None
    baton: Lock = field(default_factory=Lock)
    thread: Thread | None = None


class Scheduler:
    """Hands the baton from actor to actor.

    Args:
        seed: of all that is drawn.
        relieve: called when nobody can go on; whether it has changed that.

    Attributes:
        random: draws a float in [0, 1): the only source of chance.
        running: who has the baton; None: the caller of ``run``.
        clock: seconds on the simulated clock.
        trace: numbers of actors in the order in which they were drawn.
        deadlock: by actor, its stack when no actor could go on; None: that hasn't been.
        ending: all actors are told to end.
    """

    def __init__(self, seed: int, relieve: Callable[[], bool]) -> None:
        self.random = Random(seed).random
        self.running: Actor | None = None
        self.clock = 0.0
        self.trace: list[int] = []
        self.deadlock: dict[Actor, str] | None = None
        self.ending = False
        self._relieve = relieve
        self._actors: list[Actor] = []
        self._threads: list[Thread] = []
        self._made = 0
        self._deadlines: list[float] = []
        self._caller = Lock()
        self._caller.acquire()

    # ---- actors ----

    def start(self, rank: Rank, name: str, body: Callable[[], None], is_job: bool = False) -> Actor:
        """Add an actor, which begins ``body`` when it is first drawn."""
        actor = Actor(self._made, rank, name, is_job)
        self._made += 1
        actor.baton.acquire()
        actor.thread = Thread(
            target=self._run_actor, args=(actor, body), name=f"rank {rank.number}: {name}", daemon=True
        )
        self._actors.append(actor)
        self._threads.append(actor.thread)
        actor.thread.start()
        return actor

    def _run_actor(self, actor: Actor, body: Callable[[], None]) -> None:
        actor.baton.acquire()
        try:
            if not (self.ending or actor.rank.dead):
                body()
        except SimulationEnded:
            pass
        finally:
            del body
            self._actors.remove(actor)
            self._pass_on(self._choose())

    def actors(self) -> Sequence[Actor]:
        """Those that haven't ended."""
        return self._actors

    def run(self) -> None:
        """Let actors run until all jobs are parked or have ended and nobody else can go on."""
        self._pass_on(self._choose())
        self._caller.acquire()

    def end(self) -> None:
        """Tell all actors to end, and let them."""
        self.ending = True
        while self._actors:
            self.run()
        for thread in self._threads:
            thread.join()

    # ---- handing over ----

    def pause(self) -> None:
        """Others may run now."""
        if self._may_go_on():
            self._hand_over(None)

    def may_pause(self) -> None:
        """Others may run now, if the seed says so."""
        if self._may_go_on() and self.random() < _LINGER:
            self._hand_over(None)

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Return when ``until()`` holds, or the clock has moved by ``seconds``; whether it holds.

        ``until`` must be without side effects and without chance.
        """
        if not self._may_go_on():
            raise SimulationEnded
        if until() and self.random() >= _LINGER:
            return True
        if seconds is None:
            self._hand_over(until)
            return True
        deadline = self.clock + seconds
        self._deadlines.append(deadline)
        try:
            self._hand_over(lambda: self.clock >= deadline or until())
        finally:  # of a rank that dies meanwhile, too
            self._deadlines.remove(deadline)
        return until()

    def sleep(self, seconds: float) -> None:
        """Return when the clock has moved by ``seconds``."""
        self.wait(lambda: False, seconds)

    def park(self) -> None:
        """The job of the running actor is over: wait until ``run`` is called again."""
        actor = self.running
        assert actor is not None
        actor.parked = True
        self.wait(lambda: not actor.parked)

    def unpark(self) -> None:
        """The next ``run`` lets the parked go on."""
        for actor in self._actors:
            actor.parked = False

    def _may_go_on(self) -> bool:
        """Whether the running actor is one that hands over; raises once if it has been told to end."""
        actor = self.running
        if actor is None:
            return False
        if actor.unwinding:
            return False
        if self.ending or actor.rank.dead:
            actor.unwinding = True
            raise SimulationEnded
        return True

    def _hand_over(self, until: Callable[[], bool] | None) -> None:
        actor = self.running
        assert actor is not None
        rank = actor.rank
        if rank.hand_overs == rank.dies_at:
            self._kill(rank)
            actor.unwinding = True
            raise SimulationEnded
        rank.hand_overs += 1
        actor.until = until
        self.clock += _HAND_OVER_SECONDS
        chosen = self._choose()
        if chosen is not actor:
            self._pass_on(chosen)
            actor.baton.acquire()
        actor.until = None
        if self.ending or rank.dead:
            actor.unwinding = True
            raise SimulationEnded

    def _kill(self, rank: Rank) -> None:
        rank.dead = True
        rank.die()
        for actor in self._actors:
            if actor.rank is rank:
                actor.until = None

    def _choose(self) -> Actor | None:
        """Draw who goes on; None: whoever called ``run``."""
        while True:
            ready = [each for each in self._actors if each.until is None or self.ending or each.until()]
            if ready:
                chosen = ready[int(self.random() * len(ready))] if len(ready) > 1 else ready[0]
                self.trace.append(chosen.number)
                return chosen
            if all(each.parked for each in self._actors if each.is_job):
                return None
            if not (self._relieve() or self._pass_time()):
                self.deadlock = {each: stack_of(each) for each in self._actors}
                self.ending = True

    def _pass_time(self) -> bool:
        """Move the clock to the next deadline; whether there is one."""
        if not self._deadlines:
            return False
        self.clock = max(self.clock, min(self._deadlines))
        return True

    def _pass_on(self, chosen: Actor | None) -> None:
        before, self.running = self.running, chosen
        if chosen is None:
            self._caller.release()
            return
        if before is None or before.rank is not chosen.rank:
            chosen.rank.enter()
        chosen.baton.release()


def stack_of(actor: Actor) -> str:
    """Where a thread is, without the simulator's own frames."""
    assert actor.thread is not None
    frame = sys._current_frames().get(actor.thread.ident or 0)
    return "".join(traceback.format_list(stack(frame)))


def stack(frame: FrameType | None) -> list[traceback.FrameSummary]:
    """The frames of a thread without the scheduler's."""
    own = (__file__, sys.modules["threading"].__file__)
    return [each for each in traceback.extract_stack(frame) if each.filename not in own]
