"""What ``Sharded`` gives to torch's distributed checkpoint, and refuses of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded
from lowlevel_zero.deepspeed import safe_get_full_optimizer_state, safe_set_full_fp32_param
from tests.support.checkpoints import BEFORE, Training, differences
from tests.support.ranks import run_ranks, run_ranks_expecting


def test_tensors_have_the_parameters_shapes_and_ranks_their_slices_without_padding() -> None:
    def look(rank: int, world_size: int) -> dict[str, tuple[Any, Any]]:
        pair = Training(dtype=torch.bfloat16).start().train(BEFORE, rank, world_size)
        return {
            f"{name}.{key}": (tuple(tensor.shape), tuple(tensor.to_local().shape))
            for name, state in Sharded(pair.optimizer).state_dict()["state"].items()
            for key, tensor in state.items()
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
            state = Sharded(optimizer).state_dict()["state"]
            tensors = {(name, key): each for name, of_name in state.items() for key, each in of_name.items()}
            found.append({at: (type(t), tuple(t.shape), t.dtype, t.device) for at, t in tensors.items()})
            assert (len(optimizer.optim.state) > 0) == (make is adagrad or len(found) == 2)
            optimizer.backward(model(torch.ones(2, 7)).square().mean())
            optimizer.step()
        return found

    for fresh, trained in run_ranks(look, 2):
        assert fresh == trained


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    def load(rank: int, world_size: int) -> list[str]:
        pair = Training().start().train(BEFORE, rank, world_size)
        model = nn.Linear(5, 4)
        other = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model)
        before = pair.whole()
        told = []
        for into, of in ((other, pair.optimizer), (pair.optimizer, other)):
            with pytest.raises(ValueError, match="param groups") as caught:
                Sharded(into).load_state_dict(Sharded(of).state_dict())
            told.append(str(caught.value))
        assert differences(before, pair.whole()) == []
        return told

    for one, two in run_ranks(load, 2):
        assert one.startswith("expected 1 param groups, got 3")
        assert two.startswith("expected 3 param groups, got 1")


def test_a_state_that_can_not_be_saved_raises_on_all_ranks() -> None:
    def give(rank: int, world_size: int) -> None:
        model = nn.Linear(5, 4)
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        if rank == 1:
            optimizer.state[optimizer.sharded_parameters[model.weight].p32]["its.own"] = torch.zeros(())
        Sharded(optimizer).state_dict()

    first, second = run_ranks_expecting(give, 2)
    assert second.message == "weight: expected states with no dot in their names, got 'its.own': rename it"
    assert "rank 1" in first.message
    assert second.message in first.message


def test_a_model_in_another_memory_order_is_refused_by_name() -> None:
    def load(rank: int, world_size: int) -> str:
        optimizers = []
        for memory_format in (torch.channels_last, torch.contiguous_format):
            model = nn.Conv2d(2, 3, 2).to(memory_format=memory_format)
            optimizers.append(LowLevelZeroOptimizer(torch.optim.Adagrad(model.parameters()), model=model))
        with pytest.raises(ValueError, match="weight") as caught:
            Sharded(optimizers[1]).load_state_dict(Sharded(optimizers[0]).state_dict())
        return str(caught.value)

    assert run_ranks(load, 1)[0].startswith("weight: expected state of shape (3, 2, 2, 2) and strides (8, 4, 2, 1)")


def test_a_refused_load_has_read_nothing_into_the_states(tmp_path: Path) -> None:
    """``dcp.load`` reads the values before the optimizer sees of which class they are."""

    def live(rank: int, world_size: int) -> None:
        def trained(make: type[torch.optim.Optimizer], times: int) -> LowLevelZeroOptimizer:
            torch.manual_seed(0)
            model = nn.Linear(5, 6)
            optimizer = LowLevelZeroOptimizer(make(model.parameters()), model=model)
            for _ in range(times):
                optimizer.backward(model(torch.ones(2, 5)).sum())
                optimizer.step()
                optimizer.zero_grad()
            return optimizer

        dcp.save({"optim": Sharded(trained(torch.optim.Adam, 2))}, checkpoint_id=tmp_path / "adam")
        other = trained(torch.optim.AdamW, 1)
        before = [value.clone() for state in other.state.values() for value in state.values()]
        with pytest.raises(Exception, match="AdamW"):
            dcp.load({"optim": Sharded(other)}, checkpoint_id=tmp_path / "adam")
        after = [value for state in other.state.values() for value in state.values()]
        assert all(map(torch.equal, before, after))

    run_ranks(live, 2)


@pytest.mark.parametrize("idle", [True, False], ids=["saved before a layer's first step", "loaded before any step"])
def test_a_master_that_was_set_leaves_room_for_states(idle: bool, tmp_path: Path) -> None:
    def made() -> tuple[nn.ModuleDict, LowLevelZeroOptimizer]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(3, 3), "idle": nn.Linear(3, 3)}).bfloat16()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, LowLevelZeroOptimizer(sgd, model=model)

    def set_masters(model: nn.Module) -> None:
        for p in model.parameters():
            safe_set_full_fp32_param(p, p.detach().float() + 1e-4)

    def train(rank: int, world_size: int) -> bool:
        model, optimizer = made()
        if idle:
            set_masters(model)
        for _ in range(2):
            x = model["used"](torch.ones(2, 3).bfloat16())
            optimizer.backward((x if idle else model["idle"](x)).float().square().sum())
            optimizer.step()
            optimizer.zero_grad()
        saved = safe_get_full_optimizer_state(model["used"].weight, "momentum_buffer")
        dcp.save({"model": model.state_dict(), "optimizer": Sharded(optimizer)}, checkpoint_id=tmp_path)
        other, fresh = made()
        if not idle:
            set_masters(other)
        dcp.load({"model": other.state_dict(), "optimizer": Sharded(fresh)}, checkpoint_id=tmp_path)
        loaded = safe_get_full_optimizer_state(other["used"].weight, "momentum_buffer")
        assert saved is not None
        assert loaded is not None
        return torch.equal(saved, loaded)

    assert run_ranks(train, 2, timeout=30) == [True, True]
