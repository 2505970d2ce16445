"""The training: batches, schedule, validation, and what is to be remembered of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from .. import LowLevelZeroOptimizer
from .checkpoints import Checkpoints
from .history import History
from .model import GPT, decay_groups
from .options import DTYPES, Options
from .plain import PlainAdamW
from .ranks import Ranks
from .text import random_windows

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
WARM_UP = 0.1  # of the steps
LAST_LR = 0.05  # of the highest
VALIDATIONS = 8
GLANCES = 100  # a look at the run waits for the device: not at every step


class Glance(NamedTuple):
    """What a person who watches the run wants to see."""

    steps: int
    loss: float  # nats a byte, of the latest step on this rank
    norm: float
    tokens_per_second: float  # of all ranks


class Trainer:
    """A model, its optimizer and its schedule, and the steps that they take together."""

    def __init__(self, options: Options, dtype: str, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        torch.manual_seed(options.seed)
        self.model = _model(options, ranks.rank).to(device=ranks.device, dtype=DTYPES[dtype])
        self.network, self.optimizer = _wrap(self.model, options, ranks)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate(options.steps))
        self.history = History()
        self.checkpoints = Checkpoints(options, dtype)
        self._done = 0  # steps that a checkpoint has brought
        self._losses: list[Tensor] = []  # of this rank, of the steps that the history doesn't have yet

    @property
    def parameters(self) -> int:
        """Trained numbers; shared ones count once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        options = self.options
        return options.batch * options.accumulation * options.context * self.ranks.world_size

    def resume(self, path: Path) -> int:
        """Go on from a checkpoint; every rank calls it, before ``train``. Returns the steps that it has seen."""
        assert isinstance(self.optimizer, LowLevelZeroOptimizer)
        self._done, self.history = self.checkpoints.load(path, self.model, self.optimizer, self.schedule)
        return self._done

    def train(self, text: Tensor, windows: Tensor, show: Callable[[Glance], None]) -> History:
        """All the steps, on random windows of this rank's ``text``; ``windows``, the same on all, judge."""
        steps = self.options.steps
        batches = self._batches(text)
        self._draw_again(batches)
        if not self._done:
            self._validate(0, windows)
        for step in range(self._done + 1, steps + 1):
            self._losses.append(self._timed_step(step, batches, show))
            if _due(step, steps, VALIDATIONS):
                self._validate(step, windows)
            if self.checkpoints.due(step):
                self._save(step)
        self._remember_losses()
        return self.history

    def _draw_again(self, batches: Iterator[Tensor]) -> None:
        """Draw the batches and dropped layers of the steps that are done, so that the next ones are the next."""
        for _ in range(self._done * self.options.accumulation):
            next(batches)
            self.model.stack.draw()

    def _save(self, step: int) -> None:
        assert isinstance(self.optimizer, LowLevelZeroOptimizer)
        self._remember_losses()
        self.checkpoints.save(step, self.history, self.model, self.optimizer, self.schedule)

    def _remember_losses(self) -> None:
        """Average over the ranks what the steps since the last time lost."""
        if self._losses:
            mean = self.ranks.total(torch.stack(self._losses).float()) / self.ranks.world_size
            self.history.train += mean.tolist()
            self._losses.clear()

    def _timed_step(self, step: int, batches: Iterator[Tensor], show: Callable[[Glance], None]) -> Tensor:
        start = time.perf_counter()
        look = _due(step, self.options.steps, GLANCES)
        loss = self._step(batches, measure=look)
        shown = (loss.item(), float(self.optimizer.get_grad_norm() or 0.0)) if look else None
        self.history.seconds += time.perf_counter() - start
        if shown:
            show(Glance(step, *shown, step * self.tokens_per_step / self.history.seconds))
        return loss

    def _step(self, batches: Iterator[Tensor], measure: bool) -> Tensor:
        """One optimizer step over all its micro-batches; the mean of their losses, still on the device."""
        losses = []
        for _ in range(self.options.accumulation):
            loss = byte_loss(self.network, next(batches))
            self.optimizer.backward(loss / self.options.accumulation)
            losses.append(loss.detach())
        if measure:
            self._measure()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def _measure(self) -> None:
        """Remember what this rank holds when reductions are over: in flight, wires hold as much again."""
        if isinstance(self.optimizer, LowLevelZeroOptimizer):
            self.optimizer.get_working_grads_by_group_id(0)  # nobody can look at a gradient in flight
        self.history.remember_held(self.optimizer.memory_held())

    def _batches(self, text: Tensor) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.options.seed + self.ranks.rank)
        while True:
            batch = random_windows(text, self.options.batch, self.options.context, generator)
            yield batch.to(self.ranks.device)

    def _validate(self, step: int, windows: Tensor) -> None:
        loss = validation_loss(self.model, windows, self.options.batch, self.ranks)
        self.history.validation.append((step, loss))


def byte_loss(network: nn.Module, windows: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy, in fp32, of all but the first byte of each of ``windows`` [batch, context + 1]."""
    logits = network(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def validation_loss(model: nn.Module, windows: Tensor, batch: int, ranks: Ranks) -> float:
    """Nats a byte over all ``windows``, of which each rank judges its share, with no layer dropped."""
    model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for start in range(ranks.rank * batch, len(windows), ranks.world_size * batch):
        nats += byte_loss(model, windows[start : start + batch].to(ranks.device), reduction="sum")
    model.train()
    return ranks.total(nats).item() / windows[:, 1:].numel()


def learning_rate(steps: int) -> Callable[[int], float]:
    """From step to share of the highest rate: a linear warm-up, then half a cosine down."""
    warm_up = max(1, round(WARM_UP * steps))

    def share(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * done)) / 2

    return share


def _model(options: Options, rank: int) -> GPT:
    return GPT(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        context=options.context,
        layer_drop=options.layer_drop,
        drop_seed=options.drop_seed(rank),
    )


def _wrap(model: GPT, options: Options, ranks: Ranks) -> tuple[nn.Module, LowLevelZeroOptimizer | PlainAdamW]:
    """What computes the loss and what trains it: the model and ZeRO, or DDP around it and plain AdamW."""
    groups = decay_groups(model, WEIGHT_DECAY)
    if options.stage == 0:
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        network = DistributedDataParallel(model, device_ids=devices, find_unused_parameters=True)
        return network, PlainAdamW(groups, lr=options.lr, betas=BETAS, clip=options.clip)
    inner = torch.optim.AdamW(groups, lr=options.lr, betas=BETAS, fused=True)
    partition = options.stage == 2
    return model, LowLevelZeroOptimizer(inner, model=model, partition_grad=partition, clip_grad_norm=options.clip)


def _due(step: int, steps: int, times: int) -> bool:
    """Whether what happens ``times`` times in all, evenly and at the last step, happens after this one."""
    return step * times // steps > (step - 1) * times // steps
