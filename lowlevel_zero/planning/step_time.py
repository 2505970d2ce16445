"""The time of a step over a link, by a simulation of the slowest rank's buckets, for which all others wait.

A link carries one collective after another. A backward computes on while it does, until too many buckets are under way;
then rows are stepped and gathered, one bucket behind the other. What a gather could hide behind the next forward isn't
counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ..communication.backends.backend import Backend
from ..layout.records import Layout


class Link(NamedTuple):
    """The link that joins each rank to the others; it sends and receives at once."""

    rate: float  # bytes a second, each way
    latency: float = 0.0  # seconds from rank to rank, beside what a message's bytes take
    ring: bool = False  # rows go from neighbour to neighbour; else from each rank to all others at once

    def seconds(self, row: float, ranks: int) -> float:
        """Return the time of a reduce-scatter or all-gather of rows of ``row`` bytes; each rank sends all but one."""
        hops = (ranks - 1 if self.ring else 1) if ranks > 1 else 0
        return (ranks - 1) * row / self.rate + hops * self.latency


class Computing(NamedTuple):
    """Seconds that a rank computes in a step, on average."""

    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0
    straggling: float = 0.0  # exponentially distributed share by which a rank is slower in a step: its mean

    @property
    def whole(self) -> float:
        """Return the sum of all phases."""
        return self.forward + self.backward + self.step

    def of_slowest(self, ranks: int) -> Computing:
        """Return the slowest rank's mean times: the largest of n exponentials is 1 + 1/2 + ... + 1/n of the mean."""
        slower = 1 + self.straggling * sum(1 / rank for rank in range(1, ranks + 1))
        return Computing(self.forward * slower, self.backward * slower, self.step * slower)


class BucketRow(NamedTuple):
    """The part of a bucket that travels from a rank to each other rank."""

    numel: int  # of its parameters: its share of what there is to compute
    reduced: int  # bytes of a row of gradients
    gathered: int  # bytes of a row of parameters


class StepTime(NamedTuple):
    """One step of every rank; all but the first numbers are seconds."""

    world_size: int
    stage: int
    buckets: int
    sent: int  # bytes, by each rank
    wire: float  # seconds in which the link is busy
    hidden: float  # of these, seconds in which the slowest rank computes
    exposed: float  # of these, seconds in which the slowest rank waits
    waiting: float  # seconds that a rank of average speed waits for the slowest
    step: float  # all of it


def bucket_rows(layout: Layout) -> list[BucketRow]:
    """Return the rows of a layout's buckets, in the order in which they are reduced."""
    numel_of = {p.name: p.split.numel for p in layout.parameters}
    return [
        BucketRow(
            sum(map(numel_of.__getitem__, bucket.members)),
            bucket.row_bytes(bucket.dtype),
            bucket.row_bytes(bucket.parameter_dtype),
        )
        for bucket in layout.buckets
    ]


def step_time(rows: Sequence[BucketRow], ranks: int, stage: int, computing: Computing, link: Link) -> StepTime:
    """Return the time of a step with one backward; stage 0 is DDP with these buckets, which gathers nothing."""
    ways = 1 if stage == 2 else 2  # an all-reduce is a reduce-scatter and an all-gather
    reductions = [ways * link.seconds(row.reduced, ranks) for row in rows]
    gathers = [link.seconds(row.gathered, ranks) if stage else 0.0 for row in rows]
    numel, slowest = sum(row.numel for row in rows), computing.of_slowest(ranks)
    now = free = slowest.forward  # this rank's time, and when the link has done what it has been given
    under_way: deque[float] = deque()
    for row, seconds in zip(rows, reductions, strict=True):
        now += slowest.backward * row.numel / numel
        if stage == 2 and len(under_way) == Backend.in_flight:
            now = max(now, under_way.popleft())
        free = max(free, now) + seconds
        under_way.append(free)
    now = max(now, free)
    for row, seconds in zip(rows, gathers, strict=True):
        now += slowest.step * row.numel / numel
        free = max(free, now) + seconds
    sent = sum(ways * row.reduced + (row.gathered if stage else 0) for row in rows) * (ranks - 1)
    wire, whole = sum(reductions) + sum(gathers), max(now, free)
    exposed = min(wire, whole - slowest.whole)
    waiting = slowest.whole - (1 + computing.straggling) * computing.whole
    return StepTime(ranks, stage, len(rows), sent, wire, wire - exposed, exposed, waiting, whole)
