"""Loops that people write themselves, with torch's own tools around a model and its sharded optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.optim import Optimizer, lr_scheduler
from tqdm import tqdm

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.cases import check_cases
from tests.support.oracle import Run, build, groups, loss_of

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    return model


def plateau(optimizer: Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)


@dataclass(frozen=True)
class Loop:
    """What stands in somebody's loop.

    Attributes:
        around: what the model becomes when the optimizer has been made.
        scheduler: made of the optimizer, whichever kind it is, and told the loss after each step.
        clear: who clears gradients.
        clip: to this norm, by torch's own function.
        tool: a context that it runs in.
    """

    around: Callable[[nn.Module], nn.Module] = lambda model: model
    scheduler: Callable[[Optimizer], Any] | None = None
    clear: str = "optimizer"
    clip: float = 0.0
    tool: Callable[[], AbstractContextManager[Any]] = nullcontext
    run: Run = field(default_factory=lambda: Run(steps=5))


LOOPS = {
    "plateau, anomalies detected": Loop(scheduler=plateau, clip=0.5, tool=torch.autograd.detect_anomaly),
    "compiled in place, layers dropped": Loop(
        compiled_in_place, run=Run(steps=5, drop=lambda step, rank: {(step + rank) % 3})
    ),
    "checkpointed and compiled, micro-batches": Loop(
        lambda model: compiled_in_place(checkpointed(model)), clear="model", clip=0.5, run=Run(steps=5, micro_batches=2)
    ),
}


def train(
    loop: Loop, ranks: list[int], wrap: Callable[[Optimizer, nn.Module], Optimizer], mean: Callable[[Tensor], float]
) -> dict[str, list[Any]]:
    """The loop, with losses of ``ranks``; ``mean`` is over those of all."""
    run = loop.run
    model = build(run)
    optimizer = wrap(run.optimizer(groups(model)), model)
    scheduler = None if loop.scheduler is None else loop.scheduler(optimizer)
    whole = loop.around(model)
    told: list[float] = []
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            losses = [loss_of(whole, run, step, micro, rank) for rank in ranks]
            loss = torch.stack(losses).mean()
            loss.backward()
            told.append(mean(loss.detach()))
        if loop.clip:
            told.append(float(nn.utils.clip_grad_norm_(model.parameters(), loop.clip)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step(told[-1])
        told += [group["lr"] for group in optimizer.param_groups]
        (optimizer if loop.clear == "optimizer" else model).zero_grad()
    return {"told": told, "weights": [p.detach() for p in model.parameters()]}


def as_plain(rank: int, world_size: int, name: str) -> None:
    """All ranks' losses in one process, and each rank its own."""

    def shard(optimizer: Optimizer, model: nn.Module) -> Optimizer:
        return LowLevelZeroOptimizer(optimizer, model=model, partition_grad=True)

    tqdm.monitor_interval = 0  # the compiler has a bar, whose thread would stay
    loop = LOOPS[name]
    expected = train(loop, list(range(world_size)), lambda optimizer, model: optimizer, float)
    with loop.tool():
        got = train(loop, [rank], shard, mean_over_ranks)
    torch._dynamo.reset()
    assert got["told"] == pytest.approx(expected["told"], abs=1e-6)
    for value, its in zip(got["weights"], expected["weights"], strict=True):
        assert torch.allclose(value, its, rtol=0, atol=1e-6)


def mean_over_ranks(loss: Tensor) -> float:
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def test_loops_are_those_of_plain_torch(subtests: pytest.Subtests) -> None:
    check_cases(subtests, 2, as_plain, LOOPS, one_group=True)
