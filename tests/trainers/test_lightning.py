"""``ZeroStrategy`` in Lightning's own ``Trainer``, beside its ``DDPStrategy``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import load_checkpoint, read_rank_state, save_checkpoint
from lowlevel_zero.checkpoint.folders import remove
from lowlevel_zero.checkpoint.manifest import MANIFEST
from lowlevel_zero.trainers.files import place_for, put_in_place
from lowlevel_zero.trainers.lightning import ZeroStrategy
from tests.support.cases import Check, check_cases, check_refusals
from tests.support.lightning import (
    QUIETLY,
    STAGE_2,
    Gan,
    Late,
    Net,
    NoBuffers,
    Watched,
    alone,
    batches,
    fit,
    plain,
    same,
    sharded,
    torchrun,
    trainer_of,
    whole,
)
from tests.support.ranks import run_cases, run_ranks
from tests.support.trainers import check_ends

pytestmark = QUIETLY

# ---- the numbers of DDPStrategy ----


Strategy = Callable[[], Any]


def one_fit(rank: int, world_size: int, module: pl.LightningModule, strategy: Strategy, **options: Any) -> None:
    fit(rank, world_size, module, strategy(), **options)


def fit_validate_fit(rank: int, world_size: int, module: pl.LightningModule, strategy: Strategy) -> None:
    """By one trainer, whose epochs are counted on."""
    with torchrun(rank, world_size):
        trainer = trainer_of(world_size, strategy(), max_epochs=1)
        trainer.fit(module, batches(), batches(8, seed=2))
        trainer.validate(module, batches(8, seed=2), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, batches(), batches(8, seed=2))


def three_trainers(rank: int, world_size: int, module: pl.LightningModule, strategy: Strategy) -> None:
    """All are kept."""
    kept = []
    with torchrun(rank, world_size):
        for _ in range(3):
            kept.append(trainer_of(world_size, strategy(), max_epochs=1))
            kept[-1].fit(module, batches())


def broken_off(rank: int, world_size: int, module: pl.LightningModule, strategy: Strategy) -> None:
    """In the midst of accumulation; and deleted, which leaves cycles."""
    for accumulated in (3, 2):
        options = {"accumulate_grad_batches": accumulated, "limit_train_batches": 4, "max_epochs": 1}
        fit(rank, world_size, module, strategy(), **options)


class OnADevice(NoBuffers):
    """Changes where the end of a fit moves it to the host, as a module does that is on a device."""

    def cpu(self) -> OnADevice:
        return self.double().float()


@dataclass(frozen=True)
class Run:
    """A training run, by either strategy; each thing is made anew for each."""

    module: Callable[[], pl.LightningModule] = Net
    trainer: Callable[[], dict[str, Any]] = dict
    zero: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    fits: Callable[..., None] = one_fit


UNUSED = {"find_unused_parameters": True}
LATE = {"overlap_allgather": True}

RUNS = {
    "clipped in stage 2, accumulation": Run(
        trainer=lambda: {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}, zero=STAGE_2
    ),
    "clipped by value": Run(
        trainer=lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, zero=STAGE_2
    ),
    "clipped under autocast": Run(trainer=lambda: {"gradient_clip_val": 0.1, "precision": "bf16-mixed"}, zero=STAGE_2),
    "layer drop, accumulation": Run(
        lambda: Net(drop=True), lambda: {"accumulate_grad_batches": 2}, zero=STAGE_2, ddp=UNUSED
    ),
    "two optimizers": Run(Gan, ddp=UNUSED),
    "two optimizers, not toggled": Run(lambda: Gan(toggled=False), zero=STAGE_2, ddp=UNUSED),
    "norms": Run(Watched, zero=STAGE_2),
    "validation in the midst": Run(
        NoBuffers, lambda: {"val_check_interval": 3, "accumulate_grad_batches": 2}, zero=STAGE_2
    ),
    "compiled": Run(lambda: Net(compiled=True)),
    "late": Run(lambda: Late(adam=True), zero=LATE),
    "moving average": Run(trainer=lambda: {"callbacks": [EMAWeightAveraging(decay=0.8)]}, zero=STAGE_2),
    "average": Run(
        trainer=lambda: {"callbacks": [StochasticWeightAveraging(0.05, swa_epoch_start=1)], "max_epochs": 3},
        zero=STAGE_2,
    ),
    "moved to the host": Run(lambda: OnADevice(adam=True), zero=STAGE_2 | LATE, fits=three_trainers),
    "fit, validate, fit": Run(zero=STAGE_2 | LATE, fits=fit_validate_fit),
    "two optimizers, three trainers": Run(Gan, zero=STAGE_2 | LATE, ddp=UNUSED, fits=three_trainers),
    "broken off": Run(NoBuffers, fits=broken_off),
}


def outcome(rank: int, world_size: int, run: Run, strategy: Strategy) -> tuple[list[tuple[str, float]], Any]:
    torch.manual_seed(rank)  # rank 0's values are broadcast
    module = run.module()
    run.fits(rank, world_size, module, strategy, **run.trainer())
    return module.seen, module.state_dict()


def as_by_ddp(rank: int, world_size: int, name: str) -> None:
    run = RUNS[name]
    expected_seen, expected = outcome(rank, world_size, run, lambda: DDPStrategy(**run.ddp))
    seen, values = outcome(rank, world_size, run, lambda: ZeroStrategy(run.zero))
    assert [what for what, _ in seen] == [what for what, _ in expected_seen]
    assert [value for _, value in seen] == pytest.approx([value for _, value in expected_seen], abs=1e-6)
    check_ends(expected, values, 1e-6)


ON_3_RANKS = ("clipped in stage 2, accumulation", "layer drop, accumulation", "norms", "two optimizers")


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_and_weights_are_those_of_ddp(world_size: int, subtests: pytest.Subtests) -> None:
    names = [name for name in RUNS if (name in ON_3_RANKS) == (world_size == 3)]
    check_cases(subtests, world_size, as_by_ddp, names, one_group=True)


# ---- 16-bit parameters, which DDP has no masters for: as in a loop of one's own ----


def as_by_hand(rank: int, world_size: int, precision: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Net(adam=True)
    options = {**STAGE_2, "initial_scale": 2.0**8}
    trainer = fit(rank, world_size, module, ZeroStrategy(options), precision=precision, max_epochs=1)
    torch.manual_seed(0)
    by_hand = Net(adam=True).to(dtype)
    configured = by_hand.configure_optimizers()
    optimizer = LowLevelZeroOptimizer(configured["optimizer"], model=by_hand, **options)
    data = batches().dataset
    sampler = DistributedSampler(data, world_size, rank, seed=0)  # as Lightning makes one
    for batch_idx, (x, y) in enumerate(DataLoader(data, batch_size=2, sampler=sampler)):
        loss = by_hand.loss((x.to(dtype), y.to(dtype)))
        assert ("train", loss.item()) == module.seen[batch_idx], batch_idx
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()
        configured["lr_scheduler"]["scheduler"].step()
    (trained,) = trainer.optimizers
    assert trained.loss_scale == optimizer.loss_scale
    same(trained.state_dict(), optimizer.state_dict())


def test_16_bit_parameters_have_masters(subtests: pytest.Subtests) -> None:
    check_cases(subtests, 2, as_by_hand, [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])


# ---- batches that aren't as many on each rank, where no gradients are reduced ----


def validate_unevenly(rank: int, world_size: int, strategy: Callable[[], Any]) -> list[tuple[str, float]]:
    module = Net()
    fit(rank, world_size, module, strategy(), max_epochs=1)
    module.seen.clear()
    with torchrun(rank, world_size):
        trainer = trainer_of(world_size, strategy(), use_distributed_sampler=False)
        trainer.validate(module, batches(4 + 4 * rank), verbose=False)
    return module.seen


def test_ranks_may_validate_other_numbers_of_batches_outside_of_fit() -> None:
    by_ddp, sharded = (run_ranks(validate_unevenly, 2, strategy) for strategy in (DDPStrategy, ZeroStrategy))
    assert [len(seen) for seen in sharded] == [2, 4]
    for seen, expected in zip(sharded, by_ddp, strict=True):
        assert [value for _, value in seen] == pytest.approx([value for _, value in expected], abs=1e-6)


# ---- processes ----


def test_one_process_trains_as_without_a_strategy() -> None:
    (by_itself,), (sharded_over_one,) = (run_ranks(alone, 1, way, 1, init=False) for way in (lambda: "auto", whole))
    plain(sharded_over_one, by_itself, 1e-6)


def test_processes_that_lightning_forks() -> None:
    by_ddp, forked = (
        run_ranks(alone, 1, partial(way, start_method="fork"), 2, init=False)[0] for way in (DDPStrategy, ZeroStrategy)
    )
    plain(forked, by_ddp, 1e-6)


# ---- checkpoints: resumed, at other numbers of ranks, by DDP ----

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
    check_cases(subtests, 2, save_and_resume, [(tmp_path / name, name) for name in RESUMED], one_group=True)


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
        other = trainer_of(world_size, strategy())
        fresh = Net(adam=True)
        again = other.predict(fresh, data, ckpt_path=folder / "best.ckpt")
        same(predictions, again)
        trainer.fit(module, batches(), data)  # goes on, with optimizers made anew
    assert all(isinstance(optimizer, LowLevelZeroOptimizer) for optimizer in trainer.optimizers)
    return predictions


def test_evaluation_after_a_fit(tmp_path: Path, subtests: pytest.Subtests) -> None:
    check_cases(subtests, 2, evaluate, [(tmp_path / "whole", whole), (tmp_path / "sharded", sharded)])


def save_without_optimizers(rank: int, world_size: int, folder: Path) -> None:
    """A trainer that has only validated has a file to save, from which a fit goes on."""
    module, data, path = Net(adam=True), batches(8, seed=2), folder / "validated.ckpt"
    with torchrun(rank, world_size):
        trainer = trainer_of(world_size, sharded())
        trainer.validate(module, data, verbose=False)
        trainer.save_checkpoint(path)
    assert path.is_file()
    torch.manual_seed(7)
    other = Net(adam=True)
    fit(rank, world_size, other, sharded(), ckpt_path=path, max_epochs=0)
    same(other.state_dict(), module.state_dict())


def test_a_trainer_without_optimizers_saves_a_file(tmp_path: Path) -> None:
    run_ranks(save_without_optimizers, 2, tmp_path)


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
    run_ranks(save_again, 2, tmp_path)


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


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_replaced_and_what_it_points_to_stays(dangling: bool, tmp_path: Path) -> None:
    """As Lightning's last.ckpt with save_last="link"; also where a crash had left the new one beside."""

    def save(rank: int, world_size: int) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model)
        first, path = tmp_path / "epoch=0.ckpt", tmp_path / "last.ckpt"
        save_checkpoint(first, model, optimizer, extra=1)
        before = {file.name: file.read_bytes() for file in first.iterdir()}
        for crashes in (True, False):
            path.symlink_to("gone" if dangling else first.name)
            beside = place_for(path)
            if crashes:
                save_checkpoint(beside, model, optimizer, extra=2)
                beside = place_for(path)
            save_checkpoint(beside, model, optimizer, extra=3)
            put_in_place(beside, path)
            assert load_checkpoint(path, model, optimizer) == 3
            assert before == {file.name: file.read_bytes() for file in first.iterdir()}
            assert {place.name for place in tmp_path.iterdir()} == {"epoch=0.ckpt", "last.ckpt"}
            remove(path)

    run_ranks(save, 1)


