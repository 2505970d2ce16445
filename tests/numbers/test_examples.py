"""The idea in one file trains as the package and as one process do; the smallest script goes on where it stopped."""

from __future__ import annotations

import os
import runpy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.covering import covering
from tests.support.oracle import Run, build, check_close, loss_of, train_alone, train_sharded
from tests.support.ranks import run_cases, run_ranks
from zero_in_one_file import ZeroOptimizer

MINIMAL = Path(__file__).parents[2] / "examples" / "train_minimal.py"
STAGES = (1, 2)
BUCKET_SIZES = (1, 60, 2**20)


def some_layers(step: int, rank: int) -> set[int]:
    """Drop one layer on all ranks, another one at each step, and one more on each rank alone."""
    return {step % 3, (rank + 1) % 3}


def in_one_group(make: Any, parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer over the parameters of all groups, so that weight decay moves every one of them."""
    members = list(parameters)
    if isinstance(members[0], dict):
        members = [p for group in members for p in group["params"]]
    optimizer: torch.optim.Optimizer = make(members)
    return optimizer


OPTIMIZERS = {
    "momentum": partial(in_one_group, partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)),
    "adamw": partial(in_one_group, partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)),
}


def run_of(optimizer: str, world_size: int) -> Run:
    return Run(world_size, steps=4, drop=some_layers, optimizer=OPTIMIZERS[optimizer])


def train(rank: int, world_size: int, optimizer: str, stage: int, bucket_size: int) -> tuple[dict[str, Tensor], ...]:
    """Return the parameters after a run of the example, and after the same run of the package."""
    run = run_of(optimizer, world_size)
    model = build(Run(seed=rank))  # The ranks start with different values, of which those of rank 0 count.
    sharded = ZeroOptimizer(model.parameters(), run.optimizer, stage, bucket_size)
    for step in range(run.steps):
        loss_of(model, run, step, 0, rank).backward()
        sharded.step()
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    packaged, _ = train_sharded(rank, world_size, run.with_options(partition_grad=stage == 2))
    return own, packaged


def test_one_file_trains_as_the_package_and_as_one_process(subtests: pytest.Subtests) -> None:
    world_size = 3
    alone = {name: train_alone(run_of(name, world_size))[0] for name in OPTIMIZERS}
    cases = covering(OPTIMIZERS, STAGES, BUCKET_SIZES)
    for (name, stage, bucket_size), ran in run_cases(train, world_size, cases, one_group=True):
        with subtests.test(optimizer=name, stage=stage, bucket_size=bucket_size):
            own, packaged = zip(*ran.values(), strict=True)
            check_close(alone[name], own, 2e-6)
            check_close(packaged[0], own, 2e-6)


def run_minimal(rank: int, world_size: int, folder: Path) -> tuple[int, float]:
    """Run the script in ``folder``, and return the step at which it began and its last loss."""
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *_, **__: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        names = runpy.run_path(str(MINIMAL))
    return names["first"], names["loss"].item()


def test_the_smallest_script_learns_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    ended = run_ranks(run_minimal, 2, tmp_path)
    assert [first for first, _ in ended] == [0, 0]
    assert max(loss for _, loss in ended) < 0.05
    shutil.rmtree(tmp_path / "run" / "step-200")
    assert run_ranks(run_minimal, 2, tmp_path) == [(150, loss) for _, loss in ended]
