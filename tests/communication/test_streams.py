"""Who waits for whom on a device with several streams, on simulated ones: each stream knows what has come before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer, optimizer
from lowlevel_zero.bookkeeping.awaited import AwaitedParameter
from lowlevel_zero.bookkeeping.bucket_store import Bucket
from lowlevel_zero.bookkeeping.gather_store import Gather
from lowlevel_zero.bookkeeping.gradient_store import GradientStore
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.offload.step_on_host import StepOnHost
from lowlevel_zero.stepper import Stepper
from lowlevel_zero.streams import DeviceStreams, Streams, streams_of
from tests.support.ranks import run_ranks


class Line:
    """A stream: how much of each stream's work comes before what it does next."""

    def __init__(self, device: object = None) -> None:
        self.seen: dict[Line, int] = {self: 0}

    def work(self) -> Point:
        self.seen[self] += 1
        return self, self.seen[self]

    def comes_after(self, point: Point) -> bool:
        line, at = point
        return self.seen.get(line, 0) >= at

    def wait_event(self, event: Event) -> None:
        for line, at in event.seen.items():
            self.seen[line] = max(self.seen.get(line, 0), at)

    def wait_stream(self, other: Line) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


Point = tuple[Line, int]


class Event:
    """A point of a stream that the device reaches only when the host waits for it, or when told."""

    all_reached = False

    def __init__(self) -> None:
        self.seen: dict[Line, int] = {}
        self.reached = False

    def record(self, stream: Line) -> None:
        self.seen = dict(stream.seen)

    def query(self) -> bool:
        return self.reached or self.all_reached

    def synchronize(self) -> None:
        self.reached = True


class Api:
    """What ``torch.cuda`` is for a device."""

    Stream = Line
    Event = Event

    def __init__(self) -> None:
        self.now = Line()

    def current_stream(self, device: object) -> Line:
        return self.now

    @contextmanager
    def stream(self, line: Line) -> Iterator[None]:
        before, self.now = self.now, line
        yield
        self.now = before


class Simulated(DeviceStreams):
    """On the host's tensors, whose memory can't be pinned, nor kept for a stream."""

    pins = False

    def borrow(self, gradients: Any) -> None:
        if self._others_seen:
            self.borrowed = [*getattr(self, "borrowed", []), *(g for g in gradients if g is not None)]


class Traced:
    """A model of several buckets whose gradients come on several streams, and what has been done where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, producers: int, **options: Any) -> None:
        self.api = Api()
        self.home = self.api.now
        monkeypatch.setattr(optimizer, "streams_of", lambda devices: Simulated(next(iter(devices)), self.api))
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.optimizer = LowLevelZeroOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1),
            reduce_bucket_size=30,
            backward_context=self._engine,
            **options,
        )
        self.lines = [Line() for _ in range(producers)] or [self.home]
        self.made: dict[int, Point] = {}
        self.packed: list[Point] = []
        self.added: list[Point] = []
        self.stepped: list[Point] = []
        self.written: list[Point] = []
        self.waited: list[Line] = []
        for index, p in enumerate(self.model.parameters()):
            p.register_hook(self._on_its_line(index))
        self._spy(monkeypatch, Bucket, "start_reduce", self._starts)
        self._spy(monkeypatch, GradientStore, "accumulate", lambda *_: self.added.append(self.api.now.work()))
        self._spy(monkeypatch, Stepper, "assign_gradients", self._assigns)
        self._spy(monkeypatch, ShardGroup, "gather", self._gathers)
        self._spy(monkeypatch, Bucket, "finish_reduce", lambda *_: self.waited.append(self.api.now))
        self._spy(monkeypatch, Gather, "_write", lambda *_: None, lambda *_: self.written.append(self.home.work()))

    def backward(self) -> None:
        self.optimizer.backward(self.model(torch.ones(2, 4)).square().sum())

    @contextmanager
    def _engine(self) -> Iterator[None]:
        """Autograd gives its caller's stream back (and has it wait, which nothing here relies on)."""
        with self.api.stream(self.api.now):
            yield

    def _on_its_line(self, index: int) -> Callable[[Tensor], None]:
        def produce(_: Tensor) -> None:
            self.api.now = self.lines[index % len(self.lines)]
            self.made[index] = self.api.now.work()

        return produce

    def _spy(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: type,
        name: str,
        before: Callable[..., Any],
        inside: Callable[..., Any] | None = None,
    ) -> None:
        method = getattr(owner, name)

        def run(it: Any, *args: Any) -> Any:
            before(it, *args)
            if inside is not None:
                wait = args[0].wait
                args = (_Waited(lambda: (wait(), inside())),)
            return method(it, *args)

        monkeypatch.setattr(owner, name, run)

    def _starts(self, bucket: Bucket, *_: Any) -> None:
        assert self.api.now is self.home
        assert all(self.home.comes_after(self.made[index]) for index in bucket.planned.members)
        self.packed.append(self.home.work())

    def _assigns(self, *_: Any) -> None:
        assert all(self.api.now.comes_after(point) for point in self.added)
        self.stepped.append(self.api.now.work())

    def _gathers(self, *_: Any) -> None:
        assert self.api.now is self.home
        assert self.home.comes_after(self.stepped[-1])


