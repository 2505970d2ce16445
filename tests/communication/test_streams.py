"""Who waits for whom on a device with several streams, on simulated ones: each stream knows what has come before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer, sharded_optimizer
from lowlevel_zero.bookkeeping.awaited import AwaitedParameter
from lowlevel_zero.bookkeeping.bucket_store import Bucket
from lowlevel_zero.bookkeeping.gather_store import Gather
from lowlevel_zero.bookkeeping.gradient_store import GradientStore
from lowlevel_zero.communication.agreement import Call
from lowlevel_zero.communication.backends.shared_memory import SharedMemory
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.communication.work import Work
from lowlevel_zero.offload.step_on_host import StepOnHost
from lowlevel_zero.stepper import Stepper
from lowlevel_zero.streams import DeviceStreams, Streams, streams_of
from tests.support.internals import finish_late
from tests.support.on_ranks import on_ranks


class Line:
    """A stream: how much of each stream's work comes before what it does next."""

    def __init__(self, device: object = None, captures: bool = False) -> None:
        self.seen: dict[Line, int] = {self: 0}
        self.captures = captures  # a graph of its work: nothing else may wait for it, or it for anything

    def work(self) -> Point:
        self.seen[self] += 1
        return self, self.seen[self]

    def take(self, giver: Line) -> tuple[Point, Event]:
        """Work that starts where its giver is, as a communicator does on its own stream; and its end."""
        self.wait_stream(giver)
        point, over = self.work(), Event()
        over.record(self)
        return point, over

    def comes_after(self, point: Point) -> bool:
        line, at = point
        return self.seen.get(line, 0) >= at

    def wait_event(self, event: Event) -> None:
        assert not self.captures
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
        assert not stream.captures
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

    def is_current_stream_capturing(self) -> bool:
        return self.now.captures

    @contextmanager
    def stream(self, line: Line) -> Iterator[None]:
        before, self.now = self.now, line
        yield
        self.now = before


class Simulated(DeviceStreams):
    """On the host's tensors, whose memory can't be pinned, nor be told of to the allocator.

    Attributes:
        told: gradients of which the allocator would be told.
    """

    pins = False

    def __init__(self, device: torch.device, api: Any) -> None:
        super().__init__(device, api)
        self.told: list[Tensor] = []

    def keep_gradients(self, gradients: Any) -> None:
        if self._others_seen:
            self.told += [each for each in gradients if each is not None]