# ---- mistakes ----


class Own(Net):
    """Returns something else from ``configure_optimizers``."""

    def __init__(self, configured: Callable[[Own], Any]) -> None:
        super().__init__()
        self.configured = configured
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return self.configured(self)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.inward)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def mistake(make: Callable[[], pl.LightningModule], **options: Any) -> Check:
    def misuse(rank: int, world_size: int) -> None:
        fit(rank, world_size, make(), ZeroStrategy(), **options)

    return misuse


def two_in_fp16(rank: int, world_size: int) -> None:
    """Neither is sharded."""
    module = Own(lambda module: ([sgd(module.inward.parameters()), sgd(module.outward.parameters())], []))
    try:
        fit(rank, world_size, module, ZeroStrategy(), precision="16-true")
    finally:
        optimizers = module.optimizers(use_pl_optimizer=False)
        assert set(module.parameters()).issuperset(p for each in optimizers for p in each.param_groups[0]["params"])


MISTAKES: dict[str, tuple[Any, ...]] = {
    "GradScaler": (
        mistake(Net, plugins=[MixedPrecision("16-mixed", "cpu")]),
        "ValueError: precision: expected no GradScaler, got '16-mixed': use 'bf16-mixed' or",
    ),
    "sharded already": (
        mistake(lambda: Own(lambda module: LowLevelZeroOptimizer(sgd(module.parameters())))),
        "TypeError: optimizer: expected a plain optimizer, got LowLevelZeroOptimizer",
    ),
    "fp16 of two": (
        two_in_fp16,
        "ValueError: ",
        "expected one optimizer where parameters are fp16, since it scales the loss, got several",
    ),
    "other layers later": (
        mistake(Net, callbacks=[Unfreeze()]),
        "TypeError: callbacks: expected no BaseFinetuning, which looks for parameters in groups of slices, got one",
    ),
    "no optimizer": (
        mistake(lambda: Own(lambda module: None)),
        "TypeError: configure_optimizers: expected at least one optimizer, got none",
    ),
    "not elementwise": (
        mistake(lambda: Own(lambda module: torch.optim.LBFGS(module.parameters()))),
        "TypeError: ",
        "LBFGS cannot be sharded",
    ),
}


def test_mistakes_are_refused_on_every_rank(subtests: pytest.Subtests) -> None:
    check_refusals(subtests, 2, MISTAKES)


def test_options_that_there_are_not() -> None:
    for options in ({"find_unused_parameters": True}, {"ddp_comm_hook": print}):
        with pytest.raises(
            TypeError, match=f"expected no option of DistributedDataParallel, got {next(iter(options))}"
        ):
            ZeroStrategy(**options)
