"""``ZeroStrategy`` in Lightning's own ``Trainer``, beside its ``DDPStrategy``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

from lowlevel_zero import LowLevelZeroOptimizer
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
    torchrun,
    trainer_of,
    whole,
)
from tests.support.ranks import run_ranks
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
    "moved to the host": Run(OnADevice, zero=STAGE_2 | LATE, fits=three_trainers),
    "fit, validate, fit": Run(zero=STAGE_2 | LATE, fits=fit_validate_fit),
    "three trainers": Run(lambda: Net(adam=True), zero=STAGE_2 | LATE, fits=three_trainers),
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


SCRIPT = """
import sys, torch
from tests.support.lightning import alone, sharded
state = alone(0, 2, sharded, 2)
if torch.distributed.get_rank() == 0:
    torch.save(state, sys.argv[1])
assert torch.distributed.get_world_size() == 2
"""


@pytest.mark.soak
def test_processes_that_lightning_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(sys.path)
    subprocess.run(
        [sys.executable, "-W", "ignore", script, tmp_path / "state.pt"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=100,
    )
    (by_ddp,) = run_ranks(alone, 1, partial(DDPStrategy, start_method="fork"), 2, init=False)
    plain(torch.load(tmp_path / "state.pt"), by_ddp, 1e-6)


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
        mistake(Gan, precision="16-true"),
        "ValueError: ",
        "expected one optimizer where parameters are fp16, since it scales the loss, got several",
    ),
    "other layers later": (
        mistake(Net, callbacks=[Unfreeze()]),
        "TypeError: callbacks: expected no BaseFinetuning, which looks for parameters in groups of slices: use add_",
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
