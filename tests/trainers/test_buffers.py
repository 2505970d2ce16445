"""Buffers that differ by rank: checkpoints of trainers' libraries have the first rank's, and all ranks load them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from lowlevel_zero.trainers.accelerate import ZeroAccelerator
from lowlevel_zero.trainers.transformers import ZeroTrainer
from tests.support.lightning import QUIETLY, Net, fit, sharded, torchrun, whole
from tests.support.ranks import run_cases
from tests.support.trainers import adamw, gpt2, launched, sentences

pytestmark = QUIETLY


def write(rank: int, *buffers: Tensor) -> None:
    """Each rank its own."""
    for buffer in buffers:
        buffer.fill_(rank + 1.0)


def check(*buffers: Tensor) -> None:
    """They are the first rank's."""
    for buffer in buffers:
        assert torch.equal(buffer, torch.ones_like(buffer))


def of_lightning(rank: int, world_size: int, folder: Path, strategy: Callable[[], Any]) -> None:
    module, path = Net(adam=True), folder / "one.ckpt"
    trainer = fit(rank, world_size, module, strategy(), max_epochs=1)
    write(rank, module.norm.running_mean, module.norm.running_var)
    with torchrun(rank, world_size):
        trainer.save_checkpoint(path)
    fresh = Net(adam=True)
    fit(rank, world_size, fresh, strategy(), max_epochs=1, ckpt_path=path)  # whose epoch is over
    check(fresh.norm.running_mean, fresh.norm.running_var)


class Buffers(TrainerCallback):  # type: ignore[misc]  # as in the package
    """Writes them after each step, of which the first is saved; notes what a training begins with."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.begun: list[Tensor] = []

    def on_train_begin(self, *_: Any, model: Any, **others: Any) -> None:
        self.begun.append(model.seen.clone())

    def on_step_end(self, *_: Any, model: Any, **others: Any) -> None:
        write(self.rank, model.seen)


def of_transformers(rank: int, world_size: int, folder: Path, sharded_checkpoint: bool) -> None:
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "log_level": "error"}
    saves = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1}
    with launched(rank, world_size):
        for steps in (1, 2):
            model, watched = gpt2(), Buffers(rank)
            model.register_buffer("seen", torch.zeros(3))
            arguments = TrainingArguments(str(folder), max_steps=steps, **saves, **quiet)
            trainer = ZeroTrainer(
                model=model,
                args=arguments,
                train_dataset=sentences(8),
                callbacks=[watched],
                sharded_checkpoint=sharded_checkpoint,
            )
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1" if steps == 2 else None)
        check(*watched.begun)


def of_accelerate(rank: int, world_size: int, folder: Path) -> None:
    with launched(rank, world_size):
        accelerator = ZeroAccelerator(cpu=True)
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(5)
        inner = nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 2))
        model, optimizer = accelerator.prepare(inner, adamw(inner.parameters()))
        accelerator.backward(model(torch.randn(4, 4)).square().mean())
        optimizer.step()
        write(rank, norm.running_mean, norm.running_var)
        accelerator.save_state(str(folder))
        write(rank + 7, norm.running_mean, norm.running_var)
        accelerator.load_state(str(folder))
        check(norm.running_mean, norm.running_var)


CASES: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "Lightning, whole": (of_lightning, (whole,)),
    "Lightning, sharded": (of_lightning, (sharded,)),
    "transformers, whole": (of_transformers, (False,)),
    "transformers, sharded": (of_transformers, (True,)),
    "accelerate": (of_accelerate, ()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_has_the_first_ranks_buffers(name: str, tmp_path: Path) -> None:
    live, options = CASES[name]
    run_cases(live, 2, [(tmp_path, *options)])[0][1].values()
