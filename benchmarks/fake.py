"""One process among thousands that aren't there: a fake group, and a stopwatch for what isn't the host's own work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

_COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "broadcast",
)


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """A default process group of ``size`` ranks, of which this process is rank 0 and the others nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Stopwatch:
    """Seconds spent inside some functions, while ``running``.

    Attributes:
        seconds: so far; set it to 0 to start anew.
        calls: so far.
    """

    def __init__(self, functions: list[Any]) -> None:
        self._functions = functions
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.seconds = 0.0
        self.calls = 0

    @contextmanager
    def running(self, *packages: str) -> Iterator[None]:
        """Time calls that go through names of modules of ``packages``, wherever they were imported to."""
        replaced = [
            (module, name, value)
            for module in _modules(packages)
            for name, value in list(vars(module).items())
            if any(value is function for function in self._functions)
        ]
        for module, name, value in replaced:
            setattr(module, name, self._timed(value))
        try:
            yield
        finally:
            for module, name, value in replaced:
                setattr(module, name, value)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += perf_counter() - start
                self.calls += 1

        return timed


def collectives_watch() -> Stopwatch:
    """On torch's collectives: a fake group's copies take time that grows with its ranks."""
    return Stopwatch([getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)])


def _modules(packages: tuple[str, ...]) -> list[Any]:
    return [
        module
        for name, module in list(sys.modules.items())
        if any(name == package or name.startswith(package + ".") for package in packages)
    ]
