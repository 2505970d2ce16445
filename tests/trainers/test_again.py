"""A model is trained again in each trainer: a second fit, ``prepare`` or ``Trainer`` trains on as with DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from lowlevel_zero.trainers.accelerate import ZeroAccelerator
from lowlevel_zero.trainers.lightning import ZeroStrategy
from lowlevel_zero.trainers.transformers import ZeroTrainer
from tests.support.lightning import QUIET, QUIETLY, STAGE_2, Gan, Net, NoBuffers, batches, torchrun
from tests.support.ranks import run_cases
from tests.support.trainers import gpt2, launched, momentum, sentences, weights

pytestmark = QUIETLY

Result = tuple[list[float], dict[str, Tensor]]


def as_by_ddp(by_ddp: Result, sharded: Result) -> None:
    assert sharded[0] == pytest.approx(by_ddp[0], abs=1e-6)
    assert sharded[1].keys() == by_ddp[1].keys()
    for name, value in sharded[1].items():
        assert torch.allclose(value, by_ddp[1][name], rtol=0, atol=1e-6), name


# ---- Lightning ----


def trainer_of(world_size: int, strategy: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(devices=world_size, strategy=strategy, **{**QUIET, "max_epochs": 1, **options})


def one_trainer(module: pl.LightningModule, world_size: int, strategy: Callable[[], Any]) -> None:
    """fit, validate, fit; the epochs are counted on."""
    trainer = trainer_of(world_size, strategy())
    trainer.fit(module, batches(), batches(8, seed=2))
    trainer.validate(module, batches(8, seed=2), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches(), batches(8, seed=2))


def three_trainers(module: pl.LightningModule, world_size: int, strategy: Callable[[], Any]) -> None:
    """All are kept."""
    kept = []
    for _ in range(3):
        kept.append(trainer_of(world_size, strategy()))
        kept[-1].fit(module, batches())


def broken_off(module: pl.LightningModule, world_size: int, strategy: Callable[[], Any]) -> None:
    """In the midst of accumulation; and deleted, which leaves cycles."""
    for accumulated in (3, 2):
        trainer = trainer_of(world_size, strategy(), accumulate_grad_batches=accumulated, limit_train_batches=4)
        trainer.fit(module, batches())
        del trainer


class OnADevice(NoBuffers):
    """Changes where the end of a fit moves it to the host, as a module does that is on a device."""

    def cpu(self) -> OnADevice:
        return self.double().float()


FITS = {
    "moved to the host": (OnADevice, three_trainers),
    "fit, validate, fit": (Net, one_trainer),
    "three trainers": (lambda: Net(adam=True), three_trainers),
    "a GAN": (Gan, three_trainers),
    "broken off": (NoBuffers, broken_off),
}


def fits(rank: int, world_size: int, name: str) -> None:
    def result(strategy: Callable[[], Any]) -> Result:
        torch.manual_seed(0)
        make, run = FITS[name]
        module = make()
        with torchrun(rank, world_size):
            run(module, world_size, strategy)
        return [value for _, value in module.seen], module.state_dict()

    by_ddp = result(lambda: DDPStrategy(find_unused_parameters=name == "a GAN"))
    zero = {} if name == "broken off" else {**STAGE_2, "overlap_allgather": True}
    as_by_ddp(by_ddp, result(lambda: ZeroStrategy(zero)))


def test_lightning(subtests: pytest.Subtests) -> None:
    for (name,), ran in run_cases(fits, 2, [(name,) for name in FITS], one_group=True):
        with subtests.test(name):
            ran.values()


# ---- accelerate ----

Prepare = Callable[[], Any]


def train(accelerator: Any, model: Any, optimizer: Any, loader: Iterable[Any]) -> list[float]:
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def gentle(parameters: Any) -> torch.optim.Optimizer:
    """AdamW, whose ``eps`` keeps small gradients' rounding small."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def loader() -> DataLoader[Any]:
    return DataLoader(sentences(16), batch_size=2)  # type: ignore[arg-type]


