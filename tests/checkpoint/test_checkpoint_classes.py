"""What an optimizer of another class has saved is refused on all ranks, and changes nothing; another setting is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor  # here once, not in every forked rank
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, save_checkpoint
from tests.support.checkpoints import differences
from tests.support.ranks import run_ranks

Make = Callable[[Any], torch.optim.Optimizer]

MAKES: dict[str, Make] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "plain SGD": lambda ps: torch.optim.SGD(ps, lr=0.01),
}


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(torch.tanh(self.one(x))).square().mean()
        return out


def start(make: Make, seed: int = 0, steps: int = 0) -> tuple[Net, LowLevelZeroOptimizer]:
    model = Net(seed)
    optimizer = LowLevelZeroOptimizer(make(model.parameters()), model=model, partition_grad=True)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.backward(model(torch.ones(2, 5)))
    optimizer.step()
    optimizer.zero_grad()


def held(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> Any:
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))


def by_checkpoint(path: Path, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    load_checkpoint(path / "own", model, optimizer)


def by_sharded(path: Path, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    try:
        dcp.load({"optim": Sharded(optimizer)}, checkpoint_id=path / "dcp")
    except CheckpointException as error:  # torch misses a state by its name
        raise ValueError(str(error)) from error


def by_state_dict(path: Path, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.load_state_dict(torch.load(path / "whole.pt", weights_only=True))


def by_plain_state_dict(path: Path, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    optimizer.load_state_dict(torch.load(path / "plain.pt", weights_only=True))


WAYS = {"checkpoint": by_checkpoint, "Sharded": by_sharded, "whole": by_state_dict, "plain": by_plain_state_dict}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By class what each way loads, after two steps."""
    folder = tmp_path_factory.mktemp("saved")

    def save(rank: int, world_size: int) -> None:
        for name, make in MAKES.items():
            model, optimizer = start(make, steps=2)
            save_checkpoint(folder / name / "own", model, optimizer)
            dcp.save({"optim": Sharded(optimizer)}, checkpoint_id=folder / name / "dcp")
            state = optimizer.state_dict()
            if rank == 0:
                torch.save(state, folder / name / "whole.pt")
                torch.save({key: state[key] for key in ("state", "param_groups")}, folder / name / "plain.pt")

    run_ranks(save, 2)
    return folder


def fails_in_plain_torch(path: Path, make: Make) -> bool:
    """Whether loading or the next step raises: a state dict that has no class's name shows nothing else."""
    parameters = list(Net(0).parameters())
    optimizer = make(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    try:
        optimizer.load_state_dict(torch.load(path, weights_only=True))
        optimizer.step()
    except KeyError:
        return True
    return False


@pytest.mark.parametrize(("way", "steps"), [*((way, 2) for way in WAYS), ("Sharded", 0)])
def test_another_class_is_refused_and_changes_nothing(steps: int, way: str, saved: Path) -> None:
    def told(of: str, into: str) -> bool:
        if of.split()[-1] == into.split()[-1]:
            return False
        return way != "plain" or fails_in_plain_torch(saved / of / "plain.pt", MAKES[into])

    def load(rank: int, world_size: int) -> list[str]:
        wrong = []
        for into, make in MAKES.items():
            model, optimizer = start(make, seed=3, steps=steps)
            before = held(model, optimizer)
            for of in (name for name in MAKES if told(name, into)):
                try:
                    WAYS[way](saved / of, model, optimizer)
                except ValueError as error:
                    wrong += [f"{of} into {into}: {line}" for line in differences(before, held(model, optimizer))]
                    if "of this class of optimizer" not in str(error) and "Missing key" not in str(error):
                        wrong.append(str(error))
                else:
                    wrong.append(f"{of} into {into}: taken")
            step(model, optimizer)  # it goes on
        return wrong

    assert run_ranks(load, 2) == [[], []]


@pytest.mark.parametrize("way", WAYS)
def test_another_setting_is_taken_over(way: str, saved: Path) -> None:
    others: dict[str, Make] = {
        "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.5, betas=(0.1, 0.2), weight_decay=0.0, eps=0.1),
        "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.5, alpha=0.5),
        "SGD": lambda ps: torch.optim.SGD(ps, lr=0.5, momentum=0.1, nesterov=True),
        "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.5, lr_decay=0.1, initial_accumulator_value=3.0),
    }

    def load(rank: int, world_size: int) -> list[str]:
        wrong = []
        for name, make in others.items():
            same, optimizers = Net(0), []
            for each in (MAKES[name], make):
                model, optimizer = start(each, seed=3)
                WAYS[way](saved / name, model, optimizer)
                model.load_state_dict(same.state_dict())
                step(model, optimizer)
                optimizers.append(held(model, optimizer))
            wrong += differences(*optimizers, at=name)
        return wrong

    assert run_ranks(load, 2) == [[], []]


def test_one_of_several_optimizers_is_named(saved: Path, tmp_path: Path) -> None:
    """As of a pair of adversaries; and a second one's file is another class's."""

    def made(one: str, two: str) -> tuple[nn.Module, dict[str, LowLevelZeroOptimizer]]:
        model = nn.ModuleDict({"generator": Net(0), "critic": Net(1)})
        makes = {"generator": MAKES[one], "critic": MAKES[two]}
        return model, {
            name: LowLevelZeroOptimizer(make(model[name].parameters()), model=model) for name, make in makes.items()
        }

    def run(rank: int, world_size: int) -> str:
        save_checkpoint(tmp_path / "a", *made("AdamW", "SGD"))
        model, optimizers = made("AdamW", "RMSprop")
        before = [held(model, each) for each in optimizers.values()]
        with pytest.raises(ValueError, match="this class of optimizer, RMSprop, got that of SGD") as caught:
            load_checkpoint(tmp_path / "a", model, optimizers)
        assert differences(before, [held(model, each) for each in optimizers.values()]) == []
        return str(caught.value)

    assert all(told.startswith("optimizer['critic']: ") for told in run_ranks(run, 2))


def test_a_mistake_of_one_rank_is_told_on_all(saved: Path) -> None:
    """It alone loads another class's file."""

    def load(rank: int, world_size: int) -> tuple[str, list[str]]:
        model, optimizer = start(MAKES["AdamW"], seed=3, steps=1)
        before = held(model, optimizer)
        state = torch.load(saved / ("SGD" if rank == 1 else "AdamW") / "whole.pt", weights_only=True)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            optimizer.load_state_dict(state)
        return str(caught.value), differences(before, held(model, optimizer))

    assert [changed for _, changed in run_ranks(load, 2)] == [[], []]


def test_a_hook_that_refuses_what_is_loaded_on_one_rank_changes_nothing(saved: Path) -> None:
    def load(rank: int, world_size: int) -> list[str]:
        model, optimizer = start(MAKES["AdamW"], seed=3, steps=1)
        before, wrong = held(model, optimizer), []

        def refuse(_: Any, state: Any) -> None:
            raise LookupError("not this one")

        if rank == 1:
            optimizer.optim.register_load_state_dict_pre_hook(refuse)
        for way in WAYS:
            with pytest.raises((LookupError, RuntimeError), match="not this one"):
                WAYS[way](saved / "AdamW", model, optimizer)
            wrong += differences(before, held(model, optimizer), at=way)
        step(model, optimizer)
        return wrong

    assert run_ranks(load, 2) == [[], []]
