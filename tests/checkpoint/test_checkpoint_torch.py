"""Checkpoints and torch's own tools: what is saved here they load with no code of ours, and the other way round."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, save_checkpoint
from lowlevel_zero.deepspeed import safe_get_full_optimizer_state, safe_set_full_fp32_param
from tests.support.checkpoints import AFTER, BEFORE, Training, check_same
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks
from tests.support.saving import Make, Pair, adamw, linear, load_by, momentum, refused, save_by, squares, train, wrapped

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.5, whose FSDP2 asks for a GPU
    fully_shard = None


class Net(nn.Module):
    """Matrices that no number of ranks here divides, a kernel, a transposed weight, tied ones, a buffer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.conv = nn.Conv2d(1, 3, (2, 3)).to(memory_format=torch.channels_last)
        self.across = nn.Parameter(torch.randn(7, 5).t())
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 11)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(x)) @ self.across
        features = self.conv(hidden.view(-1, 1, 2, 7)[:, :, :, :3]).mean()
        return self.out(hidden @ self.across.t() * features).square().mean()  # type: ignore[no-any-return]


def batch(step: int) -> Tensor:
    """The same on every rank: the average is each one's own."""
    torch.manual_seed(100 + step)
    return torch.randint(0, 11, (8,))


def ours(seed: int) -> Pair:
    return wrapped(Net(seed), adamw, partition_grad=True)


