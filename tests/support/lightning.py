"""What tests of ``ZeroStrategy`` share: modules, a fit as torchrun starts it, and what is alike."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lowlevel_zero.trainers.lightning import ZeroStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# What Lightning says of torch, and of loaders as small as these.
QUIETLY = [
    pytest.mark.filterwarnings(f"ignore:{what}")
    for what in (
        ".*LeafSpec.* is deprecated:FutureWarning",
        ".*does not have many workers:UserWarning",
        ".*but have no `val_dataloader`:UserWarning",
        "Checkpoint directory .* exists and is not empty:UserWarning",
        "The dirpath has changed from .*:UserWarning",
        "Using `DistributedSampler` with the dataloaders:UserWarning",
        "Be aware that when using `ckpt_path`, callbacks .*:UserWarning",
        ".*configure_optimizers` returned `None`:UserWarning",
    )
]

STAGE_2 = {"partition_grad": True}

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


@contextmanager
def torchrun(rank: int, world_size: int) -> Iterator[None]:
    """The environment that torchrun gives a process."""
    before = dict(os.environ)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.update(TORCHELASTIC_RUN_ID="test")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Net(pl.LightningModule):
    """Layers that may be dropped, over sizes that two and three ranks don't divide, with buffers that training changes.

    Args:
        drop: each rank leaves layers out at random, and nobody ever uses the last one in the first steps.
        compiled: the layers are.
        adam: AdamW over two groups, with a scheduler that changes learning rates and momenta in each step.
    """

    def __init__(self, drop: bool = False, compiled: bool = False, adam: bool = False) -> None:
        super().__init__()
        self.drop, self.compiled, self.adam = drop, compiled, adam
        self.seen: list[tuple[str, float]] = []
        self.make()

    def make(self) -> None:
        self.norm = nn.BatchNorm1d(5)
        self.inward = nn.Linear(5, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.outward = nn.Linear(7, 3)
        if self.compiled:
            self.inward.compile(backend="aot_eager")

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        hidden = torch.tanh(self.inward(self.norm(x)))
        for place, layer in enumerate(self.layers):
            if not (self.drop and self.training and self.drops(step, place)):
                hidden = hidden + layer(hidden)
        return self.outward(hidden)

    def drops(self, step: int, place: int) -> bool:
        nobody = place == 2 and step < 2
        return nobody or (step + place + self.global_rank) % 3 == 0

    def see(self, what: str, value: Any) -> None:
        self.seen.append((what, float(value.detach())))

    def loss(self, batch: Any, step: int = 0) -> Tensor:
        x, y = batch
        return (self(x, step) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        self.see("train", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.see("validate", loss)
        self.log("val", loss, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.see("test", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        if not self.adam:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        flat = [p for p in self.parameters() if p.dim() < 2]
        deep = [p for p in self.parameters() if p.dim() >= 2]
        groups = [{"params": deep}, {"params": flat, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Late(Net):
    """Makes its layers when Lightning asks it to."""

    def make(self) -> None:
        self.made = False

    def configure_model(self) -> None:
        if not self.made:
            super().make()
            self.made = True


class NoBuffers(Net):
    """In manual optimization, and after batches that only accumulate, DDP doesn't keep buffers alike."""

    def make(self) -> None:
        super().make()
        self.norm = nn.Identity()


class Gan(NoBuffers):
    """Two optimizers that take turns, of which one clips, with gradients of each loss in the other's parameters.

    Args:
        toggled: parameters of the other one require no gradients meanwhile; else they are added to its next step.
    """

    def __init__(self, toggled: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggled = toggled
        self.judge = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        makes, judges = self.optimizers()
        with self.turn(makes):
            deceived = self.judge(self(x)).square().mean()
            self.manual_backward(deceived)
            self.clip_gradients(makes, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            makes.step()
            makes.zero_grad()
        with self.turn(judges):
            judged = (self.judge(self(x)) - 1).square().mean() + self.judge(y).square().mean()
            self.manual_backward(judged)
            judges.step()
            judges.zero_grad()
        self.lr_schedulers().step()
        self.see("makes", deceived)
        self.see("judges", judged)

    @contextmanager
    def turn(self, optimizer: Any) -> Iterator[None]:
        if self.toggled:
            self.toggle_optimizer(optimizer)
        yield
        if self.toggled:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        own = [p for name, p in self.named_parameters() if not name.startswith("judge")]
        makes = torch.optim.SGD(own, lr=0.05, momentum=0.9, weight_decay=0.1)
        judges = torch.optim.Adam(self.judge.parameters(), lr=1e-2, eps=1e-3)
        return [makes, judges], [torch.optim.lr_scheduler.StepLR(makes, 2, 0.5)]


class Watched(Net):
    """Looks at gradients where Lightning's users do."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, norm in grad_norm(self, norm_type=2).items():
            self.see(name, norm)


def batches(count: int = 16, seed: int = 1, dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 5, generator=generator), torch.randn(count, 3, generator=generator)
    return DataLoader(TensorDataset(x.to(dtype), y.to(dtype)), batch_size=2)


def trainer_of(world_size: int, strategy: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(devices=world_size, strategy=strategy, **{**QUIET, "max_epochs": 2, **options})


def fit(rank: int, world_size: int, module: pl.LightningModule, strategy: Any, **options: Any) -> pl.Trainer:
    path = options.pop("ckpt_path", None)
    with torchrun(rank, world_size):
        trainer = trainer_of(world_size, strategy, **options)
        trainer.fit(module, batches(), batches(8, seed=2), ckpt_path=path)
    return trainer


def whole() -> ZeroStrategy:
    return ZeroStrategy(STAGE_2)


def sharded() -> ZeroStrategy:
    return ZeroStrategy(sharded_checkpoint=True)


def alone(rank: int, world_size: int, strategy: Callable[[], Any], devices: int) -> dict[str, Tensor]:
    """A fit of a process that nobody has given an environment; what it has afterwards."""
    torch.manual_seed(0)
    module = Net(adam=True)
    options = {"use_distributed_sampler": devices > 1, "max_epochs": 1}  # which shuffles
    trainer = pl.Trainer(devices=devices, strategy=strategy(), **QUIET, **options)
    trainer.fit(module, batches())
    return module.state_dict()


def same(one: Any, other: Any, at: str = "") -> None:
    """Alike, bit for bit."""
    assert type(one) is type(other), at
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, at
        assert torch.equal(one, other), at
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key, value in one.items():
            same(value, other[key], f"{at}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), at
        for place, (value, its) in enumerate(zip(one, other, strict=True)):
            same(value, its, f"{at}[{place}]")
    else:
        assert one == other, at


def plain(one: Any, other: Any, tolerance: float, at: str = "") -> None:
    """Alike in what plain torch has, numbers to ``tolerance``."""
    if isinstance(one, Tensor):
        assert torch.allclose(one, other, rtol=0, atol=tolerance), at
    elif isinstance(one, dict):
        keys = (one.keys() & other.keys()) if "lowlevel_zero" in one or "lowlevel_zero" in other else one.keys()
        for key in keys:
            plain(one[key], other[key], tolerance, f"{at}.{key}")
    elif isinstance(one, (list, tuple)):
        for place, (value, its) in enumerate(zip(one, other, strict=True)):
            plain(value, its, tolerance, f"{at}[{place}]")
    elif isinstance(one, (int, float)):
        assert one == pytest.approx(other), at
