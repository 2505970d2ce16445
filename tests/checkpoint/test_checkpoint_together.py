"""Loading is all or nothing on all ranks, also where code of the caller's takes part; what isn't taken is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor  # here once, not in every forked rank
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, save_checkpoint
from tests.support.checkpoints import differences, logged
from tests.support.ranks import run_ranks


class Counter(nn.Module):
    """Extra state that changes in place, and may refuse to.

    Attributes:
        refuses: what it raises, half way, for a state of another run; None: nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"seen": [0], "table": torch.zeros(3)}
        self.refuses: Exception | None = None

    def get_extra_state(self) -> dict[str, Any]:
        return self.state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.state["seen"][:] = state["seen"]
        if self.refuses is not None and state["seen"] != [7]:
            raise self.refuses
        self.state["table"].copy_(state["table"])


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.one, self.two, self.last = Counter(), nn.Linear(5, 7), nn.BatchNorm1d(7), Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(x)).square().mean() + self.two.bias.sum()
        return out


class Run:
    """A model with all that is loaded with it.

    Attributes:
        rank_state: a dict that loading fills.
    """

    def __init__(self, seed: int, seen: int, steps: int) -> None:
        self.model = Net(seed)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = LowLevelZeroOptimizer(inner, model=self.model, partition_grad=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.rank_state: dict[str, Any] = {"left": "over"}
        for counter in (self.model.first, self.model.last):
            counter.state.update(seen=[seen], table=torch.full((3,), float(seen)))
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.optimizer.backward(self.model(torch.randn(4, 5)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def load(self, path: Path) -> Any:
        return load_checkpoint(path, self.model, self.optimizer, scheduler=self.scheduler, rank_state=self.rank_state)

    def held(self) -> Any:
        tensors = {name: value for name, value in self.model.state_dict().items() if isinstance(value, torch.Tensor)}
        extra = [self.model.first.state, self.model.last.state]
        own = {**self.scheduler.state_dict()}
        return copy.deepcopy((tensors, extra, own, self.optimizer.state_dict(), self.rank_state))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "a"

    def save(rank: int, world_size: int) -> None:
        run = Run(0, seen=3, steps=2)
        save_checkpoint(path, run.model, run.optimizer, scheduler=run.scheduler, rank_state={"rank": rank})

    run_ranks(save, 2)
    return path


@pytest.mark.parametrize(("unlucky", "where"), [(0, "first"), (1, "last"), (0, "optimizer"), (1, "scheduler")])
def test_what_one_rank_refuses_leaves_every_rank_as_it_was(unlucky: int, where: str, saved: Path) -> None:
    def load(rank: int, world_size: int) -> tuple[str, list[str]]:
        run = Run(5, seen=7, steps=3)
        run.optimizer.backward(run.model(torch.randn(4, 5)))
        before, gradients = run.held(), [p.grad for p in run.model.parameters()]
        error = LookupError(f"{where} says no")

        def refuse(*_: Any) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            if where == "optimizer" and rank == unlucky:
                run.optimizer.optim.register_load_state_dict_post_hook(refuse)
            elif where == "scheduler" and rank == unlucky:
                patch.setattr(torch.optim.lr_scheduler.StepLR, "load_state_dict", refuse)
            elif rank == unlucky:
                getattr(run.model, where).refuses = error
            with pytest.raises((LookupError, RuntimeError)) as caught:
                run.load(saved)
        assert all(p.grad is each for p, each in zip(run.model.parameters(), gradients, strict=True))
        wrong = differences(before, run.held())
        run.optimizer.step()
        return str(caught.value), wrong

    told = run_ranks(load, 2)
    assert [wrong for _, wrong in told] == [[], []]
    assert told[unlucky][0] == f"{where} says no"
    assert told[1 - unlucky][0].startswith(f"rank {unlucky} could not load the checkpoint {saved}: LookupError: ")


def test_a_module_that_refuses_its_former_state_too_keeps_nothing_else_from_coming_back(saved: Path) -> None:
    def load(rank: int, world_size: int) -> list[str]:
        run, again = Run(5, seen=6, steps=3), Run(5, seen=6, steps=3)
        if rank == 1:
            run.model.last.refuses = LookupError("never")
        with pytest.raises((LookupError, RuntimeError), match="never"):
            run.load(saved)
        return differences(again.held(), run.held())

    assert run_ranks(load, 2) == [[], []]


def test_loading_into_what_has_trained_brings_all(saved: Path) -> None:
    def load(rank: int, world_size: int) -> list[str]:
        expected, run = Run(0, seen=3, steps=2), Run(5, seen=7, steps=3)
        run.load(saved)
        assert run.rank_state == {"rank": rank}
        run.rank_state = expected.rank_state
        return differences(expected.held(), run.held())

    assert run_ranks(load, 2) == [[], []]


# What isn't taken


def frozen_later(seed: int, frozen: tuple[str, ...] = (), steps: int = 1) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    """All parameters are in the optimizer's group, some of them frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model=model)
    for _ in range(steps):
        optimizer.backward(model(torch.ones(2, 5)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def by_checkpoint(path: Path, save: bool, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    save_checkpoint(path, model, optimizer) if save else load_checkpoint(path, model, optimizer)


def by_sharded(path: Path, save: bool, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    state = {"model": model.state_dict(), "optim": Sharded(optimizer)}
    dcp.save(state, checkpoint_id=path) if save else dcp.load(state, checkpoint_id=path)


def by_state_dict(path: Path, save: bool, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
    if save:
        state = optimizer.state_dict()
        torch.save(state, path) if torch.distributed.get_rank() == 0 else None
        torch.distributed.barrier()
    else:
        optimizer.load_state_dict(torch.load(path, weights_only=True))


WAYS = {"checkpoint": by_checkpoint, "Sharded": by_sharded, "state dict": by_state_dict}


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_was_trained_and_is_frozen_by_now_is_named(way: str, tmp_path: Path) -> None:
    act = WAYS[way]

    def run(rank: int, world_size: int) -> tuple[list[str], list[str]]:
        saved = frozen_later(0)
        act(tmp_path / "a", True, *saved)
        other, same = frozen_later(1, ("0.bias", "1.weight")), frozen_later(1)
        with logged() as lines:
            act(tmp_path / "a", False, *other)
        with logged() as of_same:
            act(tmp_path / "a", False, *same)
        states, expected = other[1].state_dict()["state"], saved[1].state_dict()["state"]
        assert differences({place: expected[place] for place in (0, 3)}, states) == []
        return lines, of_same

    (lines, nothing), (elsewhere, also) = run_ranks(run, 2)
    assert len(lines) == 1
    assert lines[0].startswith("WARNING: 0.bias: trained when it was saved, and by no optimizer here")
    assert "that of 1 more" in lines[0]
    assert nothing == elsewhere == also == []


@pytest.mark.parametrize("way", ["checkpoint", "state dict"])
def test_a_parameter_that_was_frozen_and_is_trained_by_now_starts_afresh(way: str, tmp_path: Path) -> None:
    act = WAYS[way]

    def run(rank: int, world_size: int) -> list[str]:
        act(tmp_path / "a", True, *frozen_later(0, ("0.bias",)))
        other = frozen_later(1, steps=0)
        with logged() as lines:
            act(tmp_path / "a", False, *other)
        assert sorted(other[1].state_dict()["state"]) == [0, 2, 3]
        return lines

    assert run_ranks(run, 2) == [[], []]


@pytest.mark.parametrize("way", ["checkpoint", "Sharded"])
def test_a_replaced_layer_is_refused_by_name(way: str, tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> str:
        model, optimizer = frozen_later(0)
        if rank == 1:
            model[1] = nn.Linear(7, 3)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            WAYS[way](tmp_path / "a", True, model, optimizer)
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert "rank 1" in first
    assert "1.weight" in second
    assert "construct another one" in second


def test_a_layer_that_nobody_was_given_is_named_when_it_is_loaded_too(tmp_path: Path) -> None:
    """Its state is lost where an optimizer trained it."""

    def made(trained: int) -> tuple[nn.Module, list[LowLevelZeroOptimizer]]:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        optimizers = [
            LowLevelZeroOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), model=model) for layer in model
        ]
        return model, optimizers[:trained]

    def run(rank: int, world_size: int) -> list[str]:
        save_checkpoint(tmp_path / "a", *made(2))
        with pytest.raises(ValueError, match="a list of 2 optimizers, with which the checkpoint was saved"):
            load_checkpoint(tmp_path / "a", *made(1))
        one = made(1)
        with logged() as lines:
            save_checkpoint(tmp_path / "b", *one)
        return lines

    first, second = run_ranks(run, 2)
    assert "no optimizer that was given trains 1.weight, ... (2 parameters that require gradients)" in first[0]
    assert second == []
