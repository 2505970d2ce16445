"""Ranks may have different values of a buffer: what a trainer saves has the first rank's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from lowlevel_zero.trainers.accelerate import ZeroAccelerator
from lowlevel_zero.trainers.lightning import ZeroStrategy
from lowlevel_zero.trainers.transformers import ZeroTrainer
from tests.support.lightning import QUIETLY, Net, fit, sharded, torchrun, whole
from tests.support.ranks import run_cases
from tests.support.trainers import adamw, launched, sentences

pytestmark = QUIETLY

Buffers = dict[str, Tensor]


def apart(model: nn.Module, rank: int) -> Buffers:
    """Give all buffers values of this rank, which are returned."""
    for at, buffer in enumerate(model.buffers()):
        buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) + 10 * at + 100 * rank)
    return buffers(model)


def buffers(model: nn.Module) -> Buffers:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


class Counted(nn.Module):
    """A language model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = nn.Embedding(31, 5), nn.BatchNorm1d(8), nn.Linear(5, 31)
        self.register_buffer("order", torch.arange(31))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.embedding(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def by_accelerate(rank: int, world_size: int, folder: Path) -> tuple[Buffers, Buffers]:
    def prepared() -> tuple[Any, Any]:
        accelerator, model = ZeroAccelerator(cpu=True), Counted()
        model, _ = accelerator.prepare(model, adamw(model.parameters()))
        return accelerator, model

    with launched(rank, world_size):
        accelerator, model = prepared()
        saved = apart(model, rank)
        accelerator.save_state(folder)
    with launched(rank, world_size):
        accelerator, model = prepared()
        accelerator.load_state(folder)
        return saved, buffers(model)


def by_transformers(rank: int, world_size: int, folder: Path, in_slices: bool) -> tuple[Buffers, Buffers]:
    seen: list[Buffers] = []

    class Differing(ZeroTrainer):
        def _save_checkpoint(self, model: Any, *args: Any, **kwargs: Any) -> None:
            seen.append(apart(model, rank))
            super()._save_checkpoint(model, *args, **kwargs)

        def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            seen.append(buffers(model))
            return super().training_step(model, *args, **kwargs)

    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "log_level": "error"}
    for steps, start in ((1, None), (2, str(folder / "checkpoint-1"))):
        with launched(rank, world_size):
            args = TrainingArguments(folder, max_steps=steps, save_strategy="steps", save_steps=1, **quiet)
            seen = seen[1:]
            Differing(
                Counted(), args, train_dataset=sentences(32), sharded_checkpoint=in_slices, zero_options={}
            ).train(resume_from_checkpoint=start)
    return seen[0], seen[1]


def by_lightning(rank: int, world_size: int, folder: Path, strategy: Callable[[], ZeroStrategy]) -> Any:
    class Seeing(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            loaded.update(buffers(pl_module))

    loaded: Buffers = {}
    once = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0, "enable_checkpointing": True}
    module = Net(adam=True)
    trainer = fit(rank, world_size, module, strategy(), **once)
    saved = apart(module, rank)
    with torchrun(rank, world_size):
        trainer.save_checkpoint(folder / "a.ckpt")
    assert all(torch.equal(each, saved[name]) for name, each in buffers(module).items())
    again = {**once, "max_epochs": 2}
    fit(rank, world_size, Net(adam=True), strategy(), callbacks=[Seeing()], ckpt_path=folder / "a.ckpt", **again)
    return saved, loaded


WAYS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "accelerate": (by_accelerate, ()),
    "transformers, whole": (by_transformers, (False,)),
    "transformers, sharded": (by_transformers, (True,)),
    "Lightning, whole": (by_lightning, (whole,)),
    "Lightning, sharded": (by_lightning, (sharded,)),
}


def saved_and_loaded(rank: int, world_size: int, folder: Path, way: str) -> tuple[Buffers, Buffers]:
    """The buffers of this rank when it saved, and those that it was given when it loaded."""
    act, how = WAYS[way]
    return act(rank, world_size, folder / way, *how)  # type: ignore[no-any-return]


def test_a_checkpoint_has_the_first_rank_s_buffers(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for (_, way), ran in run_cases(saved_and_loaded, 2, [(tmp_path, way) for way in WAYS]):
        with subtests.test(way):
            (first, loaded), (second, also) = ran.values()
            assert len(first) >= 3
            assert not any(torch.equal(first[name], second[name]) for name in first)
            for its in (loaded, also):
                assert all(torch.equal(its[name], value) for name, value in first.items())
