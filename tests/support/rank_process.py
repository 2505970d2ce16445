"""What a started rank does: one case after another, each in a process group of its own, and nothing left of any."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Seconds that threads get to end after their case.
PATIENCE = 5.0

_kept: list[dist.ProcessGroup] = []

# The type of the error of a case that leaves its process other than it was.
LEFT_BEHIND = "LeftBehind"


class Raised(NamedTuple):
    """The exception that ended a rank, as text: the exception itself may not be picklable."""

    type: str
    message: str
    traceback: str


class Outcome(NamedTuple):
    value: Any
    raised: Raised | None


class Job(NamedTuple):
    fn: Callable[..., Any]
    world_size: int
    cases: list[tuple[Any, ...]]  # the arguments of each
    timeout: float  # of each case
    backend: str | None  # None: no process group
    stays: bool = True  # a rank that is done waits until all are
    one_group: bool = False  # a case that has returned leaves its process group to the next one


def live(rank: int, job: Job, pipe: Connection, folder: Path) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed parent takes its ranks along
    with (folder / f"new-stacks-{rank}").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        Path(file.name).rename(folder / f"stacks-{rank}")
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"  # 127.0.0.1
        gc.freeze()  # what the parent made needs no looking at
        for number, case in enumerate(job.cases):
            before = state()
            outcome, returned = _work(rank, job, case, folder / f"rendezvous-{number}")
            pipe.send_bytes(outcome)
            if not job.stays:
                return
            pipe.recv_bytes()
            if number + 1 < len(job.cases):
                pipe.send_bytes(_pack(_leave(before, keeps_group=returned and job.one_group)))
        if dist.is_initialized():
            _end_group()


def _work(rank: int, job: Job, case: tuple[Any, ...], rendezvous: Path) -> tuple[bytes, bool]:
    """The outcome of a case, and whether it returned."""
    try:
        if job.backend is not None and not dist.is_initialized():
            _join_group(rank, job, job.backend, rendezvous)
        return _pack(Outcome(job.fn(rank, job.world_size, *case), None)), True
    except BaseException as error:  # SystemExit and pytest's skip as well: the parent must hear of each
        return _pack(Outcome(None, Raised(type(error).__name__, str(error), traceback.format_exc()))), False


def _leave(before: dict[str, Any], keeps_group: bool) -> Outcome:
    """End a case: with nothing left of it, but its group where that is wanted."""
    gc.collect()
    if dist.is_initialized() and not keeps_group:
        _end_group()
        gc.collect()
    deadline = time.monotonic() + PATIENCE
    while threading.active_count() > len(before["threads"]) and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()  # what held a thread's last task may have been let go by now
    after = state()
    left = [f"{what}: {before[what]} became {now}" for what, now in after.items() if now != before[what]]
    if not left:
        return Outcome(None, None)
    message = "left behind: " + "; ".join(left)
    return Outcome(None, Raised(LEFT_BEHIND, message, message + "\n"))


def state() -> dict[str, Any]:
    """What a case can change for the next one."""
    return {
        "environment": dict(os.environ),
        "working folder": os.getcwd(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "intra-op threads": torch.get_num_threads(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "optimizers alive": sum(isinstance(each, torch.optim.Optimizer) for each in gc.get_objects()),
    }


def _join_group(rank: int, job: Job, backend: str, rendezvous: Path) -> None:
    if "nccl" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    # The parent's timeout must come first: it shows the stacks.
    timeout = timedelta(seconds=2 * job.timeout + 10)
    dist.init_process_group(backend, f"file://{rendezvous}", rank=rank, world_size=job.world_size, timeout=timeout)


def _end_group() -> None:
    """Before torch 2.8 a group that goes waits for gloo's threads and holds Python's lock, which one may wait for."""
    if torch.__version__ < "2.8":
        _kept.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


def _pack(outcome: Outcome) -> bytes:
    """By value: shared memory would vanish with the rank."""
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    return buffer.getvalue()
