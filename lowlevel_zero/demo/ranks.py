"""The ranks: one process group, whether ``torchrun`` started the processes or nobody did."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among its fellows."""

    rank: int
    world_size: int
    device: torch.device

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor


@contextmanager
def process_group(device: str) -> Iterator[Ranks]:
    """Join ``torchrun``'s group, or make one of this single process.

    After an error the group is left as it is: to take it down could mean to wait for ranks that are gone.
    """
    chosen = _choose_device(device)
    _settle(chosen)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(_backend(chosen), **_rendezvous(Path(folder)))
        yield Ranks(dist.get_rank(), dist.get_world_size(), chosen)
        dist.destroy_process_group()


def _choose_device(name: str) -> torch.device:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if name == "cuda" and gpus < here:
        raise ValueError(f"--device cuda needs a GPU for each of {here} ranks, found {gpus}: use --device cpu")
    if name == "cpu" or gpus < here:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _settle(device: torch.device) -> None:
    """Each rank on its own GPU; on a CPU on its own core, or the ranks' threads would fight for them."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _rendezvous(folder: Path) -> dict[str, Any]:
    """Where the ranks meet: as ``torchrun`` tells, or, alone, in a file that asks nothing of the network."""
    if "RANK" in os.environ:
        return {"init_method": "env://"}
    return {"init_method": f"file://{folder / 'rendezvous'}", "rank": 0, "world_size": 1}


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