class Traced:
    """A model of several buckets whose gradients come on several streams, and what has been done where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, producers: int, layers: int = 4, **options: Any) -> None:
        self.api = Api()
        self.home = self.api.now
        monkeypatch.setattr(sharded_optimizer, "streams_of", lambda devices: Simulated(next(iter(devices)), self.api))
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        self.optimizer = LowLevelZeroOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1),
            reduce_bucket_size=30,
            backward_context=self._engine,
            **options,
        )
        self.lines = [Line() for _ in range(producers)] or [self.home]
        self.network = Line()
        self.made: dict[int, Point] = {}
        self.stepped: list[Point] = []
        self.written: list[Point] = []
        self.begin()
        for index, p in enumerate(self.model.parameters()):
            p.register_hook(self._on_its_line(index))
        self._spy(monkeypatch, Bucket, "start_reduce", self._starts, then=self._reduces)
        self._spy(monkeypatch, GradientStore, "accumulate", lambda *_: self.added.append(self.api.now.work()))
        self._spy(monkeypatch, Stepper, "assign_gradients", self._assigns)
        self._spy(monkeypatch, ShardGroup, "gather", self._gathers)
        self._spy(monkeypatch, Bucket, "finish_reduce", lambda *_: self.waited.append(self.api.now))
        self._spy(monkeypatch, Gather, "_write", lambda *_: None, lambda *_: self.written.append(self.home.work()))

    def begin(self) -> None:
        """Forget what former backwards did."""
        self.packed: list[Point] = []
        self.added: list[Point] = []
        self.reduced: list[Point] = []
        self.waited: list[Line] = []

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
        then: Callable[..., Any] = lambda *_: None,
    ) -> None:
        method = getattr(owner, name)

        def run(it: Any, *args: Any) -> Any:
            before(it, *args)
            if inside is not None:
                wait = args[0].wait
                args = (Work(lambda: (wait(), inside())),)
            result = method(it, *args)
            then(it)
            return result

        monkeypatch.setattr(owner, name, run)

    def _starts(self, bucket: Bucket, *_: Any) -> None:
        assert self.api.now is self.home
        assert all(self.home.comes_after(self.made[index]) for index in bucket.planned.members)
        self.packed.append(self.home.work())

    def _reduces(self, bucket: Bucket) -> None:
        """As NCCL does, on a stream of its own; who waits for it has its stream wait."""
        point, over = self.network.take(self.api.now)
        self.reduced.append(point)
        wait = bucket.work.wait
        bucket.work = Work(lambda: (self.api.now.wait_event(over), wait())[1], tensors=bucket.work.tensors)

    def _assigns(self, *_: Any) -> None:
        assert all(self.api.now.comes_after(point) for point in self.added)
        self.stepped.append(self.api.now.work())

    def _gathers(self, *_: Any) -> None:
        assert self.api.now is self.home
        assert self.home.comes_after(self.stepped[-1])


@pytest.mark.parametrize(("producers", "stage"), [(0, 1), (1, 2), (3, 2)])
@on_ranks(2)
def test_a_bucket_is_packed_after_the_gradients_of_all_streams_and_stepped_after_its_sum(
    rank: int, monkeypatch: pytest.MonkeyPatch, producers: int, stage: int
) -> None:
    traced = Traced(monkeypatch, producers, partition_grad=stage == 2)
    for _ in range(3):
        traced.begin()
        traced.backward()
        assert len(traced.waited) >= len(traced.packed) - 1 > 2  # its order is learnt after the first backward
        beside = set(traced.waited)
        assert len(beside) == 1
        assert beside.isdisjoint({traced.home, *traced.lines})
        assert not any(traced.home.comes_after(point) for point in (*traced.reduced, *traced.added))
        traced.api.now = caller = Line()
        traced.optimizer.calls.finish_gradients(Call("look at gradients"))
        assert len(traced.waited) == len(traced.packed)
        assert all(caller.comes_after(point) for point in (*traced.reduced, *traced.added))
        traced.optimizer.step()
        assert traced.api.now is caller
        assert len(traced.packed) > 2
        assert all(caller.comes_after(point) for point in (*traced.packed, *traced.added, *traced.written))
        traced.optimizer.zero_grad()
        traced.api.now = traced.home
    told = traced.optimizer.streams.told
    assert len(told) == (24 if producers else 0)  # all gradients, where any comes on a stream of its own


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_buffers_under_way_are_bounded_however_far_the_host_is_ahead(
    rank: int, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """The last few are kept; home waits for older ones before it lets go of their memory, and for no others."""
    most = SharedMemory.in_flight
    finish_late(monkeypatch, done=True)  # as on a device, which nobody asks how far it is
    traced = Traced(monkeypatch, 0, layers=12, partition_grad=stage == 2)
    buffers: list[ReferenceType[Any]] = []
    held: list[int] = []
    waited: list[int] = []
    new_buffer = ShardGroup.new_buffer

    def watch(group: ShardGroup, *args: Any) -> Tensor:
        waited.append(sum(map(traced.home.comes_after, traced.added)))
        held.append(sum(each() is not None for each in buffers))
        buffer = new_buffer(group, *args)
        buffers.append(ref(buffer.untyped_storage()))
        return buffer

    monkeypatch.setattr(ShardGroup, "new_buffer", watch)
    for _ in range(2):
        for seen in (buffers, held, waited, traced.added):
            seen.clear()
        traced.backward()
        traced.backward()  # adds to sums
        assert len(held) > 2 * most
        assert waited == [max(0, at - most) for at in range(len(waited))]
        assert stage == 1 or max(held) == most
        traced.optimizer.step()
        assert not traced.optimizer.streams._kept
        traced.optimizer.zero_grad()


@on_ranks(2)
def test_who_reads_a_parameter_comes_after_its_rows_on_whatever_stream(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@on_ranks(2)
def test_the_compiler_meets_ordinary_parameters_though_the_device_is_behind(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    traced = Traced(monkeypatch, 0, overlap_allgather=True)
    traced.backward()
    traced.optimizer.step()
    assert {type(p) for p in traced.model.parameters()} == {AwaitedParameter}
    torch.compile(traced.model, backend="eager", fullgraph=True)(torch.ones(2, 4))
    assert {type(p) for p in traced.model.parameters()} == {nn.Parameter}
    assert counters["stats"]["unique_graphs"] == 1


@on_ranks(2)
def test_a_graph_that_is_captured_meanwhile_holds_its_own_work_alone(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters that it reads are there when it is replayed; hosts' calls, which it wouldn't replay, are refused."""

    def refuse_query(_: Event) -> bool:
        raise AssertionError("a capture allows no query")

    traced = Traced(monkeypatch, 0, overlap_allgather=True)
    model, optimizer, weight = traced.model, traced.optimizer, traced.model[1].weight
    traced.backward()
    optimizer.step()
    traced.api.now = graph = Line(captures=True)
    with monkeypatch.context() as patch:
        patch.setattr(Event, "query", refuse_query)
        weight + 0
        weight + 0
    assert len(traced.written) == 1
    assert graph.seen == {graph: 0}
    for call in (optimizer.step, optimizer.zero_grad, lambda: optimizer.backward(model(torch.ones(2, 4)).sum())):
        with pytest.raises(RuntimeError, match="expected it outside of a CUDA graph's capture"):
            call()
    traced.lines = [graph]
    with pytest.raises(RuntimeError, match="expected its gradient outside of a CUDA graph's capture"):
        sum(p.sum() for p in model.parameters()).backward()
    traced.api.now = after = Line()
    weight + 0
    assert after.comes_after(traced.written[0])