class _Waited:
    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("producers", [0, 1, 3])
def test_a_bucket_is_packed_after_the_gradients_of_all_streams_and_stepped_after_its_sum(
    monkeypatch: pytest.MonkeyPatch, producers: int, stage: int
) -> None:
    def work(rank: int, world_size: int) -> None:
        traced = Traced(monkeypatch, producers, partition_grad=stage == 2)
        for _ in range(3):
            traced.packed.clear()
            traced.waited.clear()
            traced.backward()
            traced.api.now = caller = Line()
            traced.optimizer.finish_gradients()
            assert len(traced.waited) == len(traced.packed)
            assert set(traced.waited) == {traced.home}
            traced.optimizer.step()
            assert traced.api.now is caller
            assert len(traced.packed) > 2
            assert all(caller.comes_after(point) for point in (*traced.packed, *traced.added, *traced.written))
            traced.optimizer.zero_grad()
            traced.api.now = traced.home
        borrowed = getattr(traced.optimizer.streams, "borrowed", [])
        assert len(borrowed) == (24 if producers else 0)  # all gradients, where any comes on a stream of its own

    run_ranks(work, 2)


def test_who_reads_a_parameter_comes_after_its_rows_on_whatever_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, world_size: int) -> None:
        traced = Traced(monkeypatch, 0, overlap_allgather=True)
        weight = traced.model[1].weight
        traced.backward()
        traced.optimizer.step()
        assert not traced.written
        readers = [Line(), Line(), traced.home]
        for reader in readers:
            traced.api.now = reader
            assert type(weight) is AwaitedParameter  # the device hasn't written it yet, as far as is known
            weight + 0
            assert len(traced.written) == 1
            assert reader.comes_after(traced.written[0])
        Event.all_reached = True
        weight + 0
        assert type(weight) is nn.Parameter
        Event.all_reached = False
        traced.backward()
        traced.optimizer.step()  # takes what is still awaited
        traced.optimizer._force_wait_all_gather()
        assert all(type(p) is nn.Parameter for p in traced.model.parameters())

    run_ranks(work, 2)


def test_rows_go_down_beside_the_work_and_are_waited_for_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, world_size: int) -> None:
        copied: list[tuple[Any, Line]] = []
        waited: list[Any] = []
        traced = Traced(monkeypatch, 3, cpu_offload=True, partition_grad=True)
        down, wait = StepOnHost.down, StepOnHost.wait

        def spy_down(self: StepOnHost, row: Tensor) -> Any:
            host, arrived = down(self, row)
            copied.append((arrived, traced.api.now))
            copies = self._streams._copies
            assert copies is not traced.home
            assert copies.comes_after(traced.added[-1])
            assert len(self._leaving) <= 2
            return host, arrived

        def spy_wait(self: StepOnHost, arrived: Any) -> None:
            wait(self, arrived)
            assert arrived.query()
            waited.append(arrived)

        monkeypatch.setattr(StepOnHost, "down", spy_down)
        monkeypatch.setattr(StepOnHost, "wait", spy_wait)
        traced.backward()
        traced.optimizer.finish_gradients()
        assert len(copied) > 2
        assert all(line is traced.home for _, line in copied)
        assert not waited  # nothing but the step waits for copies
        # Memory on the device is let go of in the order of home's work: the first rows' copies come before that.
        (first, _), *_ = copied
        assert all(traced.home.comes_after((line, at)) for line, at in first.event.seen.items())
        traced.optimizer.step()
        assert waited == [arrived for arrived, _ in copied]

    run_ranks(work, 2)


def test_the_host_has_no_streams() -> None:
    streams = streams_of([torch.device("cpu")])
    assert type(streams) is Streams
    assert streams.mark().query()
