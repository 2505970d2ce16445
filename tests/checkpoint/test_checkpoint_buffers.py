"""Ranks may have different values of a buffer: a checkpoint has those of one rank, whoever saves it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor  # here once, not in every forked rank
from safetensors.torch import load_file
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.__main__ import main
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, save_checkpoint
from tests.support.checkpoints import differences
from tests.support.grid import Grid
from tests.support.ranks import run_ranks

WIDTH = 7


class Buffered(nn.Module):
    """Buffers of several dtypes and memory orders, a tied one, and one that isn't saved."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inward, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, 3).requires_grad_(False)
        self.register_buffer("order", torch.arange(WIDTH))
        self.register_buffer("mask", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("turned", torch.zeros(3, 5).t())
        self.register_buffer("low", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.again = nn.Module()
        self.again.register_buffer("order", self.order)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(self.norm(self.inward(x[:, self.order]))).square().mean()
        return out

    @torch.no_grad()
    def differ(self, rank: int) -> None:
        """Give all buffers values of this rank."""
        torch.manual_seed(rank)
        self.norm(torch.randn(9, WIDTH))
        self.order.copy_(torch.randperm(WIDTH))
        self.mask.copy_(torch.rand(WIDTH) < 0.5)
        for buffer in (self.turned, self.low, self.scratch):
            buffer.copy_(torch.randn(buffer.shape))
        self.count.fill_(rank + 1)


def start(seed: int, **options: Any) -> tuple[Buffered, LowLevelZeroOptimizer]:
    model = Buffered(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, LowLevelZeroOptimizer(torch.optim.SGD(trained, lr=0.1, momentum=0.9), model=model, **options)


def trained_apart(rank: int, **options: Any) -> tuple[Buffered, LowLevelZeroOptimizer]:
    """A model that has been trained, and whose buffers are this rank's."""
    model, optimizer = start(0, **options)
    optimizer.backward(model(torch.ones(4, WIDTH) * rank))
    optimizer.step()
    optimizer.zero_grad()
    model.differ(rank)
    return model, optimizer


def copied(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors}


def check_loaded(expected: dict[str, Tensor], model: nn.Module) -> None:
    assert differences(expected, copied(model.state_dict().items())) == []
    assert sorted(model.order.tolist()) == list(range(WIDTH))


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "async"])
def test_a_checkpoint_has_the_first_rank_s_buffers_and_saving_changes_none(in_background: bool, tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> dict[str, Tensor]:
        model, optimizer = trained_apart(rank)
        before = copied(model.state_dict().items())
        save_checkpoint(tmp_path / "a", model, optimizer, async_save=in_background).wait()
        assert differences(before, copied(model.state_dict().items())) == []
        return before

    def load(rank: int, world_size: int) -> None:
        model, optimizer = start(5)
        model.differ(rank + 7)
        scratch = model.scratch.clone()
        load_checkpoint(tmp_path / "a", model, optimizer)
        check_loaded(first, model)
        assert torch.equal(scratch, model.scratch)

    first, *others = run_ranks(save, 3)
    assert all(not torch.equal(first["norm.running_mean"], other["norm.running_mean"]) for other in others)
    for world_size in (1, 2, 3):
        run_ranks(load, world_size)
    assert main(["consolidate", str(tmp_path / "a"), str(tmp_path / "out")]) == 0
    assert differences(first, load_file(tmp_path / "out" / "model.safetensors")) == []


@pytest.mark.parametrize(("in_background", "optimizer_first"), [(False, True), (True, False)], ids=["at once", "async"])
def test_sharded_beside_a_model_s_state_dict_has_the_first_rank_s_buffers(
    in_background: bool, optimizer_first: bool, tmp_path: Path
) -> None:
    def state_of(model: nn.Module, optimizer: LowLevelZeroOptimizer) -> dict[str, Any]:
        state: dict[str, Any] = {"model": model.state_dict(), "optim": Sharded(optimizer)}
        return dict(reversed(state.items())) if optimizer_first else state

    def save(rank: int, world_size: int) -> dict[str, Tensor]:
        model, optimizer = trained_apart(rank)
        before = copied(model.state_dict().items())
        if in_background:
            writing = dcp.async_save(state_of(model, optimizer), checkpoint_id=tmp_path / "a")
            writing.result()
        else:
            dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "a")
        return before

    def load(rank: int, world_size: int) -> None:
        model, optimizer = start(5)
        model.differ(rank + 7)
        dcp.load(state_of(model, optimizer), checkpoint_id=tmp_path / "a")
        check_loaded(first, model)

    first, *_ = run_ranks(save, 3)
    for world_size in (2, 3):
        run_ranks(load, world_size)


@pytest.mark.parametrize("way", ["own", "sharded"])
def test_replicas_of_a_slice_write_no_buffers_either(way: str, tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> dict[str, Tensor]:
        model, optimizer = trained_apart(rank, **Grid.of(rank, (2, 2)).options("hybrid"))
        before = copied(model.state_dict().items())
        if way == "own":
            save_checkpoint(tmp_path / "a", model, optimizer)
        else:
            dcp.save({"model": model.state_dict(), "optim": Sharded(optimizer)}, checkpoint_id=tmp_path / "a")
        return before

    def load(rank: int, world_size: int) -> None:
        model, optimizer = start(5)
        if way == "own":
            load_checkpoint(tmp_path / "a", model, optimizer)
        else:
            dcp.load({"model": model.state_dict(), "optim": Sharded(optimizer)}, checkpoint_id=tmp_path / "a")
        check_loaded(first, model)

    first, *_ = run_ranks(save, 4)
    run_ranks(load, 2)


class Expert(nn.Module):
    """What some ranks share, with a buffer, beside one that all share."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.shared, self.expert = nn.BatchNorm1d(WIDTH), nn.ModuleDict({str(number): nn.BatchNorm1d(WIDTH)})


@pytest.mark.parametrize("way", ["own", "sharded"])
def test_buffers_of_experts_are_their_group_s_first_rank_s(way: str, tmp_path: Path) -> None:
    def made(rank: int) -> tuple[Expert, LowLevelZeroOptimizer]:
        model = Expert(rank % 2)
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        own = {groups[rank % 2]: list(model.expert.parameters())}
        return model, LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), own, model=model)

    def save_and_load(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer = made(rank)
        for each in model.modules():
            if isinstance(each, nn.BatchNorm1d):
                each.running_mean.fill_(rank + 1.0)
                each.num_batches_tracked.fill_(rank + 1)
        before, path = copied(model.named_buffers()), tmp_path / "a"
        if way == "own":
            save_checkpoint(path, model, optimizer)
        else:
            dcp.save({"model": model.state_dict(), "optim": Sharded(optimizer)}, checkpoint_id=path)
        other, its_optimizer = made(rank)
        if way == "own":
            load_checkpoint(path, other, its_optimizer)
        else:
            dcp.load({"model": other.state_dict(), "optim": Sharded(its_optimizer)}, checkpoint_id=path)
        return before, copied(other.named_buffers())

    saved, loaded = zip(*run_ranks(save_and_load, 4), strict=True)
    for rank, its in enumerate(loaded):
        expected = {name: saved[rank % 2 if name.startswith("expert") else 0][name] for name in its}
        assert differences(expected, its) == []


def test_parameters_that_no_optimizer_trains_are_the_first_rank_s(tmp_path: Path) -> None:
    """Code of the caller's may change them on each rank by itself, frozen ones too."""

    def made(seed: int) -> tuple[nn.Module, LowLevelZeroOptimizer]:
        torch.manual_seed(seed)
        model = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        model[2].requires_grad_(False)
        return model, LowLevelZeroOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model=model)

    def save_and_load(rank: int, world_size: int) -> list[float]:
        model, optimizer = made(0)
        with torch.no_grad():
            for each in model[1:]:
                each.weight.fill_(rank + 1.0)
        save_checkpoint(tmp_path / "a", model, optimizer)
        assert all((each.weight == rank + 1).all() for each in model[1:])
        other, its_optimizer = made(3)
        load_checkpoint(tmp_path / "a", other, its_optimizer)
        return sorted({*other[1].weight.flatten().tolist(), *other[2].weight.flatten().tolist()})

    assert run_ranks(save_and_load, 3) == [[1.0]] * 3


def test_tensors_among_extra_states_are_the_first_rank_s_for_torch_s_tools(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Tensor:
            return self.seen

        def set_extra_state(self, state: Tensor) -> None:
            self.seen = state

    def save(rank: int, world_size: int) -> None:
        model = nn.Sequential(*(Counting(2, 2) for _ in range(4)))
        for each in model:
            each.seen = torch.full((3,), float(rank))
        save_checkpoint(
            tmp_path / "a", model, LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        )

    def read(rank: int, world_size: int) -> list[float]:
        states = {f"{at}._extra_state": torch.full((3,), 9.0) for at in range(4)}
        dcp.load({"model": states}, checkpoint_id=tmp_path / "a")
        return [each.sum().item() for each in states.values()]

    run_ranks(save, 3)
    assert run_ranks(read, 1) == [[0.0] * 4]


def test_tensors_among_extra_states_may_lie_in_any_memory_order(tmp_path: Path) -> None:
    values = {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "with gaps": torch.arange(12).view(3, 4)[:, ::2],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "nested": [torch.arange(4).view(2, 2).t(), {"empty": {}, "list": []}],
    }

    class Keeping(nn.Linear):
        def get_extra_state(self) -> Any:
            return self.kept

        def set_extra_state(self, state: Any) -> None:
            self.kept = state

    def save_and_load(rank: int, world_size: int) -> list[str]:
        pairs = []
        for kept in (values, {}):
            model = Keeping(2, 2)
            model.kept = kept
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            pairs.append((model, LowLevelZeroOptimizer(inner, model=model)))
        save_checkpoint(tmp_path / "a", *pairs[0])
        load_checkpoint(tmp_path / "a", *pairs[1])
        return differences(values, pairs[1][0].kept)

    assert run_ranks(save_and_load, 2) == [[]] * 2


class Conjugated(nn.Module):
    """A buffer and an extra state that torch conjugates when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("waves", torch.zeros(4, dtype=torch.complex64))
        self.extra = torch.zeros(2, dtype=torch.complex64)

    def turn(self) -> None:
        self.waves = torch.polar(torch.ones(4), torch.arange(4.0)).conj()
        self.extra = torch.polar(torch.ones(2), torch.arange(1.0, 3.0)).conj()

    def get_extra_state(self) -> Tensor:
        return self.extra

    def set_extra_state(self, state: Tensor) -> None:
        self.extra = state


@pytest.mark.parametrize("async_save", [False, True])
def test_conjugated_tensors_are_saved_as_they_are_read(async_save: bool, tmp_path: Path) -> None:
    def live(rank: int, world_size: int) -> None:
        saved, loaded = Conjugated(), Conjugated()
        pairs = [
            (model, LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model))
            for model in (saved, loaded)
        ]
        saved.turn()
        assert saved.waves.is_conj()
        save_checkpoint(tmp_path / "step-1", *pairs[0], async_save=async_save).wait()
        load_checkpoint(tmp_path / "step-1", *pairs[1])
        assert torch.equal(loaded.waves, saved.waves.resolve_conj())
        assert torch.equal(loaded.extra, saved.extra.resolve_conj())

    run_ranks(live, 2)
