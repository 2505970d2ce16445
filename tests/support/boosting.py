"""Runs through ColossalAI's Booster: with our plugin, its DDP plugin, and its own ZeRO on a stand-in device.

Importing this imports ColossalAI, which takes seconds: once, in the parent, before ranks are forked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from colossalai.accelerator import set_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin as TheirPlugin
from colossalai.booster.plugin import TorchDDPPlugin
from torch import Tensor, nn

from lowlevel_zero.plugin import LowLevelZeroPlugin
from lowlevel_zero.plugin.host_accelerator import HostAccelerator
from tests.support.checkpoints import check_same
from tests.support.oracle import parameters_of

with suppress(ImportError):  # ColossalAI's loggers use it where it is: imported here once, not in every rank
    importlib.import_module("rich.logging")


check_equal = check_same


class StandIn(HostAccelerator):
    """A CPU that says it is a CUDA device, on which ColossalAI's own ZeRO runs."""

    @property
    def name(self) -> str:
        return "cuda"

    def current_stream(self, device: Any = None) -> None:
        return None

    def stream(self, stream_: Any) -> nullcontext[None]:
        return nullcontext()

    def Stream(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        return None


Plugin = Callable[..., Any]


def ours(**options: Any) -> LowLevelZeroPlugin:
    return LowLevelZeroPlugin(**options)


def theirs(**options: Any) -> TheirPlugin:
    set_accelerator(StandIn())
    return TheirPlugin(overlap_communication=False, **options)


def ddp(**_: Any) -> TorchDDPPlugin:
    return TorchDDPPlugin(find_unused_parameters=True)


def model_of(seed: int = 0, width: int = 11, drop: bool = True) -> nn.Module:
    """Sizes that no world size divides, a layer that forward leaves out with ``drop``, a tied and a frozen weight."""
    torch.manual_seed(seed)
    model = Net(width, drop)
    model.frozen.requires_grad_(False)
    return model


class Net(nn.Module):
    def __init__(self, width: int, drop: bool) -> None:
        super().__init__()
        self.drop = drop
        self.inward = nn.Linear(7, width)
        self.dropped = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.again = nn.Linear(width, width)
        self.again.weight = self.tied.weight
        self.outward = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inward(x))
        hidden = hidden if self.drop else hidden + self.dropped(hidden)
        return self.outward(torch.tanh(self.again(self.tied(self.frozen(hidden)))))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 7, generator=generator), torch.randn(4, 3, generator=generator)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


def momentum(params: Any) -> torch.optim.Optimizer:
    """Unlike Adam, it feels a gradient that is wrong by a factor."""
    return torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=0.1)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if "weight" in n]},
        {"params": [p for n, p in named if "weight" not in n], "weight_decay": 0.0},
    ]


@dataclass
class Pair:
    """A boosted model and optimizer, and their booster."""

    booster: Booster
    model: Any
    optimizer: Any
    norms: list[float] = field(default_factory=list)

    def train(self, rank: int, first: int, last: int, clip: float = 0.0) -> None:
        """Steps ``first`` to ``last`` (excluded); ``clip`` clips by hand, for a plugin that doesn't."""
        for step in range(first, last):
            self.backward(rank, step)
            if clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward(self, rank: int, step: int) -> None:
        x, y = batch(rank, step)
        loss = (self.model(x).float() - y).square().mean()
        self.booster.backward(loss, self.optimizer)

    def values(self) -> dict[str, Tensor]:
        """The model's parameters by name."""
        return parameters_of(self.model.unwrap())

    def state(self) -> dict[str, Any]:
        """The whole optimizer state, masters included, as ColossalAI's files have it; all ranks call it."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return {key: value for key, value in state.items() if key != "lowlevel_zero"}


def boost(
    make: Plugin,
    optimizer: Plugin = adamw,
    seed: int = 0,
    drop: bool = True,
    groups: Callable[[nn.Module], Any] = groups_of,
    **options: Any,
) -> Pair:
    model = model_of(seed, drop=drop)
    booster = Booster(plugin=make(**options))
    boosted, wrapped, *_ = booster.boost(model, optimizer(groups(model)))
    return Pair(booster, boosted, wrapped)


def check_close(expected: dict[str, Tensor], got: dict[str, Tensor], tolerance: float) -> None:
    assert list(expected) == list(got)
    for name, value in expected.items():
        difference = (value.float() - got[name].float()).abs().max().item()
        assert difference <= tolerance, f"{name}: {difference}"
