"""What every test stands on: one torch thread, so that forking is safe, and seeds that never change."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Before they are imported: so that a failed assert in them shows its values, as in a test.
pytest.register_assert_rewrite("tests.support")

# peft looks for a model's files on the network, even for one that was made from a config.
os.environ["HF_HUB_OFFLINE"] = "1"

# Before any parallel kernel runs: a forked rank would wait for a pool of threads that only the parent has.
torch.set_num_threads(1)

# The first optimizer of a process imports torch's compiler, which takes seconds: once here, not in every rank.
torch.optim.SGD([torch.zeros(1, requires_grad=True)])

# Looking for a GPU must not start CUDA: ranks are forked, and couldn't use it then.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
collect_ignore = [] if torch.cuda.is_available() else ["gpu"]
collect_ignore += [] if torch.cuda.device_count() > 1 else ["gpu/test_several.py"]

# Where no device has started, each seed is kept for it with the stack of who gave it: a millisecond a kind of device.
if not torch.cuda.is_available():
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.manual_seed_all = lambda seed: None

# What modules make when they are imported stays: looking through it again and again takes seconds of each process.
gc.disable()


def pytest_collection_finish() -> None:
    from tests.support.warm_up import warm_up

    warm_up()
    gc.collect()
    gc.freeze()
    gc.enable()
    if sys.platform == "linux":
        _move_to_huge_pages()


_MADV_COLLAPSE = 25  # of linux/mman.h


def _move_to_huge_pages(size: int = 2**21) -> None:
    """A fork copies the table of its pages, which takes longer than all else that starting a rank needs.

    Where the system knows no ``MADV_COLLAPSE`` (it came with Linux 6.1), pages stay as they are.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in span.split("-"))
            start = -(-start // size) * size
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(max(0, end // size * size - start)), _MADV_COLLAPSE)


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_left_in_the_root(request: pytest.FixtureRequest) -> Iterator[None]:
    """Some trainers save where they are started, if nobody tells them another folder."""
    root, written_by_tools = request.config.rootpath, {"build", "demo_output", "dist", "htmlcov"}
    before = set(os.listdir(root))
    yield
    left = {name for name in os.listdir(root) if not name.startswith(".")} - before - written_by_tools
    assert not left, f"tests have left {sorted(left)} in {root}: let them write to tmp_path"


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Each test draws the same numbers, in whichever order tests run; forked ranks inherit the state."""
    random.seed(0)
    torch.manual_seed(0)


# What reaches into the package is imported where it is used: a name that is gone fails those tests, not all.


@pytest.fixture
def unaligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices lie end to end in buckets, whose rows end with the last."""
    from tests.support.internals import pack_without_alignment

    pack_without_alignment(monkeypatch)


@pytest.fixture
def forecasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused parameters are detected from the start."""
    from tests.support.internals import always_detect

    always_detect(monkeypatch)
