"""Checkpoints of ``ZeroStrategy`` in Lightning's own ``Trainer``: resumed, at other numbers of ranks, by DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
)
from lightning.pytorch.strategies import DDPStrategy

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import load_checkpoint, read_rank_state, save_checkpoint
from lowlevel_zero.checkpoint.folders import remove
from lowlevel_zero.checkpoint.manifest import MANIFEST
from lowlevel_zero.trainers.files import place_for, put_in_place
from lowlevel_zero.trainers.lightning import ZeroStrategy
from tests.support.lightning import (
    QUIET,
    QUIETLY,
    STAGE_2,
    Gan,
    Net,
    batches,
    fit,
    plain,
    same,
    sharded,
    torchrun,
    whole,
)
from tests.support.ranks import run_cases, run_ranks

pytestmark = QUIETLY

ONE_BATCH = {"limit_train_batches": 2, "limit_val_batches": 0}


class Resumed(NamedTuple):
    """A run that is broken off after its first epoch, and goes on from a checkpoint."""

    sharded: bool
    module: Callable[[], pl.LightningModule] = lambda: Net(adam=True)
    precision: str = "32"
    callbacks: Callable[[], list[Callback]] = list


RESUMED = {
    "whole, of bf16": Resumed(False, precision="bf16-true"),
    "sharded, of bf16": Resumed(True, precision="bf16-true"),
    "sharded, of two optimizers": Resumed(True, Gan),
    "sharded, with an average": Resumed(True, callbacks=lambda: [EMAWeightAveraging(decay=0.8)]),
}


def save_and_resume(rank: int, world_size: int, folder: Path, name: str) -> None:
    """Two epochs, and the second of them once more."""
    run = RESUMED[name]

    def train(path: Path | None) -> tuple[Any, pl.Trainer]:
        torch.manual_seed(rank if path is None else rank + 7)
        module = run.module()
        callbacks = [*run.callbacks(), ModelCheckpoint(folder / str(path is None), "{epoch}", save_top_k=-1)]
        options = {"callbacks": callbacks, "enable_checkpointing": True, "precision": run.precision}
        strategy = ZeroStrategy(STAGE_2, sharded_checkpoint=run.sharded)
        return module, fit(rank, world_size, module, strategy, ckpt_path=path, **options)

    whole, trainer = train(None)
    path = folder / "True" / "epoch=0.ckpt"
    assert path.is_dir() == run.sharded
    resumed, again = train(path)
    assert again.global_step == trainer.global_step
    assert 2 * len(resumed.seen) == len(whole.seen)
    assert resumed.seen == whole.seen[len(resumed.seen) :]
    same(resumed.state_dict(), whole.state_dict())
    for optimizer, its in zip(again.optimizers, trainer.optimizers, strict=True):
        same(optimizer.state_dict(), its.state_dict())
    same(schedulers(again), schedulers(trainer))


def schedulers(trainer: pl.Trainer) -> list[dict[str, Any]]:
    return [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for (_, name), ran in run_cases(save_and_resume, 2, [(tmp_path / name, name) for name in RESUMED], one_group=True):
        with subtests.test(name):
            ran.values()


def save(rank: int, world_size: int, folder: Path, strategy: Callable[[], Any]) -> dict[str, Any]:
    """What a run of one epoch ends with, and leaves in ``folder``."""
    module = Net(adam=True)
    callbacks = [ModelCheckpoint(folder, "one")]
    trainer = fit(
        rank, world_size, module, strategy(), callbacks=callbacks, max_epochs=1, enable_checkpointing=True, **ONE_BATCH
    )
    return {"model": module.state_dict(), "optim": trainer.optimizers[0].state_dict()}


def go_on(rank: int, world_size: int, folder: Path, strategy: Callable[[], Any]) -> dict[str, Any]:
    """What that becomes in a further step from there."""
    torch.manual_seed(7)
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.update(copy.deepcopy({"model": pl_module.state_dict(), "optim": trainer.optimizers[0].state_dict()}))

    module = Net(adam=True)
    path = folder / "one.ckpt"
    fit(rank, world_size, module, strategy(), callbacks=[Look()], max_epochs=2, ckpt_path=path, **ONE_BATCH)
    return {"loaded": seen, "model": module.state_dict()}


def test_checkpoints_load_at_other_numbers_of_ranks_and_by_ddp(tmp_path: Path) -> None:
    ways = {"whole": whole, "sharded": sharded, "ddp": DDPStrategy}
    saved = run_cases(save, 2, [(tmp_path / name, way) for name, way in ways.items()])
    states = {name: ran.values()[0] for name, ((_, ran)) in zip(ways, saved, strict=True)}
    plain(states["whole"], states["ddp"], 1e-6)
    plain(states["sharded"], states["ddp"], 1e-6)
    taken = [("whole", sharded), ("sharded", whole), ("ddp", sharded), ("whole", DDPStrategy)]
    went_on = run_cases(go_on, 3, [(tmp_path / name, way) for name, way in taken])
    expected = went_on[-1][1].values()  # DDP's
    for (folder, _), ran in went_on:
        for rank, by_ddp in zip(ran.values(), expected, strict=True):
            plain(rank["loaded"], states[folder.name], 0.0)
            plain(rank["model"], by_ddp["model"], 1e-6)


def evaluate(rank: int, world_size: int, folder: Path, strategy: Callable[[], Any]) -> Any:
    """``validate``, ``test`` and ``predict`` after a fit, with its best checkpoint, and by a trainer of their own."""
    module = Net(adam=True)
    strategy_of_fit = strategy()
    data = batches(8, seed=2)
    callbacks = [ModelCheckpoint(folder, "best", monitor="val")]
    options = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": 1}
    trainer = fit(rank, world_size, module, strategy_of_fit, **options)
    fitted, module.seen = module.seen, []
    with torchrun(rank, world_size):
        trainer.validate(module, data, ckpt_path="best", verbose=False)
        assert [value for _, value in module.seen] == [value for what, value in fitted if what == "validate"]
        trainer.test(module, data, ckpt_path="best", verbose=False)
        predictions = trainer.predict(module, data, ckpt_path="best")
        other = pl.Trainer(devices=world_size, strategy=strategy(), **QUIET)
        fresh = Net(adam=True)
        again = other.predict(fresh, data, ckpt_path=folder / "best.ckpt")
        same(predictions, again)
        trainer.fit(module, batches(), data)  # goes on, with optimizers made anew
    assert all(isinstance(optimizer, LowLevelZeroOptimizer) for optimizer in trainer.optimizers)
    return predictions


def test_evaluation_after_a_fit(tmp_path: Path) -> None:
    for _, ran in run_cases(evaluate, 2, [(tmp_path / "whole", whole), (tmp_path / "sharded", sharded)]):
        ran.values()


def save_again(rank: int, world_size: int, folder: Path) -> None:
    """A trainer writes one name anew in every epoch, and never over what it hasn't written."""
    module, last = Net(adam=True), folder / "last.ckpt"
    callbacks = [ModelCheckpoint(folder, "one", save_last=True)]
    options = {"callbacks": callbacks, "enable_checkpointing": True, **ONE_BATCH}
    left = folder / "last.ckpt.new"
    trainer = fit(rank, world_size, module, sharded(), max_epochs=2, **options)
    with torchrun(rank, world_size):
        assert {place.name for place in folder.iterdir()} == {"one.ckpt", "last.ckpt"}
        trainer.save_checkpoint(left)  # as a crash leaves one
        trainer.save_checkpoint(last)
        assert not left.exists()
        assert read_rank_state(last, 0)["epoch"] == 2
        before = {file.name: file.stat().st_mtime_ns for file in last.iterdir()}
        trainer.strategy.barrier()
        if rank == 0:
            (last / "notes.txt").write_text("of its user")
        with pytest.raises(FileExistsError, match="found notes.txt: move it"):
            trainer.save_checkpoint(last)
        assert before == {file.name: file.stat().st_mtime_ns for file in last.iterdir() if file.suffix != ".txt"}


def test_a_folder_of_one_name_is_replaced_by_a_whole_one_and_user_files_stay(tmp_path: Path) -> None:
    for _, ran in run_cases(save_again, 2, [(tmp_path,)]):
        ran.values()


@pytest.mark.parametrize("begun", [False, True])
def test_a_crash_while_the_last_one_is_replaced_loses_nothing(begun: bool, tmp_path: Path) -> None:
    """When the former one had gone, or ``begun`` to go, and the new one lay beside."""

    def save(rank: int, world_size: int) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model)
        path = tmp_path / "last.ckpt"
        for extra in (1, 2):
            save_checkpoint(place_for(path), model, optimizer, extra=extra)
        if begun:
            (path / MANIFEST).rename(tmp_path / f"{path.name}.lowlevel_zero.removed")
        else:
            remove(path)
        beside = place_for(path)
        assert load_checkpoint(path, model, optimizer) == 2
        save_checkpoint(beside, model, optimizer, extra=3)
        put_in_place(beside, path)
        assert load_checkpoint(tmp_path, model, optimizer) == 3
        assert {place.name for place in tmp_path.iterdir()} == {"last.ckpt"}

    run_ranks(save, 1)
