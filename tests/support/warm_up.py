"""What every rank would do for the first time is done before they fork."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pkgutil import iter_modules
from unittest.mock import patch

import torch
import torch.distributed as dist

# What adapts other packages, which may not be there, and the command line.
_OF_OTHERS = ("lowlevel_zero.plugin", "lowlevel_zero.trainers", "lowlevel_zero.__main__")


@cache
def warm_up() -> None:
    """Import what ranks need, and be one that trains and saves; on a host alone, see ``ranks.py``.

    Python and torch remember which class is a subclass of which, and much else, and forked ranks inherit that.
    """
    with suppress(Exception):  # whatever is wrong, ranks meet with it too, and tell of it
        importlib.import_module("torch.profiler._cupti_monitor")  # torch's profiler does
        _import_all("lowlevel_zero")
        if not torch.cuda.is_available() and torch.__version__ >= "2.8":  # groups of older ones don't go, nor threads
            _train_alone()


def _import_all(name: str) -> None:
    """A module and those in it, but ``_OF_OTHERS``, whose packages take seconds to import."""
    module = importlib.import_module(name)
    for inner in iter_modules(getattr(module, "__path__", []), f"{name}."):
        if inner.name not in _OF_OTHERS:
            _import_all(inner.name)


def _train_alone() -> None:
    interface = "lo0" if sys.platform == "darwin" else "lo"
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, GLOO_SOCKET_IFNAME=interface):
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            for make in (torch.optim.SGD, torch.optim.AdamW):
                _train(make, f"{folder}/{make.__name__}")
        finally:
            gc.collect()  # what holds the group, whose threads a fork wouldn't have
            dist.destroy_process_group()


def _train(make: type[torch.optim.Optimizer], folder: str) -> None:
    from lowlevel_zero import LowLevelZeroOptimizer
    from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint

    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Linear(2, 2))
    optimizer = LowLevelZeroOptimizer(make(model.parameters(), lr=0.1), model=model, partition_grad=True)
    for _ in range(2):
        optimizer.backward(model(torch.ones(1, 1, 2, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, model, optimizer)
    load_checkpoint(folder, model, optimizer)
