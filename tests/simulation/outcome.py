"""What a simulation is told to break, and what it came to: the records that ``world.simulate`` takes and gives.

    outcome = simulate(job, ranks=3, seed=7, carrier="memory", fault=Fault(rank=1, at=12))

``job(rank)`` runs once for every rank, each in a thread of its own, of which one runs at a time. It finds an
initialised default process group and may call ``torch.distributed`` as in a real process (``get_rank``, ``new_group``
and collectives included). What it returns must not hold an optimizer or a model: what is left behind is looked for
when all jobs have ended. The seed decides who runs next and when messages come, and nothing else does: the same
arguments give the same ``Outcome.trace``, in any process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeAlias, TypeVar

S, T = TypeVar("S"), TypeVar("T")

# What carries buffers: gloo's messages by tag; memory that all ranks share; NCCL's collectives in issue order.
Carrier: TypeAlias = Literal["messages", "memory", "nccl"]
CARRIERS: tuple[Carrier, ...] = ("messages", "memory", "nccl")

# raise: the operation raises ``InjectedFault``, as one that finds no memory would.
# die: the rank stops for good at that hand-over; peers see what they see of a process that was killed.
# wait: that message to another rank is held back until no rank can go on without it.
FaultKind: TypeAlias = Literal["raise", "die", "wait"]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        rank: where.
        at: which one of that rank's operations (``raise``), hand-overs (``die``) or sent messages (``wait``), from 0.
        kind: what happens then.
    """

    rank: int
    at: int
    kind: FaultKind = "raise"


class InjectedFault(RuntimeError):
    """The error of an operation that a fault has been asked for."""


class SimulationEnded(BaseException):
    """Leaves every job that can't go on: a deadlock, collectives that differ, or the death of the rank itself.

    It is no ``Exception``, so the package's own handlers let it pass.
    """


@dataclass(frozen=True)
class Left:
    """What is still there when all jobs have ended and garbage has been collected.

    Attributes:
        tensors: made in the simulation and still alive, as ``shape dtype``; results' own aren't counted.
        messages: posted and never matched, each as a line.
        blocks: of shared memory that somebody still reads or that still takes memory.
        groups: names of process groups that live on after ``destroy_process_group``.
        threads: that still carry out something, or were never told to end.
        descriptors: open files beyond those from before.
    """

    tensors: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    descriptors: int = 0

    def __bool__(self) -> bool:
        """Whether anything is left behind."""
        return bool(self.tensors or self.messages or self.blocks or self.groups or self.threads or self.descriptors > 0)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a simulation came to.

    Attributes:
        results: by rank, what its job returned; ranks whose job was left by an exception aren't there.
        errors: by rank, the exception that left its job, without its traceback.
        tracebacks: by rank, that exception's, as text.
        deadlock: by rank, the stack of each job at the moment in which no rank could go on; None: there was none. (A
            rank whose job has ended leaves its process: who waits for it loses the connection, as in a real run.)
        mismatch: how two ranks' collectives on one communicator differ, both sides named; None: they don't.
        trace: digest of all hand-overs and of all that was sent, the same for the same seed.
        hand_overs: how often the scheduler chose who runs next.
        operations: by rank, how many operations of the package there were; empty unless they were counted.
        places: by rank, the functions of the package that called these operations, in order.
        failed: the place in the package that called the operation that a fault made fail; empty: none failed.
        messages: by rank, how many messages the rank sent.
        steps_of: by rank, how many hand-overs the rank made until its job ended.
        left: what was left behind; nothing is looked for after a deadlock, a mismatch, or a death.
    """

    results: dict[int, T]
    errors: dict[int, BaseException]
    deadlock: dict[int, str] | None
    mismatch: str | None
    trace: str
    hand_overs: int
    operations: dict[int, int] = field(default_factory=dict)
    places: dict[int, list[str]] = field(default_factory=dict)
    failed: str = ""
    messages: dict[int, int] = field(default_factory=dict)
    steps_of: dict[int, int] = field(default_factory=dict)
    tracebacks: dict[int, str] = field(default_factory=dict)
    left: Left = field(default_factory=Left)

    def without_first(self, ranks: int) -> Outcome[T]:
        """The same without the first ``ranks``: the next one is rank 0."""

        def others(by_rank: dict[int, S]) -> dict[int, S]:
            return {rank - ranks: value for rank, value in by_rank.items() if rank >= ranks}

        return replace(
            self,
            results=others(self.results),
            errors=others(self.errors),
            deadlock=self.deadlock and others(self.deadlock),
            operations=others(self.operations),
            places=others(self.places),
            messages=others(self.messages),
            steps_of=others(self.steps_of),
            tracebacks=others(self.tracebacks),
        )
