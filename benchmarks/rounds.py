"""Alternating rounds: every contestant trains a few steps in turn, so that a noisy minute hits all of them alike."""

from __future__ import annotations

import gc
import os
import resource
import sys
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, process_time, sleep
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import counters
from .gpt import SIZES, make_batches
from .peers import CONTESTANTS, Peer, Setting
from .stopwatch import Stopwatch

# A turn in which others, or the hypervisor, took more than this share of the machine's time counts as disturbed, and is
# repeated so many seconds later.
QUIET = 0.02
PAUSE = 3.0


@dataclass(frozen=True)
class Course:
    """What one run measures.

    Attributes:
        setting: what all contestants have in common.
        names: who takes part.
        rounds: how often each has its turn.
        steps: measured steps of a turn.
        warm_up: steps that aren't measured, after construction: states and buckets are made in them.
        keep: keep all contestants from round to round; else each is made anew for its turn.
        patience: how often a turn is repeated, some seconds later, that others disturbed.
        interface: by which ranks send to others.
    """

    setting: Setting
    names: list[str]
    rounds: int
    steps: int
    warm_up: int
    keep: bool
    patience: int = 0
    interface: str = counters.LOOPBACK


class Turn(NamedTuple):
    """One contestant's steps in one round, on one rank.

    Attributes:
        forward_backward, step, whole: seconds, the median over the steps.
        cpu: seconds of computing, all threads of the process, the mean: hardly feels what else runs on the machine.
        others: share of the machine's time that somebody else took meanwhile; above 0.02, distrust the times.
        stolen: the part of it that the hypervisor took for its other guests.
        sent: bytes that left by the interface, all ranks' of this host, the mean; NaN where the kernel doesn't tell, as
            are the two before.
        told: bytes that all ranks sent by the contestant's own account, the mean; NaN where it has none.
    """

    forward_backward: float
    step: float
    whole: float
    cpu: float
    others: float
    stolen: float
    sent: float
    told: float


@dataclass
class Record:
    """What one rank has seen of one contestant.

    Attributes:
        losses: this rank's, of the first warm-up steps.
        after_backward: bytes held, by owner.
        after_step: the same when gradients are gone.
        turns: one a round.
        peak_rss: bytes of this process at most, and at most before it made its first contestant.
    """

    losses: list[float] = field(default_factory=list)
    after_backward: dict[str, int] = field(default_factory=dict)
    after_step: dict[str, int] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    peak_rss: tuple[int, int] = (0, 0)


def run_course(rank: int, world_size: int, course: Course) -> dict[str, Record]:
    """All rounds on this rank."""
    records = {name: Record() for name in course.names}
    if course.setting.device == "cuda":
        torch.cuda.set_device(rank)
    made = make_batches(SIZES[course.setting.size], course.setting.micro_batches, rank)
    batches = [batch.to(course.setting.device) for batch in made]
    for name in course.names:
        CONTESTANTS[name].prepare()
    gc.freeze()  # what torch left behind at its import is no garbage, and takes long to look at
    base = _peak_rss()
    alive: dict[str, Peer] = {}
    for number in range(course.rounds):
        if rank == 0:
            print(f"\rround {number + 1} of {course.rounds} ", end="", file=sys.stderr, flush=True)
        for name in _rotated(course.names, number):
            peer = alive.pop(name, None) or _warm(name, course, batches, records[name])
            records[name].turns.append(_turn_in_peace(peer, batches, course))
            records[name].peak_rss = (_peak_rss(), base)
            if course.keep:
                alive[name] = peer
            del peer
            gc.collect()
            if course.setting.device == "cuda":
                torch.cuda.empty_cache()  # blocks of the sizes that another wants
    if rank == 0:
        print(file=sys.stderr)
    return records


def _rotated(names: list[str], by: int) -> list[str]:
    """Nobody always follows the same other."""
    by %= len(names)
    return names[by:] + names[:by]


def _warm(name: str, course: Course, batches: list[Tensor], record: Record) -> Peer:
    """Make a contestant, and bring it to where every further step is like the last."""
    peer = CONTESTANTS[name].make(course.setting)
    losses = []
    for _ in range(course.warm_up):
        losses.append(peer.forward_backward(batches).item())
        record.after_backward = peer.held()
        peer.step()
        record.after_step = peer.held()
    record.losses = record.losses or losses
    return peer


def _turn_in_peace(peer: Peer, batches: list[Tensor], course: Course) -> Turn:
    turn = _turn(peer, batches, course)
    for _ in range(course.patience):
        others = torch.tensor(turn.others)
        dist.broadcast(others, src=0)  # ranks read the counters at slightly different moments
        if not others.item() > QUIET:
            break
        sleep(PAUSE)
        turn = _turn(peer, batches, course)
    return turn


def _turn(peer: Peer, batches: list[Tensor], course: Course) -> Turn:
    steps = course.steps
    peer.forward_backward(batches)  # not measured: what it leaves under way is the first measured one's to wait for
    peer.step()
    dist.barrier()
    before, told, cpu, start = counters.read(course.interface), peer.handed_over(), process_time(), perf_counter()
    watch = Stopwatch(course.setting.device)
    for _ in range(steps):
        peer.forward_backward(batches)
        watch.mark()
        peer.step()
        watch.mark()
    marks = watch.seconds()
    cpu, told = process_time() - cpu, peer.handed_over() - told
    everyones = torch.tensor([cpu, told], dtype=torch.float64)
    dist.all_reduce(everyones)  # a barrier, too
    counted = counters.read(course.interface).since(before)
    available = (perf_counter() - start) * (os.cpu_count() or 1)
    starts, middles, ends = marks[:-1:2], marks[1::2], marks[2::2]
    return Turn(
        median(middle - start for start, middle in zip(starts, middles, strict=True)),
        median(end - middle for middle, end in zip(middles, ends, strict=True)),
        median(end - start for start, end in zip(starts, ends, strict=True)),
        cpu / steps,
        (counted.busy - everyones[0].item()) / available,
        counted.stolen / available,
        counted.sent / steps,
        everyones[1].item() / steps,
    )


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def fits(setting: Setting, contestants: int, world_size: int) -> bool:
    """Whether all contestants can stay in memory at once, at about 16 bytes a parameter each, in 3/4 of it."""
    elements = sum(p.numel() for p in setting.fp32_model().parameters())
    free = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES") // 2
    return 16 * elements * contestants * world_size < free * os.sysconf("SC_PAGE_SIZE") * 3 // 4


def settle() -> None:
    """In the parent, before ranks are forked: what every rank would do for itself, and slowly."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports torch's compiler
