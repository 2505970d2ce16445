"""Settings of a step that differ by rank: all ranks refuse it, name what differs, and may go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.ranks import run_cases, run_ranks

RANKS, ODD = 3, 1


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def settings() -> dict[str, Any]:
    """Of every kind that ranks compare, in containers of their own."""
    return {"betas": [0.9, 0.99], "weight_decay": torch.tensor(0.1), "note": {"decay": 0.5}, "lr": 0.01}


def wrap(model: nn.Module, **options: Any) -> LowLevelZeroOptimizer:
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim], **settings()} for dim in (1, 2)]
    return LowLevelZeroOptimizer(AdamW(groups), model=model, **options)


def backward(optimizer: LowLevelZeroOptimizer, model: nn.Module, rank: int, at: int = 0) -> None:
    generator = torch.Generator().manual_seed(10 * at + rank)
    x = torch.randn(2, 3, generator=generator).to(next(model.parameters()).dtype)
    optimizer.backward(model(x).square().mean())


def values(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> list[Tensor]:
    """Parameters and states, as they are now."""
    states = [state[key] for state in optimizer.state.values() for key in sorted(state)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]


Group = dict[str, Any]

# By what differs: how a group is changed, and what the message tells of the odd rank's.
CHANGES: dict[str, tuple[Callable[[Group], Any], str]] = {
    "lr": (lambda group: group.update(lr=0.5), "0.5"),
    "lr of a metric": (lambda group: group.update(lr=np.float64(0.25)), "0.25"),
    "betas in place": (lambda group: group["betas"].__setitem__(0, 0.5), "(0.5, 0.99)"),
    "betas": (lambda group: group.update(betas=(0.5, 0.99)), "(0.5, 0.99)"),
    "weight_decay": (lambda group: group.update(weight_decay=0.7), "0.7"),
    "weight_decay in place": (lambda group: group["weight_decay"].fill_(0.75), "0.75"),
    "eps": (lambda group: group.update(eps=0.125), "0.125"),
    "amsgrad": (lambda group: group.update(amsgrad=True), "True"),
    "maximize": (lambda group: group.update(maximize=True), "True"),
    "note": (lambda group: group["note"].update(decay=0.25), "{decay: 0.25}"),
    "initial_lr": (lambda group: group.update(initial_lr=0.3), "0.3"),
}


def test_all_ranks_refuse_the_step_by_name_and_go_on(subtests: pytest.Subtests) -> None:
    """Nothing is stepped; the same gradients are, once the settings are alike."""

    def live(rank: int, world_size: int, what: str) -> str:
        model = net()
        optimizer = wrap(model)
        backward(optimizer, model, rank)
        before = values(model, optimizer)
        group = optimizer.param_groups[1]
        kept = {**group, **settings()}
        if rank == ODD:
            CHANGES[what][0](group)
        with pytest.raises(ValueError, match="on every rank") as caught:
            optimizer.step()
        assert all(map(torch.equal, before, values(model, optimizer)))
        group.pop("initial_lr", None)
        group.update(kept)
        optimizer.step()
        assert not torch.equal(before[0], model[0].weight)
        return str(caught.value)

    for (what,), ran in run_cases(live, RANKS, [(what,) for what in CHANGES], one_group=True):
        with subtests.test(what):
            (message,) = set(ran.values())
            setting = what.partition(" ")[0]
            assert CHANGES[what][1] in message
            for rank in range(RANKS):
                assert f"rank {rank} has «{setting} of group 1: " in message


def test_settings_in_another_order_are_the_same() -> None:
    def live(rank: int, world_size: int) -> None:
        model = net()
        optimizer = wrap(model)
        for group in optimizer.param_groups:
            group["betas"] = (0.9, 0.5)
            if rank == ODD:
                group["weight_decay"] = group.pop("weight_decay")
        backward(optimizer, model, rank)
        optimizer.step()

    run_ranks(live, 2)


def change_scale(optimizer: LowLevelZeroOptimizer) -> None:
    assert optimizer.scaler is not None
    optimizer.scaler.scale.fill_(2.0)


def change_interval(optimizer: LowLevelZeroOptimizer) -> None:
    assert optimizer.scaler is not None
    optimizer.scaler.growth_interval = 3


SCALERS = {"scale of the loss scaler": change_scale, "growth_interval of the loss scaler": change_interval}


def test_a_loss_scale_of_one_rank_s_own_is_refused_by_name(subtests: pytest.Subtests) -> None:
    def live(rank: int, world_size: int, name: str) -> str:
        model = net(torch.float16)
        optimizer = LowLevelZeroOptimizer(AdamW(model.parameters()), model=model, initial_scale=64.0)
        backward(optimizer, model, rank)
        optimizer.step()
        if rank == ODD:
            SCALERS[name](optimizer)
        optimizer.zero_grad()
        backward(optimizer, model, rank)
        with pytest.raises(ValueError, match=f"rank 0 has «{name}") as caught:
            optimizer.step()
        return str(caught.value)

    for (name,), ran in run_cases(live, 2, [(name,) for name in SCALERS]):
        with subtests.test(name):
            first, second = ran.values()
            assert first == second
            assert f"rank {ODD} has «{name}" in first


class Counted(float):
    """A number that counts how often it is written out."""

    told = 0

    def __repr__(self) -> str:
        Counted.told += 1
        return super().__repr__()


def test_settings_that_stay_cost_no_exchange_and_are_not_described_again() -> None:
    def live(rank: int, world_size: int) -> tuple[int, list[int]]:
        model = net()
        inner = AdamW(model.parameters(), lr=Counted(0.01))
        optimizer = LowLevelZeroOptimizer(inner, model=model)
        begun = []
        for at in range(6):
            backward(optimizer, model, rank, at)
            before = optimizer.shard_group.progress.begun["agreement"]
            optimizer.step()
            begun.append(optimizer.shard_group.progress.begun["agreement"] - before)
            optimizer.zero_grad()
            if at == 1:
                Counted.told = 0
        return Counted.told, begun

    for told, begun in run_ranks(live, 2):
        assert told == 0
        assert begun[1:] == [1] * 5  # after the first step the ranks take over an order of gradients
