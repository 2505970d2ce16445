"""What saving and loading hold at their peak, over what was held before."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.tensor
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint
from tests.support.ranks import run_ranks

M_MMAP_THRESHOLD = -3
LAYERS, WIDTH = 12, 1280
WHOLE = WIDTH * WIDTH * 4  # bytes of one weight, or of one whole state
SHARE = 3 * LAYERS / 2  # whole tensors that a rank holds of weights and two states


def peak_over_held(call: Callable[[], object]) -> float:
    """How much resident memory rose at most while ``call`` ran, in whole tensors."""
    call()  # what is allocated once and kept
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is held now
    held = resident("VmRSS")
    kept = call()
    del kept
    return (resident("VmHWM") - held) / WHOLE


def within(low: float, high: float, call: Callable[[], object], attempts: int = 10) -> float:
    """``peak_over_held``, as soon as it is between the two on all ranks.

    What threads give back meanwhile, and what the system takes, is in a measurement too; but never in all of them.
    """
    peak = 0.0
    for _ in range(attempts):
        peak = peak_over_held(call)
        outside = torch.tensor([int(not low < peak < high)])
        dist.all_reduce(outside)
        if not outside.item():
            break
    return peak


def resident(line: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) * 1024


def trained() -> tuple[nn.Module, LowLevelZeroOptimizer]:
    # So that what is freed goes back to the system, and is seen when it is taken again; from the first tensor on.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model, partition_grad=True)
    optimizer.backward(model(torch.randn(2, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_a_save_holds_no_more_than_two_slices_and_a_load_one_parameter(tmp_path: Path) -> None:
    def measure(rank: int, world_size: int) -> tuple[float, float, float]:
        model, optimizer = trained()
        states = result if rank == 0 else in_passing
        numbers = count()
        return (
            within(*saved, lambda: save_checkpoint(tmp_path / str(next(numbers)), model, optimizer)),
            within(*loaded, lambda: load_checkpoint(tmp_path / "0", model, optimizer)),
            within(*states, lambda: optimizer.state_dict(only_on_master=True)),
        )

    saved = -1.0, 1.0  # a slice is half a tensor
    loaded = -1.0, 2.0  # a parameter's slices, and what carries them, beside what is there
    result = 2 * LAYERS - 1.5, 2 * LAYERS + 2.2  # the states themselves
    in_passing = 0.5, 2.2  # one tensor, and what carries it
    ranks = run_ranks(measure, 2, timeout=100)
    for save, load, _ in ranks:
        assert saved[0] < save < saved[1]
        assert loaded[0] < load < loaded[1]
    assert result[0] < ranks[0][2] < result[1]
    assert in_passing[0] < ranks[1][2] < in_passing[1]


def test_an_asynchronous_save_holds_one_copy_of_the_rank_s_share(tmp_path: Path) -> None:
    def measure(rank: int, world_size: int) -> float:
        model, optimizer = trained()
        numbers = count()

        def save() -> None:
            save_checkpoint(tmp_path / str(next(numbers)), model, optimizer, async_save=True).wait()

        return within(0.0, SHARE + 5.0, save)

    assert all(0.0 < peak < SHARE + 5.0 for peak in run_ranks(measure, 2, timeout=100))
