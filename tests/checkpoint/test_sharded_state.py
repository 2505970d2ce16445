"""Sharded state by hand: in one's own dcp.save and dcp.load, beside other things, at any world size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import read_metadata
from tests.support.checkpoints import AFTER, BEFORE, Pair, Training, differences
from tests.support.ranks import run_ranks


def by_hand(pair: Pair, **other: Any) -> dict[str, Any]:
    return {"model": pair.model.state_dict(), "optim": pair.optimizer.sharded_state_dict(), **other}


def resume(path: Path, pair: Pair, model_first: bool = True, by_metadata: bool = False) -> int:
    optimizer = pair.optimizer
    own = optimizer.sharded_state_dict(read_metadata(path), "optim.") if by_metadata else optimizer.sharded_state_dict()
    state = {"model": pair.model.state_dict(), "optim": own, "epoch": 0}
    dcp.load(state, checkpoint_id=path)
    loads = [
        lambda: pair.model.load_state_dict(state["model"]),
        lambda: pair.optimizer.load_sharded_state_dict(state["optim"]),
    ]
    for load in loads if model_first else reversed(loads):
        load()
    return int(state["epoch"])


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [(3, 3, torch.bfloat16), (4, 3, torch.float32), (3, 1, torch.bfloat16), (1, 2, torch.float32)],
)
def test_it_travels_in_ones_own_checkpoint(before: int, after: int, dtype: torch.dtype, tmp_path: Path) -> None:
    training = Training(dtype=dtype)

    def save(rank: int, world_size: int) -> tuple[Any, Any]:
        pair = training.start().train(BEFORE, rank, world_size)
        dcp.save(by_hand(pair, epoch=4), checkpoint_id=tmp_path / "a")
        return pair.whole(), pair.train(AFTER, rank, world_size).whole()

    at_save, later = run_ranks(save, before)[0]

    def load(rank: int, world_size: int) -> tuple[int, list[str]]:
        pair = training.start(seed=3)
        epoch = resume(tmp_path / "a", pair)
        wrong = differences(at_save, pair.whole())
        other = training.start(seed=4)
        resume(tmp_path / "a", other, model_first=False, by_metadata=True)
        pair.train(AFTER, rank, world_size)
        other.train(AFTER, rank, world_size)
        wrong += differences(pair.whole(), other.whole())
        return epoch, wrong + (differences(later, pair.whole()) if before == after else [])

    assert run_ranks(load, after) == [(4, [])] * after


def test_tensors_have_the_parameters_shapes_and_ranks_their_slices_without_padding() -> None:
    def look(rank: int, world_size: int) -> dict[str, tuple[Any, Any]]:
        pair = Training(dtype=torch.bfloat16).start().train(BEFORE, rank, world_size)
        state = pair.optimizer.sharded_state_dict()
        assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
        return {
            name: (tuple(tensor.shape), tuple(tensor.to_local().shape))
            for name, tensor in state.items()
            if hasattr(tensor, "to_local")
        }

    ranks = run_ranks(look, 3)
    assert [rank["layers.0.bias.exp_avg"] for rank in ranks] == [((5,), (2,)), ((5,), (2,)), ((5,), (1,))]
    assert [rank["one.master_param"] for rank in ranks] == [((1,), (1,)), ((1,), (0,)), ((1,), (0,))]
    assert [rank["layers.2.bias.exp_avg"][1] for rank in ranks] == [(2,), (2,), (1,)]  # dropped: room for state
    assert ranks[0]["layers.0.weight.exp_avg"] == ((5, 5), (9,))
    assert all(local[0] <= -(-math.prod(whole) // 3) for rank in ranks for whole, local in rank.values())


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def nadam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam([{"params": [p]} for p in parameters], momentum_decay=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": others}], lr=0.1)


def averaged(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD(parameters, lr=0.1)


@pytest.mark.parametrize("make", [adagrad, nadam, sgd, averaged])
def test_a_fresh_optimizer_has_room_for_all_that_a_trained_one_has(make: Any) -> None:
    def look(rank: int, world_size: int) -> list[Any]:
        model = nn.Linear(7, 1)
        optimizer = LowLevelZeroOptimizer(make(model.parameters()), model=model)
        found = []
        for _ in range(2):
            state = optimizer.sharded_state_dict()
            found.append({name: (type(t), tuple(t.shape), t.dtype, t.device) for name, t in state.items()})
            assert (len(optimizer.optim.state) > 0) == (make is adagrad or len(found) == 2)
            optimizer.backward(model(torch.ones(2, 7)).square().mean())
            optimizer.step()
        return found

    for fresh, trained in run_ranks(look, 2):
        assert fresh == trained


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    def load(rank: int, world_size: int) -> list[str]:
        pair = Training().start().train(BEFORE, rank, world_size)
        state = pair.optimizer.sharded_state_dict()
        model = nn.Linear(5, 4)
        other = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model)
        before = pair.whole()
        told = []
        for attempt in (
            lambda: other.load_sharded_state_dict(state),
            lambda: pair.optimizer.load_sharded_state_dict(other.sharded_state_dict()),
            lambda: pair.optimizer.load_sharded_state_dict({}),
            lambda: pair.optimizer.sharded_state_dict(dcp.metadata.Metadata({}), "optim."),
            lambda: pair.optimizer.load_sharded_state_dict({**state, "settings": torch.zeros(9, dtype=torch.uint8)}),
        ):
            with pytest.raises(ValueError, match=".") as caught:
                attempt()
            told.append(str(caught.value))
        assert differences(before, pair.whole()) == []
        return told

    for one, two, three, four, five in run_ranks(load, 2):
        assert one.startswith("expected 1 param groups, got 3")
        assert two.startswith("expected 3 param groups, got 1")
        assert "got one without 'settings'" in three
        assert "expected optim.settings" in four
        assert "'settings' isn't what" in five


def test_a_model_in_another_memory_order_is_refused_by_name() -> None:
    def load(rank: int, world_size: int) -> str:
        optimizers = []
        for memory_format in (torch.channels_last, torch.contiguous_format):
            model = nn.Conv2d(2, 3, 2).to(memory_format=memory_format)
            optimizers.append(LowLevelZeroOptimizer(torch.optim.Adagrad(model.parameters()), model=model))
        with pytest.raises(ValueError, match="weight") as caught:
            optimizers[1].load_sharded_state_dict(optimizers[0].sharded_state_dict())
        return str(caught.value)

    assert run_ranks(load, 1)[0].startswith("weight: expected state of shape (3, 2, 2, 2) and strides (8, 4, 2, 1)")
