"""Devices are named: nothing is made on, or asked of, whichever device happens to be the current or the default one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowlevel_zero.checkpoint.saving import Saving
from lowlevel_zero.communication.backends.native import Native
from lowlevel_zero.communication.broadcast import Broadcast
from lowlevel_zero.communication.shard_group import ShardGroup
from lowlevel_zero.diagnostics.bad_numbers import LaterRead
from tests.support.ranks import run_ranks

PACKAGE = Path(__file__).parents[2] / "lowlevel_zero"
CURRENT, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


# ---- two simulated devices, of which one is current ----


class Line:
    """A device's stream, and how often something was recorded on it."""

    def __init__(self) -> None:
        self.recorded = 0


class Device:
    """What ``torch.cuda`` is for two devices."""

    def __init__(self) -> None:
        self.lines = {CURRENT: Line(), OTHER: Line()}
        lines = self.lines

        class Event:
            def record(self, stream: Line | None = None) -> None:
                (lines[CURRENT] if stream is None else stream).recorded += 1

            def synchronize(self) -> None:
                pass

        self.Event = Event

    def current_stream(self, device: int = CURRENT.index) -> Line:
        return next(line for at, line in self.lines.items() if at.index == device)

    @contextmanager
    def stream(self, line: Line) -> Iterator[None]:
        yield


class OnOther(Tensor):
    """A tensor of the host that says that it is on the device that isn't current."""

    is_cuda = True
    is_cpu = False
    device = OTHER


class OnCurrent(OnOther):
    """One that says that it is on the current device."""

    device = CURRENT


def simulate(monkeypatch: pytest.MonkeyPatch) -> tuple[Device, list[Any]]:
    """The two devices, and, for each tensor that is made, whether it would be pinned, and where it is."""
    api, empty = Device(), torch.empty
    pinned: list[Any] = []

    def unpinned(*args: Any, pin_memory: bool = False, device: Any = None, **keywords: Any) -> Tensor:
        pinned.append((pin_memory, str(device)))
        return empty(*args, **keywords)

    monkeypatch.setattr(torch, "get_device_module", lambda *_: api)
    monkeypatch.setattr(torch.cuda, "Event", api.Event)
    monkeypatch.setattr(torch, "empty", unpinned)
    return api, pinned


def test_a_number_is_read_when_it_has_come_from_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    api, pinned = simulate(monkeypatch)
    number = LaterRead(torch.tensor(2.5).as_subclass(OnOther), step=0)
    assert number.read().item() == 2.5
    assert (api.lines[OTHER].recorded, api.lines[CURRENT].recorded) == (1, 0)
    assert pinned == [(True, "cpu")]


def test_a_save_waits_for_the_copies_from_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen parameter or a buffer may be on another than what is trained."""
    api, pinned = simulate(monkeypatch)
    of = {("a",): torch.ones(3).as_subclass(OnOther), ("b",): torch.ones(2).as_subclass(OnCurrent)}
    copies = Saving(Path("anywhere"), None).stage({**of, ("c",): torch.zeros(1)})
    assert [copy.tolist() for copy in copies.values()] == [[1.0] * 3, [1.0] * 2, [0.0]]
    assert (api.lines[OTHER].recorded, api.lines[CURRENT].recorded) == (1, 1)
    assert pinned == [(True, "cpu")]


@pytest.mark.parametrize(("blocks", "asked"), [(None, 0), ("0", 0), ("1", 1)])
def test_no_device_is_asked_how_far_it_is_unless_the_host_would_wait(
    monkeypatch: pytest.MonkeyPatch, blocks: str | None, asked: int
) -> None:
    """To ask would break a graph's capture, and ranks that find different answers would go on differently."""

    class Handle:
        questions = 0

        def is_completed(self) -> bool:
            self.questions += 1
            return False

    handle = Handle()
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: handle)
    if blocks is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", blocks)
    work = Native(handle).all_reduce(torch.zeros(1).as_subclass(OnOther))  # type: ignore[arg-type]
    assert work.ready() == (not asked)
    assert handle.questions == asked


def test_what_a_group_does_not_serve_travels_by_way_of_this_rank_s_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As buffers of the host do over NCCL: here the host isn't served, and there is a device of no memory."""

    def work(rank: int, world_size: int) -> list[str]:
        moved: list[str] = []
        monkeypatch.setattr(ShardGroup, "on_gloo", lambda self, device: False)
        monkeypatch.setattr(
            dist, "_broadcast_coalesced", lambda _, carried, *__: moved.extend(each.device.type for each in carried)
        )
        monkeypatch.setattr(Tensor, "copy_", lambda tensor, _: tensor)  # there is nothing to come back
        group = ShardGroup()
        group.device_types.clear()
        Broadcast(group, [torch.zeros(3)], torch.device("meta")).run()
        return moved

    assert run_ranks(work, 2) == [["meta"]] * 2


# ---- all of the source ----

# Of torch, what makes a tensor; and what is of the current device if it isn't given another.
MAKERS = {"tensor", "as_tensor", "asarray", "scalar_tensor", "zeros", "ones", "empty", "empty_strided", "full"}
MAKERS |= {"arange", "linspace", "eye", "rand", "randn", "randint", "randperm"}
OF_A_DEVICE = {"Event", "Stream", "current_stream", "current_device", "cuda"}
# Where streams and events are made and asked for.
STREAMS = "streams.py"


def unnamed(source: str) -> list[str]:
    """The calls in a source that make a tensor, a stream or an event without saying where."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if isinstance(call.func, ast.Attribute) and is_unnamed(call, call.func)]


def is_unnamed(call: ast.Call, function: ast.Attribute) -> bool:
    if function.attr == "to":
        return any(isinstance(each, ast.Constant) and each.value == "cuda" for each in call.args)
    if function.attr in MAKERS and ast.unparse(function.value) == "torch":
        return not any(each.arg in ("device", None) for each in call.keywords)
    return function.attr in OF_A_DEVICE and not call.args


def test_all_of_the_library_names_its_devices() -> None:
    library = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {name: unnamed(text) for name, text in library.items()}
    found[STREAMS].remove("self._api.Event()")  # it is of the stream that it is recorded on
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(3)",
        "torch.empty_strided(a, b)",
        "torch.cuda.Event()",
        "torch.cuda.current_stream()",
        "x.to('cuda')",
        "x.cuda()",
        "api.Stream()",
    ],
)
def test_what_is_not_named_would_be_found(source: str) -> None:
    assert unnamed(source) == [source]
