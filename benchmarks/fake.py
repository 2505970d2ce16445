"""One process among thousands that aren't there: a fake process group, whose collectives do nothing at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_to_all_single",
    "reduce",
    "reduce_scatter",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "broadcast",
)


class Calls:
    """What has gone through replaced functions since the last ``reset``.

    Attributes:
        count: calls.
        seconds: spent in them.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.count = 0
        self.seconds = 0.0


class _Done:
    """The handle of a collective that did nothing."""

    def wait(self, timeout: object = None) -> bool:
        """At once."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


@contextmanager
def fake_world(size: int) -> Iterator[Calls]:
    """A default process group of ``size`` ranks, of which this process is rank 0 and the others nobody.

    Data that should come from others is left as it is, but sums are zeros: memory that nobody filled may look like
    NaN, and an optimizer does more where it meets one. torch's fake group alone would copy this rank's data to every
    place where another's belongs, which takes longer the more ranks there are.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    torch.set_flush_denormal(True)  # memory that nobody filled may look like numbers that take long to add
    functions = [getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)]
    calls = Calls()
    try:
        with _replaced(
            functions, lambda function: _silent(function, calls), "torch.distributed", "lowlevel_zero", "colossalai"
        ):
            yield calls
    finally:
        dist.destroy_process_group()


def make_finite(model: nn.Module) -> None:
    """Give parameters a value: where a gather put memory that nobody filled, they may look like NaN, and be told of."""
    for p in model.parameters():
        p.data.fill_(0.01)  # behind autograd's back: it isn't an edit that masters have to follow


@contextmanager
def watched(*functions: Callable[..., Any]) -> Iterator[Calls]:
    """Count and time calls of functions through names of this package's modules, wherever they were imported to."""
    calls = Calls()
    with _replaced(functions, lambda function: _timed(function, calls), "lowlevel_zero"):
        yield calls


def _silent(function: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    def nothing(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done | None:
        calls.count += 1
        output = args[0] if args else kwargs.get("output")
        if function.__name__.startswith("reduce_scatter") and isinstance(output, torch.Tensor):
            output.zero_()
        if function.__name__ == "all_gather_object":
            args[0][:] = [args[1]] * len(args[0])
        return _Done() if async_op else None

    return nothing


def _timed(function: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = process_time()
        try:
            return function(*args, **kwargs)
        finally:
            calls.seconds += process_time() - start
            calls.count += 1

    return timed


@contextmanager
def _replaced(
    functions: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]], *packages: str
) -> Iterator[None]:
    """Put what ``make`` makes of each function in its place, under every name that loaded modules have for it."""
    found = [
        (module, name, value)
        for module in _modules(packages)
        for name, value in list(vars(module).items())
        if any(value is function for function in functions)
    ]
    for module, name, value in found:
        setattr(module, name, make(value))
    try:
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)


def _modules(packages: tuple[str, ...]) -> list[Any]:
    return [
        module
        for name, module in list(sys.modules.items())
        if any(name == package or name.startswith(package + ".") for package in packages)
    ]