def one_accelerator(make: Prepare, model: nn.Module) -> list[float]:
    """A cell of a notebook that is run again; the former optimizer is kept."""
    accelerator, kept, losses = make(), [], []
    prepared: Any = model
    for new in (momentum, gentle):
        plain = accelerator.unwrap_model(prepared)
        prepared, optimizer, batches = accelerator.prepare(plain, new(plain.parameters()), loader())
        kept.append(optimizer)
        losses += train(accelerator, prepared, optimizer, batches)
    return losses


def two_accelerators(make: Prepare, model: nn.Module) -> list[float]:
    kept, losses = [], []
    for new in (momentum, gentle):
        accelerator = make()
        kept.append((accelerator, *accelerator.prepare(model, new(model.parameters()), loader())))
        losses += train(*kept[-1])
    return losses


def prepared_again(make: Prepare, model: nn.Module) -> list[float]:
    """What has been prepared goes on, with its state."""
    first, second = make(), make()
    prepared = first.prepare(model, momentum(model.parameters()), loader())
    losses = train(first, *prepared)
    return losses + train(second, *second.prepare(*prepared[:2], loader()))


ACCELERATED = {each.__name__: each for each in (one_accelerator, two_accelerators, prepared_again)}


def accelerated(rank: int, world_size: int, name: str) -> None:
    def result(make: Prepare) -> Result:
        with launched(rank, world_size):
            model = gpt2()
            return ACCELERATED[name](make, model), weights(model)

    by_ddp = result(lambda: Accelerator(cpu=True))
    zero = {} if name == "two_accelerators" else STAGE_2
    as_by_ddp(by_ddp, result(lambda: ZeroAccelerator(cpu=True, zero_options=zero)))


def test_accelerate(subtests: pytest.Subtests) -> None:
    for (name,), ran in run_cases(accelerated, 2, [(name,) for name in ACCELERATED]):
        with subtests.test(name):
            ran.values()


# ---- transformers ----


class Recorder(Trainer):  # type: ignore[misc]  # as in the package
    """Keeps the losses, which ``Trainer`` rounds where it logs them."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


class Ours(Recorder, ZeroTrainer):
    pass


MakeTrainer = Callable[[nn.Module], Any]


def two_trainers(make: MakeTrainer, model: nn.Module) -> None:
    """Both are kept, and the first has been trained twice."""
    first, second = make(model), make(model)
    first.train()
    first.train()
    second.train()


def an_evaluation_between(make: MakeTrainer, model: nn.Module) -> None:
    for _ in range(2):
        trainer = make(model)
        trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0


def optimizers_of_ones_own(make: MakeTrainer, model: nn.Module) -> None:
    kept = []
    for new in (momentum, gentle):
        trainer = make(model)
        optimizer = new(model.parameters())
        trainer.optimizer, trainer.lr_scheduler = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        trainer.train()
        kept.append(trainer)


TRAINED = {each.__name__: each for each in (two_trainers, an_evaluation_between, optimizers_of_ones_own)}


def trained(rank: int, world_size: int, name: str, folder: str) -> None:
    def result(cls: type[Trainer], **zero: Any) -> Result:
        losses: list[float] = []

        def make(model: nn.Module) -> Any:
            quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "log_level": "error"}
            sizes = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 0.01, "adam_epsilon": 1e-3}
            args = TrainingArguments(folder, save_strategy="no", logging_steps=1, **quiet, **sizes)
            trainer = cls(model=model, args=args, train_dataset=sentences(24), eval_dataset=sentences(7), **zero)
            trainer.losses = losses
            return trainer

        with launched(rank, world_size):
            model = gpt2()
            TRAINED[name](make, model)
            return losses, weights(model)

    by_ddp = result(Recorder)
    as_by_ddp(by_ddp, result(Ours, zero_options={} if name == "two_trainers" else STAGE_2))


def test_transformers(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for (name, _), ran in run_cases(trained, 2, [(name, str(tmp_path)) for name in TRAINED]):
        with subtests.test(name):
            ran.values()
