"""Bad numbers: an inf or NaN in a gradient is named by parameter, bucket and rank, and not skipped for ever."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowlevel_zero import Diagnostics, LossScale, LowLevelZeroOptimizer
from tests.support.ranks import run_ranks, run_ranks_expecting

STAGES = {"stage 1": {}, "stage 2": {"partition_grad": True}}


class Told(logging.Handler):
    """What the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("lowlevel_zero").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def net(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(dtype)


class Run:
    """One rank's training, in which a gradient becomes ``bad`` in chosen steps on rank 1."""

    def __init__(self, rank: int, dtype: torch.dtype, optimizer: type[torch.optim.Optimizer] | Any, **options: Any):
        self.told = Told()
        self.rank = rank
        self.model = net(dtype)
        options = {"reduce_bucket_size": 20, **options}
        self.optimizer = LowLevelZeroOptimizer(optimizer(self.model.parameters(), lr=0.01), model=self.model, **options)
        self.factor: float | None = None
        self.model[1].weight.register_hook(self.spoil)

    def spoil(self, gradient: Tensor) -> Tensor | None:
        if self.factor is None or self.rank != 1:
            return None
        spoilt = gradient.clone()
        spoilt[2, 1] = self.factor
        return spoilt

    def train(self, factor: float | None = None, zero_grad: bool = True) -> None:
        self.factor = factor
        x = torch.ones(2, 4, dtype=self.model[0].weight.dtype)
        self.optimizer.backward(self.model(x).float().square().mean())
        self.optimizer.step()
        if zero_grad:
            self.optimizer.zero_grad()


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "fused adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
}


@pytest.mark.parametrize(("stage", "optimizer"), list(zip(STAGES, OPTIMIZERS, strict=True)))
def test_an_overflow_names_parameter_bucket_rank_and_scale(stage: str, optimizer: str) -> None:
    def live(rank: int, world_size: int) -> list[str]:
        run = Run(rank, torch.float16, OPTIMIZERS[optimizer], initial_scale=256.0, hysteresis=1, **STAGES[stage])
        for factor in (None, math.inf, math.nan, None, math.inf):
            run.train(factor)
        return run.told.lines

    lines, *others = run_ranks(live, 3)
    assert others == [[], []]
    heads = [line.partition(" (bucket ")[0] for line in lines]
    assert heads == [f"step {n}: skipped, since gradients overflowed: first in 1.weight" for n in (2, 3, 5)]
    tails = [line.partition("), ")[2] for line in lines]
    assert tails == [
        "from rank 1. Loss scale now 128, 1 steps skipped in a row",
        "from rank 1. Loss scale now 64, 2 steps skipped in a row",
        "from rank 1. Loss scale now 32, 1 steps skipped in a row",
    ]


def test_a_sum_that_overflows_came_from_no_rank() -> None:
    """Each rank's gradient fits fp16, their sum doesn't."""

    def live(rank: int, world_size: int) -> list[str]:
        told = Told()
        model = net(torch.float16)
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, initial_scale=1.0)
        model[0].bias.register_hook(lambda gradient: torch.full_like(gradient, 40_000.0))
        optimizer.backward(model(torch.ones(2, 4).half()).float().sum())
        optimizer.step()
        return told.lines

    (line,), _ = run_ranks(live, 2)
    assert "first in 0.bias (bucket 0), in the slice of the sum over ranks that rank 0, 1 holds" in line


def test_skipping_ends_when_the_scale_can_fall_no_further() -> None:
    def live(rank: int, world_size: int) -> None:
        run = Run(rank, torch.float16, torch.optim.SGD, loss_scale=LossScale(4.0, hysteresis=1, max_skipped_steps=4))
        for count in range(10):
            assert count < 4, "skips for ever"
            run.train(math.inf)

    for error in run_ranks_expecting(live, 2):
        assert error.type == "RuntimeError"
        assert error.message.startswith("step 4: skipped, since gradients overflowed: first in 1.weight (bucket ")
        assert "Loss scale now 1, 4 steps skipped in a row. The loss scale is at its minimum" in error.message


@pytest.mark.parametrize(("limit", "scale"), [(0, 1.0), (3, 2.0**16)], ids=["no limit", "still falling"])
def test_skipping_goes_on(limit: int, scale: float) -> None:
    def live(rank: int, world_size: int) -> list[bool]:
        chosen = LossScale(scale, hysteresis=1, max_skipped_steps=limit)
        run = Run(rank, torch.float16, torch.optim.SGD, loss_scale=chosen)
        before = run.model[0].weight.clone()
        for _ in range(6):
            run.train(math.inf)
        still = torch.equal(before, run.model[0].weight)
        run.train()
        return [still, torch.equal(before, run.model[0].weight)]

    assert run_ranks(live, 2) == [[True, False]] * 2


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}, {"overlap_allgather": True}], ids=str)
def test_a_norm_that_is_not_finite_is_told_once_and_again_at_powers_of_two(options: dict[str, Any]) -> None:
    def live(rank: int, world_size: int) -> list[str]:
        run = Run(rank, torch.float32, torch.optim.SGD, **options)
        for factor in (None, math.nan, math.nan, math.nan, math.nan, None):
            run.train(factor)
        return run.told.lines

    lines, other = run_ranks(live, 2)
    assert other == []
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 3", "step 5"]
    assert lines[0].startswith("step 2: the gradient norm is nan, 1 in a row: first in 1.weight (bucket ")
    assert "in the slice of the sum over ranks that rank 1 holds" in lines[0]
    assert ", 2 in a row" in lines[1]
    assert ", 4 in a row" in lines[2]


def test_error_if_nonfinite_steps_nothing_and_training_goes_on() -> None:
    def live(rank: int, world_size: int) -> list[str]:
        run = Run(rank, torch.bfloat16, torch.optim.AdamW, diagnostics=Diagnostics(error_if_nonfinite=True))
        run.train()
        before = [p.detach().clone() for p in run.model.parameters()]
        with pytest.raises(RuntimeError) as caught:
            run.train(math.inf)
        assert all(map(torch.equal, before, run.model.parameters()))
        run.optimizer.zero_grad()
        run.train()
        assert not torch.equal(before[0], run.model[0].weight)
        return [str(caught.value), *run.told.lines]

    for lines in run_ranks(live, 2):
        (line,) = lines
        assert line.startswith("step 2: expected a finite gradient norm, got inf: first in 1.weight (bucket ")
        assert "), from rank 1. Nothing was stepped: call optimizer.zero_grad() on every rank" in line


def test_one_rank_alone() -> None:
    def live(rank: int, world_size: int) -> list[str]:
        run = Run(1, torch.float32, torch.optim.SGD)
        run.train(math.nan)
        return run.told.lines

    ((line,),) = run_ranks(live, 1)
    assert line.endswith("first in 1.weight (bucket 1), from rank 0")
