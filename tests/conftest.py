"""What every test stands on: one torch thread, so that forking is safe, and seeds that never change."""

from __future__ import annotations

import os
import random

import pytest
import torch

# peft looks for a model's files on the network, even for one that was made from a config.
os.environ["HF_HUB_OFFLINE"] = "1"

# Before any parallel kernel runs: a forked rank would wait for a pool of threads that only the parent has.
torch.set_num_threads(1)

# The first optimizer of a process imports torch's compiler, which takes seconds: once here, not in every rank.
torch.optim.SGD([torch.zeros(1, requires_grad=True)])


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Each test draws the same numbers, in whichever order tests run; forked ranks inherit the state."""
    random.seed(0)
    torch.manual_seed(0)
