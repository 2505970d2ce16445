"""What checkpoint tests do again and again: small models that train, ways to save and load, held writes, errors."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor  # here once, not in every forked rank
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, save_checkpoint, storage
from tests.support.oracle import adamw as adamw

Make = Callable[[Any], torch.optim.Optimizer]
Pair = tuple[nn.Module, LowLevelZeroOptimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


class Keeping(nn.Module):
    """A module that has no tensors, and an extra state."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def linear(seed: int = 0, make: Make = momentum, steps: int = 0, **options: Any) -> Pair:
    """A small layer and its optimizer, after so many steps."""
    torch.manual_seed(seed)
    return wrapped(nn.Linear(3, 2), make, steps, **options)


def wrapped(model: nn.Module, make: Make = momentum, steps: int = 0, **options: Any) -> Pair:
    """A model and an optimizer of what requires gradients, after so many steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    pair = model, LowLevelZeroOptimizer(make(trained), model=model, **options)
    train(*pair, steps=steps)
    return pair


def train(model: nn.Module, *optimizers: LowLevelZeroOptimizer, steps: int = 1, scale: float = 1.0) -> None:
    """Steps that need no forward: of the sum of all squares."""
    for _ in range(steps):
        optimizers[0].backward(squares(model) * scale)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def squares(model: nn.Module) -> torch.Tensor:
    """A loss, which is of every parameter."""
    return torch.stack([p.float().square().sum() for p in model.parameters() if p.requires_grad]).sum()


def held(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    """Copies of all that they hold. Every rank calls it."""
    return copy.deepcopy([dict(model.state_dict()), *(optimizer.state_dict() for optimizer in optimizers)])


def refused(call: Callable[[], object]) -> str:
    """How a call is refused, in seconds."""
    began = time.monotonic()
    try:
        call()
    except (Exception, CheckpointException) as error:
        assert time.monotonic() - began < 10
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


Calls = dict[str | tuple[str, str], Callable[[], object]]
"""Calls that are refused, by what their errors have in them: on both of two ranks, or on each of them."""


def check_refused(calls: Calls, rank: int) -> None:
    for told, call in calls.items():
        expected = told if isinstance(told, str) else told[rank]
        line = refused(call)
        assert expected in line, f"expected {expected!r}, got {line!r}"


def names_in(folder: Path) -> set[str]:
    return {place.name for place in folder.iterdir()}


# Ways to save and load: the package's own, torch's, and whole state dicts in a file: the optimizer's, or both.


def save_by(way: str, path: Path, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    if way == "checkpoint":
        save_checkpoint(path, model, optimizer)
    elif way == "checkpoint, async":
        save_checkpoint(path, model, optimizer, async_save=True).wait()
    elif way.startswith("state dict"):
        state = optimizer.state_dict()
        if way == "state dicts":
            state = {"model": model.state_dict(), "optimizer": state}
        if dist.get_rank() == 0:
            torch.save(state, path)
        dist.barrier()
    else:
        _save_by_torch(way, path, _state_of(way, model, optimizer))


def load_by(way: str, path: Path, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    if way.startswith("checkpoint"):
        load_checkpoint(path, model, optimizer)
    elif way.startswith("state dict"):
        state = torch.load(path, weights_only=True)
        if way == "state dicts":
            model.load_state_dict(state["model"])
            state = state["optimizer"]
        optimizer.load_state_dict(state)
    else:
        dcp.load(_state_of(way, model, optimizer), checkpoint_id=path)


def _save_by_torch(way: str, path: Path, state: dict[str, Any]) -> None:
    if "async" in way:
        dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, checkpoint_id=path)


def _state_of(way: str, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> dict[str, Any]:
    """``Sharded`` beside the model's state dict, behind it or before, or alone."""
    state: dict[str, Any] = {"model": model.state_dict(), "optim": Sharded(optimizer)}
    if "alone" in way:
        del state["model"]
    return dict(reversed(state.items())) if "optimizer first" in way else state


# Writes that wait.


class Held:
    """Writes that have begun, and wait until they may go on."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()


@contextmanager
def held_writes(part: str = "write_share") -> Iterator[Held]:
    """Within, this rank's writes of checkpoints begin, and wait. It ends when one has begun.

    Args:
        part: what waits of the writer, "write_share" or all its "write".
    """
    write, writes = getattr(storage.CheckpointWriter, part), Held()

    def write_later(*args: Any) -> Any:
        writes.begun.set()
        assert writes.goes_on.wait(20)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.CheckpointWriter, part, write_later)
        yield writes
        assert writes.begun.wait(20)
