"""What every test stands on: one torch thread, so that forking is safe, and seeds that never change."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from lowlevel_zero.alignment import Alignment
from lowlevel_zero.bookkeeping import gather_store, learnt_plan
from lowlevel_zero.unused_parameters import UnusedParameters

# peft looks for a model's files on the network, even for one that was made from a config.
os.environ["HF_HUB_OFFLINE"] = "1"

# Before any parallel kernel runs: a forked rank would wait for a pool of threads that only the parent has.
torch.set_num_threads(1)

# The first optimizer of a process imports torch's compiler, which takes seconds: once here, not in every rank.
torch.optim.SGD([torch.zeros(1, requires_grad=True)])

# Looking for a GPU must not start CUDA: ranks are forked, and couldn't use it then.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
collect_ignore = [] if torch.cuda.is_available() else ["test_cuda.py"]


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Each test draws the same numbers, in whichever order tests run; forked ranks inherit the state."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def unaligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices lie end to end in wires, whose rows end with the last."""
    for module in (learnt_plan, gather_store):
        monkeypatch.setattr(module, "alignment_of", lambda *_: Alignment())


@pytest.fixture
def forecasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused parameters are detected from the start."""
    build = UnusedParameters.__init__

    def built(self: UnusedParameters, parameters: Any, family: int) -> None:
        build(self, parameters, family)
        self.detecting = True

    monkeypatch.setattr(UnusedParameters, "__init__", built)