@on_ranks(2)
def test_where_graphs_are_replayed_a_step_waits_for_its_gathers(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads parameters without asking anybody."""
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", Line())
    traced = Traced(monkeypatch, 0, overlap_allgather=True)
    traced.backward()
    traced.optimizer.step()
    assert traced.written
    assert all(traced.home.comes_after(point) for point in traced.written)
    assert {type(p) for p in traced.model.parameters()} == {nn.Parameter}


@on_ranks(2)
def test_rows_go_down_beside_the_work_and_are_waited_for_by_the_host(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Any] = []
    traced = Traced(monkeypatch, 3, cpu_offload=True, partition_grad=True)
    down = StepOnHost.down

    def spy_down(self: StepOnHost, row: Tensor) -> Any:
        host, arrived = down(self, row)
        copied.append(arrived)
        ((line, _),) = (point for point in (traced.added[-1],) if arrived.event.seen[point[0]] >= point[1])
        assert line is not traced.home
        assert self._streams._keeping[-1] is row  # until it has been copied
        return host, arrived

    monkeypatch.setattr(StepOnHost, "down", spy_down)
    traced.backward()
    traced.optimizer.calls.finish_gradients(Call("look at gradients"))
    assert len(copied) > 2
    assert not any(arrived.query() for arrived in copied)  # nothing but the step waits for copies
    traced.optimizer.step()
    assert all(arrived.query() for arrived in copied)


def test_home_waits_for_the_oldest_work_beside_until_as_many_parts_are_left() -> None:
    streams, parts = Simulated(torch.device("cpu"), api := Api()), []
    home = api.now
    for _ in range(3):
        with streams.beside():
            streams.keep(torch.empty(1))
            parts.append(api.now.work())
    for left in (3, 2, 0):
        streams.limit(left)
        assert [home.comes_after(part) for part in parts] == [True] * (3 - left) + [False] * left


def test_home_waits_once_for_a_stream_on_which_a_gradient_has_come() -> None:
    """Later its owner may capture a graph on it, say."""
    streams, line = Simulated(torch.device("cpu"), api := Api()), Line()
    home = api.now
    with api.stream(line):
        came = line.work()
        streams.note_gradient_stream()
    with streams.home():
        assert home.comes_after(came)
    later = line.work()
    with streams.home():
        assert not home.comes_after(later)


def test_the_host_has_no_streams() -> None:
    streams = streams_of([torch.device("cpu")])
    assert type(streams) is Streams
    assert streams.mark().query()
