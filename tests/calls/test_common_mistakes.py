"""The commonest mistakes of new users: the message alone says what to do, on every rank.

``test_uneven_batches.py`` has ranks that run out of batches; ``test_untrained_parameters.py`` has replaced layers, of
which a warning tells.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases_expecting, run_ranks

Mistake = Callable[[int], object]


def made(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    model = nn.Linear(4, 1)
    return model, LowLevelZeroOptimizer(optimizer(model.parameters(), lr=0.1), model, stage=2)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 4)).square().mean()


def ddp(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(4, 1))
    LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model)


def ddp_around_the_model_later(rank: int) -> None:
    model, optimizer = made()
    around = DistributedDataParallel(model)
    for _ in range(2):
        loss_of(around).backward()
        optimizer.step()
        optimizer.zero_grad()


def step_on_one_rank(rank: int) -> None:
    model, optimizer = made()
    optimizer.backward(loss_of(model))
    if rank == 0:
        optimizer.step()
    optimizer.zero_grad()


def grad_scaler(rank: int) -> None:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)


def converted_later(rank: int) -> None:
    model, optimizer = made()
    model.to(torch.float64)
    optimizer.backward(model(torch.ones(2, 4, dtype=torch.float64)).sum())
    optimizer.step()


def state_dict_on_rank_0(rank: int) -> None:
    model, optimizer = made()
    if rank == 0:
        optimizer.state_dict()
    optimizer.backward(loss_of(model))
    optimizer.step()


def step_of_the_wrapped(rank: int) -> None:
    model, optimizer = made()
    optimizer.backward(loss_of(model))
    optimizer.optim.step()


def another_lr(rank: int) -> None:
    model, optimizer = made()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    optimizer.backward(loss_of(model))
    optimizer.step()


MISTAKES: dict[str, tuple[Mistake, str]] = {
    "DDP": (ddp, "pass model.module and drop the wrapper"),
    "DDP later": (ddp_around_the_model_later, "leave that wrapper out, and run the plain model"),
    "step on one rank": (step_on_one_rank, "let every rank make the same calls .* «if rank == 0».*zero_grad"),
    "GradScaler": (grad_scaler, r"Convert the model to fp16 and call optimizer.backward\(loss\).*or use bf16"),
    "LBFGS": (lambda rank: made(torch.optim.LBFGS), "Use an optimizer that .* such as torch.optim.AdamW"),
    "converted later": (converted_later, r"move or convert a model \(.*\) before constructing the optimizer"),
    "state dict": (state_dict_on_rank_0, "rank 0 to state_dict; .*same calls .* none of them under «if rank == 0»"),
    "optim.step()": (step_of_the_wrapped, r"call optimizer.step\(\), not optimizer.optim.step\(\)"),
    "another lr": (another_lr, "lr of group 0: 0.1.* 0.2.*set them alike on all ranks"),
}


def test_errors_say_what_to_do(subtests: pytest.Subtests) -> None:
    def make(rank: int, world_size: int, name: str) -> object:
        return MISTAKES[name][0](rank)

    for (name,), ran in run_cases_expecting(make, 2, [(name,) for name in MISTAKES]):
        with subtests.test(mistake=name):
            for error in ran.raised():
                assert re.search(MISTAKES[name][1], error.message, re.DOTALL), error.message


def test_without_zero_grad_a_warning_says_what_to_do() -> None:
    def train(rank: int, world_size: int) -> list[str]:
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("lowlevel_zero").addHandler(handler)
        model, optimizer = made()
        for _ in range(3):
            optimizer.backward(loss_of(model))
            optimizer.step()
        return told

    told, _ = run_ranks(train, 2)
    assert [line for line in told if line.endswith("call optimizer.zero_grad() after each step")]
