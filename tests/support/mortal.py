"""A training run whose processes are killed: by themselves at a place, or by somebody at any moment.

Its data depends on the step alone, so that the losses of any number of ranks can be compared.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, save_checkpoint, storage

WIDTH, SHARES = 16, 4
FORWARD, BACKWARD, STEP, GATHER, SAVE = PLACES = ("forward", "backward", "step", "gather", "save")
LATEST = 0.8  # seconds until a rank is killed
AGENT_DIES = "AGENT_DIES"  # in the environment of a torchrun that ends with its ranks


class Task(NamedTuple):
    """What to train, and who dies.

    Attributes:
        folder: for checkpoints, and for what is told of each step.
        every: steps between checkpoints.
        deaths: by the how-manieth of torchrun's starts: the rank, the place, and the how-manieth time there.
        killed: starts in which a rank is killed at any moment instead.
        agent_dies: in which step.
    """

    folder: str
    steps: int
    every: int
    deaths: tuple[tuple[int, str, int], ...] = ()
    killed: int = 0
    agent_dies: int = 0

    @property
    def checkpoints(self) -> Path:
        return Path(self.folder) / "checkpoints"

    def told(self) -> list[dict[str, Any]]:
        """Of each step that was done: in which start, by how many ranks, and its loss."""
        told = Path(self.folder) / "told"
        return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


def build(**options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer, LowLevelZeroOptimizer]:
    """A model of several buckets, the optimizer, and what shards it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"partition_grad": True, "reduce_bucket_size": 2 * WIDTH**2, "clip_grad_norm": 1.0, **options}
    return model, inner, LowLevelZeroOptimizer(inner, model=model, **options)


def loss_of(model: nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
    """The mean over this rank's shares of a step's data."""
    data = torch.randn(SHARES, 8, WIDTH, generator=torch.Generator().manual_seed(step))[rank::world_size]
    loss: torch.Tensor = (model(data) - data.roll(1, -1)).square().mean()
    return loss


def die(agent: bool = False) -> None:
    if agent:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(place: str, times: int, model: nn.Sequential, inner: torch.optim.Optimizer, agent: bool = False) -> None:
    """Have this process end when it comes to a place for the how-manieth time; "backward" is between two buckets."""
    left = times

    def come(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            die(agent)

    middle, write = model[len(model) // 2], storage.CheckpointWriter.write_share
    if place == FORWARD:
        middle.register_forward_pre_hook(come)
    elif place == BACKWARD:
        middle.register_full_backward_hook(come)
    elif place == STEP:
        inner.register_step_pre_hook(come)
    elif place == GATHER:
        inner.register_step_post_hook(come)
    elif place == SAVE:
        pytest.MonkeyPatch().setattr(storage.CheckpointWriter, "write_share", lambda *args: (come(), write(*args))[1])


def _await_death(task: Task, start: int, model: nn.Sequential, inner: torch.optim.Optimizer) -> None:
    rank, moment = dist.get_rank(), random.Random(start)
    if start < len(task.deaths) and task.deaths[start][0] == rank:
        die_at(*task.deaths[start][1:], model, inner)
    if start < task.killed and moment.randrange(dist.get_world_size()) == rank:
        subprocess.Popen(["sh", "-c", f"sleep {moment.uniform(0.0, LATEST)}; kill -9 {os.getpid()}"])
    if AGENT_DIES in os.environ:
        die_at(FORWARD, task.agent_dies, model, inner, agent=True)


def train(task: Task, start: int) -> None:
    """From the newest checkpoint to the end; the process group is there."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, inner, optimizer = build()
    newest = latest(task.checkpoints, group=dist.group.WORLD)
    begin = load_checkpoint(newest, model, optimizer) if newest else 0
    _await_death(task, start, model, inner)
    for step in range(begin + 1, task.steps + 1):
        loss = loss_of(model, step, rank, world_size)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        if rank == 0:
            told = {"start": start, "ranks": world_size, "step": step, "loss": mean.item() / world_size}
            with (Path(task.folder) / "told").open("a") as file:
                file.write(json.dumps(told) + "\n")
        if step % task.every == 0:
            save_checkpoint(task.checkpoints / f"step-{step}", model, optimizer, extra=step, keep=2)
    if start < task.killed:
        sleep(60 * LATEST)  # until the killer comes, which a fast machine has left behind


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Task(*json.loads(sys.argv[1])), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.destroy_process_group()
