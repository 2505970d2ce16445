"""Checkpoints and torch's own tools: what is saved here they load with no code of ours, and the other way round."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.support.checkpoints import AFTER, BEFORE, Training, differences
from tests.support.ranks import run_ranks

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


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def ours(seed: int, stage: int = 2) -> tuple[Net, LowLevelZeroOptimizer]:
    model = Net(seed)
    return model, LowLevelZeroOptimizer(adamw(model.parameters()), model=model, partition_grad=stage == 2)


def step(model: nn.Module, optimizer: Any, at: int) -> None:
    loss = model(batch(at))
    if isinstance(optimizer, LowLevelZeroOptimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def by_name(model: nn.Module, state: dict[int, dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """An optimizer's whole state, by the names of its parameters."""
    names = [name for name, _ in model.named_parameters()]
    return {names[place]: values for place, values in state.items()}


def whole(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Copies of the model's and the optimizer's tensors."""
    return copy.deepcopy(dict(model.state_dict())), by_name(model, optimizer.state_dict()["state"])


def saved(rank: int, world_size: int, path: Path) -> Any:
    model, optimizer = ours(0)
    for at in range(3):
        step(model, optimizer, at)
    save_checkpoint(path, model, optimizer)
    return whole(model, optimizer)


@contextmanager
def one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to .* in a single process.*", UserWarning)
        yield


# What is saved here


def test_torch_s_converter_and_loader_have_all_in_its_shape(tmp_path: Path) -> None:
    model, state = run_ranks(saved, 3, tmp_path / "a")[0]
    with one_process():
        dcp_to_torch_save(tmp_path / "a", tmp_path / "whole.pt")
        found = torch.load(tmp_path / "whole.pt", weights_only=True)
        plain = Net(5)
        dcp.load({"model": plain.state_dict()}, checkpoint_id=tmp_path / "a")
    assert differences(model, found["model"]) == []
    assert differences(state, found["optim"]["state"]) == []
    assert set(found["optim"]["param_groups"][0]["params"]) == set(dict(plain.named_parameters()))
    assert differences(model, dict(plain.state_dict())) == []


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


NEWER = pytest.mark.skipif(fully_shard is None, reason="FSDP2 of torch 2.5 asks for a GPU")


@pytest.mark.parametrize(("make", "world_size"), [(ddp, 2), pytest.param(fsdp, 3, marks=NEWER)])
def test_other_runs_load_model_and_optimizer_by_name(make: Any, world_size: int, tmp_path: Path) -> None:
    model, state = run_ranks(saved, 5 - world_size, tmp_path / "a")[0]

    def load(rank: int, world_size: int) -> list[str]:
        other, optimizer = make(7)
        own, of_optimizer = get_state_dict(other, optimizer)
        dcp.load({"model": own, "optim": of_optimizer}, checkpoint_id=tmp_path / "a")
        set_state_dict(other, optimizer, model_state_dict=own, optim_state_dict=of_optimizer)
        own, of_optimizer = get_state_dict(other, optimizer)
        wrong = differences(model, gathered(own), at="model")
        return wrong + differences(state, gathered(of_optimizer["state"]), at="state")

    assert run_ranks(load, world_size) == [[]] * world_size


# What others have saved


@pytest.mark.parametrize(("make", "world_size"), [(ddp, 3), pytest.param(fsdp, 2, marks=NEWER)])
def test_what_other_runs_saved_goes_on_here(make: Any, world_size: int, tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> Any:
        model, optimizer = make(0)
        for at in range(3):
            step(model, optimizer, at)
        own, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optim": of_optimizer}, checkpoint_id=tmp_path / "a")
        flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        dcp.save({"model": own, "optim": flat}, checkpoint_id=tmp_path / "flat")
        at_save = copy.deepcopy((gathered(own), gathered(of_optimizer["state"])))
        step(model, optimizer, 3)
        return at_save, gathered(get_state_dict(model, optimizer)[0])

    (model, state), later = run_ranks(save, 5 - world_size)[0]

    def load(rank: int, world_size: int) -> list[str]:
        wrong = []
        for saved, partly in (("a", False), ("flat", True)):  # without param groups that are any others'
            other, optimizer = ours(7)
            both = {"model": other.state_dict(), "optim": Sharded(optimizer)}
            planner = default_planner.DefaultLoadPlanner(allow_partial_load=partly)
            dcp.load(both, checkpoint_id=tmp_path / saved, planner=planner)
            own, its_state = whole(other, optimizer)
            wrong += differences(model, own, at=f"{saved}: model") + differences(state, its_state, at=f"{saved}: state")
            step(other, optimizer, 3)
            wrong += differences(later, dict(other.state_dict()), tolerance=1e-6, at=f"{saved}: later")
        return wrong

    assert run_ranks(load, world_size) == [[]] * world_size


# In a loop of one's own


@pytest.mark.parametrize(("dtype", "asynchronous"), [(torch.bfloat16, True), (torch.float16, False)], ids=str)
def test_an_optimizer_travels_in_ones_own_checkpoint(dtype: torch.dtype, asynchronous: bool, tmp_path: Path) -> None:
    training = Training(dtype=dtype)

    def save(rank: int, world_size: int) -> Any:
        pair = training.start().train(BEFORE, rank, world_size)
        state = {"model": pair.model.state_dict(), "optim": Sharded(pair.optimizer), "epoch": 4}
        if asynchronous:
            at_save = pair.whole()
            writing = dcp.async_save(state, checkpoint_id=tmp_path / "a")
            if fully_shard is None:  # torch 2.5 doesn't copy what is on the host, the model's tensors either
                writing.result()
            pair.train(AFTER, rank, world_size)
            writing.result()
        else:
            dcp.save(state, checkpoint_id=tmp_path / "a")
            at_save = pair.whole()
            pair.train(AFTER, rank, world_size)
        return at_save, pair.whole()

    at_save, later = run_ranks(save, 3)[0]

    def load(rank: int, world_size: int) -> list[str]:
        pair = training.start(seed=3)
        state: dict[str, Any] = {"model": pair.model.state_dict(), "optim": Sharded(pair.optimizer), "epoch": 0}
        dcp.load(state, checkpoint_id=tmp_path / "a")
        wrong = differences(at_save, pair.whole()) + differences(4, state["epoch"])
        pair.train(AFTER, rank, world_size)
        return wrong + (differences(later, pair.whole()) if world_size == 3 else [])

    assert run_ranks(load, 3) == [[]] * 3
    assert run_ranks(load, 2) == [[]] * 2


def test_states_that_are_no_tensors_travel_too(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p]["times"] = self.state[p].get("times", 0) + 1
            return super().step(closure)

    def start(seed: int) -> tuple[Net, LowLevelZeroOptimizer]:
        model = Net(seed)
        inner = Counting(model.parameters(), lr=0.1, momentum=0.5)
        return model, LowLevelZeroOptimizer(inner, model=model, split="elements")

    def save_and_load(rank: int, world_size: int) -> list[str]:
        model, optimizer = start(0)
        step(model, optimizer, 0)
        optimizer.param_groups[0]["lr"] = 0.25
        dcp.save({"model": model.state_dict(), "optim": Sharded(optimizer)}, checkpoint_id=tmp_path / "a")
        other, its = start(1)
        dcp.load({"model": other.state_dict(), "optim": Sharded(its)}, checkpoint_id=tmp_path / "a")
        return differences(optimizer.state_dict(), its.state_dict())

    assert run_ranks(save_and_load, 2) == [[], []]


class Secretive(torch.optim.Adam):
    """No other one can be made to find out what state it will have."""

    def __init__(self, parameters: Any, run: str) -> None:
        super().__init__(parameters, lr=0.01)


def secretive(seed: int, steps: int) -> tuple[Net, LowLevelZeroOptimizer]:
    model = Net(seed)
    optimizer = LowLevelZeroOptimizer(Secretive(model.parameters(), "a"), model=model, split="elements")
    for at in range(steps):
        step(model, optimizer, at)
    return model, optimizer


def test_state_that_a_fresh_optimizer_did_not_ask_for_is_missed(tmp_path: Path) -> None:
    def save_and_load(rank: int, world_size: int) -> list[str]:
        _, optimizer = secretive(0, 2)
        dcp.save({"optim": Sharded(optimizer)}, checkpoint_id=tmp_path / "a")
        with pytest.raises(ValueError, match="load its step into.*load_checkpoint"):
            dcp.load({"optim": Sharded(secretive(1, 0)[1])}, checkpoint_id=tmp_path / "a")
        _, other = secretive(1, 1)
        dcp.load({"optim": Sharded(other)}, checkpoint_id=tmp_path / "a")
        return differences(optimizer.state_dict(), other.state_dict())

    assert run_ranks(save_and_load, 2) == [[], []]


def test_weights_that_were_loaded_before_are_what_is_saved(tmp_path: Path) -> None:
    """Masters of 16-bit weights follow edits of the model at the next step, or when they are looked at."""

    def save_and_load(rank: int, world_size: int) -> list[str]:
        pair = Training(dtype=torch.bfloat16).start().train(BEFORE, rank, world_size)
        with torch.no_grad():
            for p in pair.model.parameters():
                p.add_(1.0)
        dcp.save({"model": pair.model.state_dict(), "optim": Sharded(pair.optimizer)}, checkpoint_id=tmp_path / "a")
        again = Training(dtype=torch.bfloat16).start(seed=3)
        dcp.load({"model": again.model.state_dict(), "optim": Sharded(again.optimizer)}, checkpoint_id=tmp_path / "a")
        for each in (pair, again):
            each.train(AFTER, rank, world_size)
        return differences(pair.whole(), again.whole())

    assert run_ranks(save_and_load, 2) == [[], []]


def test_another_optimizer_s_groups_are_refused() -> None:
    def load(rank: int, world_size: int) -> str:
        state = Sharded(ours(0)[1]).state_dict()
        model = Net(1)
        parameters = list(model.parameters())
        inner = adamw([{"params": parameters[:2]}, {"params": parameters[2:]}])
        other = LowLevelZeroOptimizer(inner, model=model)
        with pytest.raises(ValueError, match="expected 2 param groups, got 1") as caught:
            Sharded(other).load_state_dict(state)
        return str(caught.value)

    assert all("build the optimizer with the groups" in told for told in run_ranks(load, 2))


def test_torch_s_own_state_dicts_of_an_optimizer_name_what_to_use() -> None:
    def attempt(rank: int, world_size: int) -> list[str]:
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
        return differences(before, whole(model, optimizer)) + differences([0.01] + [None] * 7, settings)

    assert run_ranks(attempt, 2) == [[], []]
