"""``ZeroStrategy`` in Lightning's own ``Trainer``, beside its ``DDPStrategy``."""

from __future__ import annotations

import copy
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.trainers.lightning import ZeroStrategy
from tests.support.ranks import run_cases, run_cases_expecting, run_ranks

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# What Lightning says of torch, and of loaders as small as these.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what}")
    for what in (
        ".*LeafSpec.* is deprecated:FutureWarning",
        ".*does not have many workers:UserWarning",
        ".*but have no `val_dataloader`:UserWarning",
        "Checkpoint directory .* exists and is not empty:UserWarning",
        "The dirpath has changed from .*:UserWarning",
        "Using `DistributedSampler` with the dataloaders:UserWarning",
        "Be aware that when using `ckpt_path`, callbacks .*:UserWarning",
    )
]

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
        checkpointed: activations of the layers are computed again in backward.
        compiled: the layers are.
        adam: AdamW over two groups, with a scheduler that changes learning rates and momenta in each step.
    """

    def __init__(
        self,
        drop: bool = False,
        checkpointed: bool = False,
        compiled: bool = False,
        adam: bool = False,
    ) -> None:
        super().__init__()
        self.drop, self.checkpointed, self.compiled, self.adam = drop, checkpointed, compiled, adam
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
                hidden = hidden + (
                    checkpoint(layer, hidden, use_reentrant=False) if self.checkpointed else layer(hidden)
                )
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


def fit(rank: int, world_size: int, module: pl.LightningModule, strategy: Any, **options: Any) -> pl.Trainer:
    path = options.pop("ckpt_path", None)
    with torchrun(rank, world_size):
        trainer = pl.Trainer(devices=world_size, strategy=strategy, **{**QUIET, "max_epochs": 2, **options})
        trainer.fit(module, batches(), batches(8, seed=2), ckpt_path=path)
    return trainer


# ---- the numbers of DDPStrategy ----


@dataclass(frozen=True)
class Run:
    """A training run, by either strategy; each thing is made anew for each."""

    module: Callable[[], pl.LightningModule] = Net
    trainer: Callable[[], dict[str, Any]] = dict
    zero: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)


STAGE_2 = {"partition_grad": True}
UNUSED = {"find_unused_parameters": True}

RUNS = {
    "stage 1": Run(),
    "clipped": Run(trainer=lambda: {"gradient_clip_val": 0.1}),
    "clipped in stage 2, accumulation": Run(
        trainer=lambda: {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}, zero=STAGE_2
    ),
    "clipped by value": Run(
        trainer=lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, zero=STAGE_2
    ),
    "clipped under autocast": Run(trainer=lambda: {"gradient_clip_val": 0.1, "precision": "bf16-mixed"}, zero=STAGE_2),
    "accumulation": Run(trainer=lambda: {"accumulate_grad_batches": 3}, zero=STAGE_2),
    "double": Run(trainer=lambda: {"precision": "64-true"}),
    "layer drop": Run(lambda: Net(drop=True), ddp=UNUSED),
    "layer drop, accumulation": Run(
        lambda: Net(drop=True), lambda: {"accumulate_grad_batches": 2}, zero=STAGE_2, ddp=UNUSED
    ),
    "two optimizers": Run(Gan, ddp=UNUSED),
    "two optimizers, not toggled": Run(lambda: Gan(toggled=False), zero=STAGE_2, ddp=UNUSED),
    "norms": Run(Watched, zero=STAGE_2),
    "accumulation that changes": Run(
        trainer=lambda: {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})]}, zero=STAGE_2
    ),
    "validation in the midst": Run(
        NoBuffers, lambda: {"val_check_interval": 3, "accumulate_grad_batches": 2}, zero=STAGE_2
    ),
    "checkpointed": Run(lambda: Net(checkpointed=True, adam=True), zero=STAGE_2),
    "compiled": Run(lambda: Net(compiled=True)),
    "late": Run(lambda: Late(adam=True), zero={"overlap_allgather": True}),
    "offload": Run(lambda: Net(adam=True), zero={"cpu_offload": True, **STAGE_2}),
    "moving average": Run(trainer=lambda: {"callbacks": [EMAWeightAveraging(decay=0.8)]}, zero=STAGE_2),
    "average": Run(
        trainer=lambda: {"callbacks": [StochasticWeightAveraging(0.05, swa_epoch_start=1)], "max_epochs": 3},
        zero=STAGE_2,
    ),
}


def outcome(rank: int, world_size: int, run: Run, strategy: Any) -> tuple[list[tuple[str, float]], dict[str, Tensor]]:
    torch.manual_seed(rank)  # rank 0's values are broadcast
    module = run.module()
    fit(rank, world_size, module, strategy, **run.trainer())
    return module.seen, module.state_dict()


def as_by_ddp(rank: int, world_size: int, name: str) -> None:
    run = RUNS[name]
    expected_seen, expected = outcome(rank, world_size, run, DDPStrategy(**run.ddp))
    seen, values = outcome(rank, world_size, run, ZeroStrategy(run.zero))
    assert [what for what, _ in seen] == [what for what, _ in expected_seen]
    assert [value for _, value in seen] == pytest.approx([value for _, value in expected_seen], abs=1e-6)
    assert values.keys() == expected.keys()
    for key, value in values.items():
        assert torch.allclose(value, expected[key], rtol=0, atol=1e-6), key


ON_3_RANKS = (
    "clipped by value",
    "clipped in stage 2, accumulation",
    "layer drop, accumulation",
    "late",
    "norms",
    "two optimizers",
)


@pytest.mark.parametrize(
    ("world_size", "names"), [(2, [name for name in RUNS if name not in ON_3_RANKS]), (3, ON_3_RANKS)], ids=["2", "3"]
)
def test_losses_and_weights_are_those_of_ddp(world_size: int, names: Sequence[str], subtests: pytest.Subtests) -> None:
    for (name,), ran in run_cases(as_by_ddp, world_size, [(name,) for name in names], one_group=True):
        with subtests.test(name):
            ran.values()


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


def test_16_bit_parameters_have_masters(subtests: pytest.Subtests) -> None:
    cases = [("bf16-true", torch.bfloat16), ("16-true", torch.float16)]
    for (precision, _), ran in run_cases(as_by_hand, 2, cases):
        with subtests.test(precision):
            ran.values()


# ---- checkpoints ----


class Resumed(NamedTuple):
    """A run that is broken off after its first epoch, and goes on from a checkpoint."""

    sharded: bool
    module: Callable[[], pl.LightningModule] = lambda: Net(adam=True)
    precision: str = "32"
    callbacks: Callable[[], list[Callback]] = list


RESUMED = {
    "whole": Resumed(False),
    "whole, of bf16": Resumed(False, precision="bf16-true"),
    "sharded, of bf16": Resumed(True, precision="bf16-true"),
    "whole, of two optimizers": Resumed(False, Gan),
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


ONE_BATCH = {"limit_train_batches": 2, "limit_val_batches": 0}


def whole() -> ZeroStrategy:
    return ZeroStrategy(STAGE_2)


def sharded() -> ZeroStrategy:
    return ZeroStrategy(sharded_checkpoint=True)


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


# ---- processes ----


def alone(rank: int, world_size: int, strategy: Callable[[], Any], devices: int) -> dict[str, Tensor]:
    """A fit of a process that nobody has given an environment; what it has afterwards."""
    torch.manual_seed(0)
    module = Net(adam=True)
    options = {"use_distributed_sampler": devices > 1, "max_epochs": 1}  # which shuffles
    trainer = pl.Trainer(devices=devices, strategy=strategy(), **QUIET, **options)
    trainer.fit(module, batches())
    return module.state_dict()


PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
SCRIPTS = re.findall(r"^## Lightning\n(?:.*?)^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def script(rank: int, world_size: int, folder: Path) -> None:
    """What the page shows."""
    before = os.getcwd()
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    with torchrun(rank, world_size):
        os.environ.update({f"PL_TRAINER_{name.upper()}": str(value) for name, value in QUIET.items()})
        exec(compile(SCRIPTS[0], "train.py", "exec"), names)
    os.chdir(before)
    (optimizer,) = names["trainer"].optimizers
    assert optimizer.options.partition_grad
    assert optimizer.get_grad_norm()


def test_the_script_of_the_page(tmp_path: Path) -> None:
    run_ranks(script, 2, tmp_path)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"]


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
from tests.trainers.test_lightning import alone, sharded
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


MISTAKES: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any], str, str]] = {
    "GradScaler": (
        Net,
        {"plugins": [MixedPrecision("16-mixed", "cpu")]},
        "ValueError",
        "precision: expected no GradScaler, got '16-mixed': use 'bf16-mixed' or",
    ),
    "sharded already": (
        lambda: Own(lambda module: LowLevelZeroOptimizer(sgd(module.parameters()))),
        {},
        "TypeError",
        "optimizer: expected a plain optimizer, got LowLevelZeroOptimizer",
    ),
    "trained twice": (
        lambda: Own(lambda module: [sgd(module.parameters()), sgd(module.inward.parameters())]),
        {},
        "ValueError",
        "inward.weight: expected one optimizer that trains it, got two",
    ),
    "fp16 of two": (
        Gan,
        {"precision": "16-true"},
        "ValueError",
        "precision: expected one optimizer alone with '16-true', got several",
    ),
    "other layers later": (
        Net,
        {"callbacks": [Unfreeze()]},
        "TypeError",
        "callbacks: expected no BaseFinetuning, to which slices mean nothing: use add_param_group",
    ),
    "not elementwise": (
        lambda: Own(lambda module: torch.optim.LBFGS(module.parameters())),
        {},
        "TypeError",
        "LBFGS cannot be stepped on slices of its parameters",
    ),
}


def mistake(rank: int, world_size: int, name: str) -> None:
    module, options, _, _ = MISTAKES[name]
    fit(rank, world_size, module(), ZeroStrategy(), **options)


def test_mistakes_are_refused_on_every_rank(subtests: pytest.Subtests) -> None:
    for (name,), ran in run_cases_expecting(mistake, 2, [(name,) for name in MISTAKES]):
        with subtests.test(name):
            for raised in ran.raised():
                assert raised.type == MISTAKES[name][2]
                assert MISTAKES[name][3] in raised.message


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"find_unused_parameters": True}, "DistributedDataParallel, got find_unused_parameters"),
        ({"ddp_comm_hook": print}, "got ddp_comm_hook"),
        ({"zero_options": {"partition_gradients": True}}, "unexpected keyword argument 'partition_gradients'"),
        ({"zero_options": {"model": None}}, "multiple values for keyword argument 'model'"),
    ],
)
def test_options_that_there_are_not(options: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        ZeroStrategy(**options)
