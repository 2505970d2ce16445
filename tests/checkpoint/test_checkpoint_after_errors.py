"""What errors have left isn't saved over what is whole, and a load that can't be made changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # here once, not in every forked rank
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, folders, latest, load_checkpoint, save_checkpoint
from tests.support.checkpoints import wait_for_pruning
from tests.support.ranks import run_ranks

ODD = 1


class Failing(torch.optim.AdamW):
    """Fails in a step if it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise MemoryError("no memory")
        return super().step(closure)


class Training:
    """A model and its optimizer, after one step."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        self.optimizer = LowLevelZeroOptimizer(Failing(self.model.parameters(), lr=0.1), model=self.model)
        self.train()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        self.optimizer.backward(self.model(torch.ones(2, 6)).square().mean())

    def save(self, path: Path, **options: Any) -> None:
        save_checkpoint(path, self.model, self.optimizer, **options)

    def load(self, path: Path) -> None:
        load_checkpoint(path, self.model, self.optimizer)

    def values(self) -> list[Tensor]:
        states = (each for state in self.optimizer.state.values() for each in state.values())
        return [each.detach().clone() for each in (*self.model.parameters(), *states)]


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_parameters_that_a_failed_step_has_left_are_not_saved(tmp_path: Path) -> None:
    """The last whole checkpoint stays, and training goes on from it."""

    def live(rank: int, world_size: int) -> list[str]:
        training = Training()
        training.save(tmp_path / "step-1")
        training.backward()
        training.optimizer.optim.fails = rank == ODD
        told(training.optimizer.step)
        training.optimizer.optim.fails = False
        while told(training.optimizer.zero_grad):
            pass
        refused = [
            told(lambda: training.save(tmp_path / "step-2", keep=1)),
            told(Sharded(training.optimizer).state_dict),
        ]
        wait_for_pruning()
        assert latest(tmp_path) == tmp_path / "step-1"
        training.load(tmp_path)
        training.train()
        training.save(tmp_path / "step-2", keep=1)
        wait_for_pruning()
        assert latest(tmp_path) == tmp_path / "step-2"
        return refused

    for refused in run_ranks(live, 2):
        assert all("MemoryError: no memory" in each and "load a checkpoint on every rank" in each for each in refused)


def _from_checkpoint(training: Training, folder: Path, _: dict[str, Any]) -> None:
    training.load(folder / "step-1")


def _from_sharded(training: Training, _: Path, state: dict[str, Any]) -> None:
    Sharded(training.optimizer).load_state_dict(state)


@pytest.mark.parametrize("load", [_from_checkpoint, _from_sharded])
def test_a_load_where_none_can_be_made_changes_nothing(
    load: Callable[[Training, Path, dict[str, Any]], None], tmp_path: Path
) -> None:
    """On one rank alone in inference mode, and on all within a backward pass."""

    def live(rank: int, world_size: int) -> list[str]:
        source, training = Training(), Training(seed=1)
        source.save(tmp_path / "step-1")
        state = Sharded(source.optimizer).state_dict()
        before = training.values()
        mode: AbstractContextManager[Any] = torch.inference_mode() if rank == ODD else nullcontext()
        with mode:
            refused = [told(lambda: load(training, tmp_path, state))]
        with training.optimizer.backward_pass(training.model(torch.ones(2, 6)).sum()) as loss:
            refused.append(told(lambda: load(training, tmp_path, state)))
            loss.backward()
        training.optimizer.zero_grad()
        assert all(map(torch.equal, training.values(), before))
        load(training, tmp_path, state)
        training.train()
        return refused

    for in_inference, in_backward in run_ranks(live, 2):
        assert "torch.inference_mode" in in_inference
        assert "optimizer.backward_pass" in in_backward


def test_a_path_that_one_rank_has_not_is_refused_on_all(tmp_path: Path) -> None:
    def live(rank: int, world_size: int) -> list[str]:
        training = Training()
        path: Any = None if rank == ODD else tmp_path / "step-1"
        return [told(lambda: training.save(path)), told(lambda: training.load(path))]

    for refused in run_ranks(live, 2):
        assert all("TypeError" in each for each in refused)


def test_two_values_of_one_name_are_refused(tmp_path: Path) -> None:
    """Of the model's extra states, say, which torch's tools find by name."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a.b": 1, "a": {"b": 2}}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError("nothing is loaded")

    def live(rank: int, world_size: int) -> str:
        model = Extra(3, 2)
        optimizer = LowLevelZeroOptimizer(Failing(model.parameters()), model=model)
        return told(lambda: save_checkpoint(tmp_path / "step-1", model, optimizer))

    for refused in run_ranks(live, 2):
        assert "a.b: expected one value of this name, got two" in refused
    assert not any(tmp_path.iterdir())


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    def live(rank: int, world_size: int) -> None:
        training = Training()
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
        training.save(path)
        training.load(path)

    run_ranks(live, 2)


def test_a_directory_that_nobody_may_look_into_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lost+found is on a disk of one's own."""
    (tmp_path / "lost+found").mkdir()
    stat = os.stat

    def refusing(place: Any, *args: Any, **options: Any) -> os.stat_result:
        if "lost+found/" in str(place):
            raise PermissionError(13, "Permission denied", str(place))
        return stat(place, *args, **options)

    def live(rank: int, world_size: int) -> None:
        monkeypatch.setattr(folders.os, "stat", refusing)
        training = Training()
        for step in (1, 2):
            training.save(tmp_path / f"step-{step}", keep=1)
            wait_for_pruning()
        assert sorted(os.listdir(tmp_path)) == ["lost+found", "step-2"]
        training.load(tmp_path)

    run_ranks(live, 1)
