"""What saving and loading hold at their peak, over what was held before."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint
import torch.distributed.tensor
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint
from tests.support.ranks import run_ranks

M_MMAP_THRESHOLD = -3
LAYERS, WIDTH = 12, 1280
WHOLE = WIDTH * WIDTH * 4  # bytes of one weight, or of one whole state


def peak_over_held(call: Callable[[], object]) -> float:
    """How much resident memory rose at most while ``call`` ran, in whole tensors."""
    # So that what is freed goes back to the system, and is seen when it is taken again.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**16)
    call()  # what is allocated once and kept
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is held now
    held = resident("VmRSS")
    kept = call()
    del kept
    return (resident("VmHWM") - held) / WHOLE


def resident(line: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) * 1024


def trained() -> tuple[nn.Module, LowLevelZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model, partition_grad=True)
    optimizer.backward(model(torch.randn(2, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_a_save_holds_no_more_than_two_slices_and_a_load_one_rank_s_share(tmp_path: Path) -> None:
    def measure(rank: int, world_size: int) -> tuple[float, float, float]:
        model, optimizer = trained()
        save = peak_over_held(lambda: save_checkpoint(tmp_path / "a", model, optimizer))
        load = peak_over_held(lambda: load_checkpoint(tmp_path / "a", model, optimizer))
        state = peak_over_held(lambda: optimizer.state_dict(only_on_master=True))
        return save, load, state

    ranks = run_ranks(measure, 2)
    share = 3 * LAYERS / 2  # of weights and two states, read beside what is there
    for save, load, _ in ranks:
        assert save < 1.0  # a slice is half a tensor
        assert share - 1.5 < load < share + 5.0
    assert 2 * LAYERS - 1.5 < ranks[0][2] < 2 * LAYERS + 2.2  # the result itself
    assert 0.5 < ranks[1][2] < 2.2  # one tensor in passing, and what carries it


def test_an_asynchronous_save_holds_one_copy_of_the_rank_s_share(tmp_path: Path) -> None:
    def measure(rank: int, world_size: int) -> float:
        model, optimizer = trained()

        def save() -> None:
            save_checkpoint(tmp_path / "a", model, optimizer, async_save=True).wait()

        return peak_over_held(save)

    share = 3 * LAYERS / 2
    assert all(peak < share + 5.0 for peak in run_ranks(measure, 2))
