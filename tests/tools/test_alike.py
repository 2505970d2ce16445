"""``assert_trains_alike``: what users run on an optimizer of their own."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero.testing import assert_trains_alike
from tests.support.ranks import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8)])
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv2d(2, 3, 3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def test_processes_of_its_own_give_the_bits_of_one_process() -> None:
    assert not dist.is_initialized()
    for make, split, stage in ((adamw, "elements", 1), (adafactor, "parameters", 2)):
        found = assert_trains_alike(make, Net, tolerance=0, stage=stage)
        assert (found.splits, found.difference) == ((split,), 0.0)
        assert (len(set(found.states)) > 1) == (split == "parameters")  # whole parameters aren't of one size


def test_what_is_sent_is_counted_in_all_steps_before_it_goes_on_from_a_state_dict_and_after() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return torch.stack([p.square().sum() for p in model.parameters()]).sum()

    once, twice, thrice = (
        assert_trains_alike(adamw, Net, steps, loss=loss, stage=2, split="elements").sent for steps in (1, 2, 3)
    )
    assert once == twice == thrice > 0


def test_ranks_that_are_there_take_part() -> None:
    def work(rank: int, world_size: int) -> tuple[float, int]:
        found = assert_trains_alike(adafactor, Net, stage=2, clip_grad_norm=0.0)
        return found.difference, len(found.states)

    (difference, count), *others = run_ranks(work, 3)
    assert others == [(difference, count)] * 2
    assert count == 3
    assert difference < 1e-5


def test_the_reference_clips_too() -> None:
    """A step of SGD follows the norm that is left; what a rank steps alone would have a norm of its own."""

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    for make in (sgd, adafactor):
        assert assert_trains_alike(make, Net, clip_grad_norm=0.1, stage=2).difference < 1e-5


def test_the_reference_steps_copies_of_16_bits_too() -> None:
    for make, options in ((adamw, {}), (adafactor, {"clip_grad_norm": 0.1}), (adafactor, {"master_weights": False})):
        assert_trains_alike(make, lambda: Net().bfloat16(), stage=2, **options)
    with pytest.raises(ValueError, match="embedding.weight: expected fp32, fp64 or bf16 parameters, got fp16"):
        assert_trains_alike(adamw, lambda: Net().half())


def test_a_difference_shows_beside_the_rounding_to_16_bits() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Drifting(model.parameters(), lr=0.1)

    with pytest.raises(AssertionError, match="got a difference of"):
        assert_trains_alike(make, lambda: Net().bfloat16(), split="parameters")


def test_ranks_that_torchrun_has_started_take_part_and_leave_no_group_behind() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(rank: int, world_size: int) -> tuple[float, int]:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        place = {name: str(number) for name, number in numbers.items()}
        interface = "lo0" if sys.platform == "darwin" else "lo"
        with mock.patch.dict(os.environ, place, MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME=interface):
            found = assert_trains_alike(adafactor, Net, world_size=5, stage=2)
        assert not dist.is_initialized()
        return found.difference, len(found.states)

    assert run_ranks(work, 2, init=False, timeout=40) == [(0.0, 2)] * 2


class Drifting(torch.optim.SGD):
    """Steps by the mean over all parameters that it has, which a rank doesn't."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad.mean() for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(group["lr"] * (p.grad + sum(gradients)))


def test_one_that_trains_otherwise_is_told_by_the_parameter() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Drifting(model.parameters(), lr=0.1)

    with pytest.raises(TypeError, match="Drifting cannot be sharded"):
        assert_trains_alike(make, Net)
    with pytest.raises(
        AssertionError, match=r"expected the values of one process, to 1e-05 of the way .* got a difference of"
    ):
        assert_trains_alike(make, Net, split="parameters")


def test_numbers_that_are_none_are_not_alike_and_no_step_compares_nothing() -> None:
    with pytest.raises(AssertionError, match="a difference of nan"):
        assert_trains_alike(lambda model: torch.optim.SGD(model.parameters(), lr=float("nan")), Net)
    with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
        assert_trains_alike(adamw, Net, steps=0)


def test_a_loss_and_a_mistake_of_the_caller_s() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        output: Tensor = model.layers[1](model.layers[0](x).tanh())  # type: ignore[index, operator, union-attr]
        return output.square().mean()

    assert assert_trains_alike(adafactor, Net, loss=loss, stage=2).difference < 1e-5

    def raising(model: nn.Module, step: int, rank: int) -> Tensor:
        raise ZeroDivisionError("the moon is full")

    with pytest.raises(RuntimeError, match="ZeroDivisionError: the moon is full"):
        assert_trains_alike(adafactor, Net, loss=raising)


class OfItsOwn(ValueError):
    """Takes other arguments than a text."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} of {other}")


def test_a_mistake_on_one_rank_alone_ends_the_others() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        if dist.get_rank() == 1:
            raise OfItsOwn(1, 2)
        return adamw(model)

    with pytest.raises(RuntimeError, match="OfItsOwn: 1 of 2"):
        assert_trains_alike(make, Net)