def step(model: nn.Module, optimizer: Any, at: int) -> None:
    loss = model(batch(at))
    if isinstance(optimizer, LowLevelZeroOptimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies of the model's and the optimizer's tensors, by the names of parameters."""
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()["state"]
    return copy.deepcopy(dict(model.state_dict())), {names[place]: values for place, values in state.items()}


def saved(rank: int, world_size: int, path: Path) -> Any:
    model, optimizer = ours(0)
    for at in range(3):
        step(model, optimizer, at)
    save_checkpoint(path, model, optimizer)
    return whole(model, optimizer)


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to .* in a single process.*:UserWarning")
def test_torch_s_converter_and_loader_have_all_in_its_shape(tmp_path: Path) -> None:
    model, state = run_ranks(saved, 3, tmp_path / "a")[0]
    dcp_to_torch_save(tmp_path / "a", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    plain = Net(5)
    dcp.load({"model": plain.state_dict()}, checkpoint_id=tmp_path / "a")
    check_same([model, model, state], [found["model"], dict(plain.state_dict()), found["optim"]["state"]])
    assert set(found["optim"]["param_groups"][0]["params"]) == set(dict(plain.named_parameters()))


def ddp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(Net(seed))
    return model, adamw(model.parameters())


def fsdp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(seed)
    model.conv.to(memory_format=torch.contiguous_format)
    model.across = nn.Parameter(model.across.detach().contiguous())
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, adamw(model.parameters())


def gathered(value: Any) -> Any:
    """Whole tensors of a nest of dicts."""
    if isinstance(value, dict):
        return {key: gathered(each) for key, each in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize(("make", "world_size"), [(ddp, 2), (fsdp, 3)][: 1 if fully_shard is None else 2])
def test_models_and_optimizers_go_to_other_runs_and_come_from_them(make: Any, world_size: int, tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> Any:
        at_save = saved(rank, world_size, tmp_path / "ours")
        model, optimizer = make(0)
        for at in range(3):
            step(model, optimizer, at)
        own, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": of_optimizer}, checkpoint_id=tmp_path / "theirs")
        flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        dcp.save({"model": own, "optim": flat}, checkpoint_id=tmp_path / "flat")
        theirs_at_save = copy.deepcopy((gathered(own), gathered(of_optimizer["state"])))
        step(model, optimizer, 3)
        return at_save, theirs_at_save, gathered(get_state_dict(model, optimizer)[0])

    ours_at_save, theirs_at_save, later = run_ranks(save, 5 - world_size)[0]

    def load(rank: int, world_size: int) -> None:
        other, optimizer = make(7)
        own, of_optimizer = get_state_dict(other, optimizer)
        dcp.load({"model": own, "optim": of_optimizer}, checkpoint_id=tmp_path / "ours")
        set_state_dict(other, optimizer, model_state_dict=own, optim_state_dict=of_optimizer)
        own, of_optimizer = get_state_dict(other, optimizer)
        check_same(ours_at_save, (gathered(own), gathered(of_optimizer["state"])), at="ours")
        for path, partly in (("theirs", False), ("flat", True)):  # without param groups that are any others'
            other, optimizer = ours(7)
            both = {"model": other.state_dict(), "optim": Sharded(optimizer)}
            planner = default_planner.DefaultLoadPlanner(allow_partial_load=partly)
            dcp.load(both, checkpoint_id=tmp_path / path, planner=planner)
            check_same(theirs_at_save, whole(other, optimizer), at=path)
            step(other, optimizer, 3)
            check_same(later, dict(other.state_dict()), tolerance=1e-6, at=f"{path}: later")

    run_ranks(load, world_size)


# In a loop of one's own


@on_ranks(3)
def test_what_torch_writes_in_the_background_is_the_optimizer_at_the_call(rank: int, tmp_path: Path) -> None:
    """Beside other values of one's own."""
    pair, again = Training(dtype=torch.bfloat16).start(), Training(dtype=torch.bfloat16).start(seed=3)
    pair.train(BEFORE, rank, 3)
    states: list[dict[str, Any]] = [
        {"model": each.model.state_dict(), "optim": Sharded(each.optimizer), "epoch": epoch}
        for each, epoch in ((pair, 4), (again, 0))
    ]
    at_save = pair.whole()
    writing = dcp.async_save(states[0], checkpoint_id=tmp_path / "a")
    if fully_shard is None:  # torch 2.5 doesn't copy what is on the host, the model's tensors either
        writing.result()
    pair.train(AFTER, rank, 3)
    writing.result()
    dcp.load(states[1], checkpoint_id=tmp_path / "a")
    check_same([at_save, 4], [again.whole(), states[1]["epoch"]])
    check_same(pair.whole(), again.train(AFTER, rank, 3).whole())


class Secretive(torch.optim.Adam):
    """No other one can be made to find out what state it will have."""

    def __init__(self, parameters: Any, run: str) -> None:
        super().__init__(parameters, lr=0.01)


@on_ranks(2)
def test_state_that_a_fresh_optimizer_did_not_ask_for_is_missed(rank: int, tmp_path: Path) -> None:
    optimizer, fresh, other = (
        linear(make=lambda parameters: Secretive(parameters, "a"), steps=steps, split="elements")[1]
        for steps in (2, 0, 1)
    )
    dcp.save({"optim": Sharded(optimizer)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(ValueError, match="load its step into.*load_checkpoint"):
        dcp.load({"optim": Sharded(fresh)}, checkpoint_id=tmp_path / "a")
    dcp.load({"optim": Sharded(other)}, checkpoint_id=tmp_path / "a")
    check_same(optimizer.state_dict(), other.state_dict())


@on_ranks(2)
def test_torch_s_own_state_dicts_of_an_optimizer_name_what_to_use(rank: int) -> None:
    model, optimizer = ours(0)
    step(model, optimizer, 0)
    before = whole(model, optimizer)
    for call in (
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: get_state_dict(model, optimizer),
        lambda: set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}),
    ):
        with pytest.raises(TypeError, match=r"Sharded\(optimizer\)"):
            call()
    settings = [optimizer.param_groups[0]["lr"], *(p.grad for p in optimizer.param_groups[0]["params"])]
    check_same([before, [0.01] + [None] * 7], [whole(model, optimizer), settings])


# What ``Sharded`` gives, and refuses


@on_ranks(3)
def test_tensors_have_the_parameters_shapes_and_ranks_their_slices_without_padding(rank: int) -> None:
    pair = Training(dtype=torch.bfloat16).start().train(BEFORE, rank, 3)
    shapes = {
        f"{name}.{key}": (tuple(tensor.shape), tuple(tensor.to_local().shape))
        for name, state in Sharded(pair.optimizer).state_dict()["state"].items()
        for key, tensor in state.items()
        if hasattr(tensor, "to_local")
    }
    assert shapes["layers.0.bias.exp_avg"] == ((5,), ((2,), (2,), (1,))[rank])
    assert shapes["layers.2.bias.exp_avg"] == ((5,), ((2,), (2,), (1,))[rank])  # dropped: room for state
    assert shapes["one.master_param"] == ((1,), ((1,), (0,), (0,))[rank])
    assert rank > 0 or shapes["layers.0.weight.exp_avg"] == ((5, 5), (9,))
    assert all(local[0] <= -(-math.prod(whole) // 3) for whole, local in shapes.values())


def nadam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam([{"params": [p]} for p in parameters], momentum_decay=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": others}], lr=0.1)


@on_ranks(2, (torch.optim.Adagrad, nadam, sgd, torch.optim.ASGD))
def test_a_fresh_optimizer_has_room_for_all_that_a_trained_one_has(rank: int, make: Make) -> None:
    pair, found = linear(make=make), []
    for _ in range(2):
        state = Sharded(pair[1]).state_dict()["state"]
        tensors = {(name, key): each for name, of_name in state.items() for key, each in of_name.items()}
        found.append({at: (type(t), tuple(t.shape), t.dtype, t.device) for at, t in tensors.items()})
        assert (len(pair[1].optim.state) > 0) == (make is torch.optim.Adagrad or len(found) == 2)
        train(*pair)
    assert found[0] == found[1]


@on_ranks(2)
def test_what_does_not_fit_is_refused_and_changes_nothing(rank: int) -> None:
    """Of other groups, and of another memory order."""
    pair, (_, other) = Training().start().train(BEFORE, rank, 2), linear(make=adamw)
    last, first = (
        wrapped(nn.Conv2d(2, 3, 2).to(memory_format=order), torch.optim.Adagrad)[1]
        for order in (torch.channels_last, torch.contiguous_format)
    )
    before = pair.whole()
    for of, to, told in (
        (pair.optimizer, other, "expected 1 param groups, got 3: build the optimizer with the groups"),
        (other, pair.optimizer, "expected 3 param groups, got 1"),
        (last, first, "weight: expected state of shape (3, 2, 2, 2) and strides (8, 4, 2, 1)"),
    ):
        line = refused(lambda: Sharded(to).load_state_dict(Sharded(of).state_dict()))  # noqa: B023
        assert line.startswith(f"ValueError: {told}"), line
    check_same(before, pair.whole())


@on_ranks(2)
def test_a_state_that_can_not_be_saved_raises_on_all_ranks(rank: int) -> None:
    model, optimizer = linear()
    if rank == 1:
        optimizer.state[optimizer.sharded_parameters[model.weight].p32]["its.own"] = torch.zeros(())
    told = refused(Sharded(optimizer).state_dict)
    assert "weight: expected states with no dot in their names, got 'its.own': rename it" in told
    assert told.startswith("ValueError: weight") if rank == 1 else "rank 1" in told


@on_ranks(2, (True, False))
def test_a_master_that_was_set_leaves_room_for_states(rank: int, idle: bool, tmp_path: Path) -> None:
    """Saved before a layer's first step, or loaded before any."""

    def made(seed: int, sets: bool) -> Pair:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"used": nn.Linear(3, 3), "idle": nn.Linear(3, 3)}).bfloat16()
        pair = wrapped(model, momentum)
        for p in model.parameters() if sets else ():
            safe_set_full_fp32_param(p, p.detach().float() + 1e-4)
        return pair

    (model, optimizer), (other, fresh) = made(0, idle), made(0, not idle)
    for _ in range(2):
        optimizer.backward(squares(model["used"] if idle else model))
        optimizer.step()
        optimizer.zero_grad()
    save_by("torch's", tmp_path / str(idle), model, optimizer)
    load_by("torch's", tmp_path / str(idle), other, fresh)
    states = [safe_get_full_optimizer_state(each["used"].weight, "momentum_buffer") for each in (model, other)]
    assert states[0] is not None
    check_same(*states)
