"""Messages name global ranks, also where an optimizer is over a part of them; and count its own steps."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import Diagnostics, LowLevelZeroOptimizer
from tests.support.ranks import run_ranks

PART = [1, 3]


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logging.getLogger("lowlevel_zero").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def over_a_part(**options: Any) -> tuple[nn.Linear, LowLevelZeroOptimizer] | None:
    group = dist.new_group(PART)
    if dist.get_rank() not in PART:
        return None
    model = nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, LowLevelZeroOptimizer(sgd, model=model, dp_process_group=group, **options)


def test_the_rank_that_a_nan_came_from() -> None:
    def train(rank: int, world_size: int) -> str | None:
        made = over_a_part(diagnostics=Diagnostics(error_if_nonfinite=True))
        if made is not None:
            model, optimizer = made
            optimizer.backward(model(torch.full((2, 4), float("nan") if rank == 3 else 1.0)).sum())
            with pytest.raises(RuntimeError) as refused:
                optimizer.step()
            return str(refused.value)
        return None

    for found in run_ranks(train, 4)[1::2]:
        assert found is not None
        assert "from rank 3" in found


def test_a_rank_that_others_wait_for() -> None:
    def stalled(rank: int, world_size: int) -> list[str]:
        told = Told()
        made = over_a_part(diagnostics=Diagnostics(stall_timeout=0.2))
        if made is not None:
            time.sleep(1.0 if rank == 3 else 0.0)
            made[1].backward(made[0](torch.ones(2, 4)).sum())
            made[1].step()
        return told.lines

    for line in (line for line in run_ranks(stalled, 4)[1] if "has waited" in line):
        assert line.startswith("rank 1 has waited")
        assert "Not there yet: rank 3" in line
        break
    else:
        raise AssertionError("no stall was reported")


def test_a_rank_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(rank: int, world_size: int) -> str | None:
        if rank == 3:
            os.memfd_create = refuse  # type: ignore[assignment]
        made = over_a_part()
        return made[1].shard_group.describe_backend(torch.device("cpu")) if made is not None else None

    def refuse(*_: Any) -> int:
        raise OSError("no memfd here")

    for found in run_ranks(train, 4)[1::2]:
        assert found is not None
        assert "rank 3: no memfd here" in found


def test_steps_are_counted_where_experts_are_all_there_is() -> None:
    def train(rank: int, world_size: int) -> list[str]:
        told = Told()
        own = [dist.new_group([each]) for each in range(world_size)][rank]
        model = nn.Linear(4, 4)
        optimizer = LowLevelZeroOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            {own: list(model.parameters())},
            model=model,
            dp_process_group=dist.group.WORLD,
        )
        for step in range(3):
            optimizer.backward(model(torch.full((2, 4), float("nan") if step == 2 else 1.0)).sum())
            optimizer.step()
            optimizer.zero_grad()
        return told.lines

    assert any(line.startswith("step 3: the gradient norm is nan") for line in run_ranks(train, 2)[0])
